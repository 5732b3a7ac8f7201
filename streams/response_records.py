"""Records of `responses` (token streams), `results` and `usage` (one a request), keyed by request
id."""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default
from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvlane.streams.record_base import PublicRecord


class TurnPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the result of an earlier response is in `results`."""

    id: str
    partition: int
    offset: int


class ResultError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An error in the form of the OpenAI API. Part of a Result."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ResultUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, over all its attempts. Part of a Result.

    `unknown`: the names of those that its server has not reported, which are 0; absent for none.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0
    unknown: tuple[str, ...] | UnsetType = UNSET


class ResultTimings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times of a request in milliseconds, from append to append. Part of a Result.

    From the append of its prompt, over HTTP from that of its request. `queued_ms`: until the append
    of its request; `ttft_ms`: until its first tokens, None if unknown; `total_ms`: until its end.
    `finished_ms`: the end, in ms since 1970.
    """

    queued_ms: int = 0
    ttft_ms: int | None = None
    total_ms: int = 0
    finished_ms: int = 0


class StoredTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What continues a stored response: the items of its input since those in the results at
    `history`, and the id of the first response, if it continued one. Part of a Result."""

    input: list[dict[str, Any]]
    history: tuple[TurnPlace, ...] = ()
    conversation: str | UnsetType = UNSET


class Result(PublicRecord, frozen=True, tag="Result", omit_defaults=False):
    """A finished request, as one record. All fields but `stored` are present on the wire.

    `status`: completed, failed or cancelled; `status_code`: of the HTTP response. `body`: the
    response object of the OpenAI API, None with an `error`. `kind`, `metadata`, `batch_id`,
    `custom_id`: of the prompt. `attempts`: how often it was begun. A stored response has the kind
    `response`, its `body` also with an `error`, and `stored`.
    """

    id: str
    status: str
    status_code: int
    model: str = ""
    kind: str = "chat"
    body: dict[str, Any] | None = None
    usage: ResultUsage | None = None
    error: ResultError | None = None
    timings: ResultTimings = ResultTimings()
    attempts: int = 0
    metadata: dict[str, Any] = {}
    batch_id: str = ""
    custom_id: str = ""
    stored: StoredTurn | UnsetType = UNSET


class RequestUsage(PublicRecord, frozen=True, tag="RequestUsage", omit_defaults=False):
    """The usage of one request, to be billed, at its end. All fields are present on the wire.

    `code`: how it ended, stop and length: completely. `ended_ms`: since 1970. `model`: the one that
    ran; `alias`: the name in the request, if it was another; `adapter`: a LoRA of the model. Tokens
    of the prompt count once, when a worker has computed them. `cached_tokens`, `reasoning_tokens`:
    those among the tokens of prompt and output. `recomputed_tokens`: computed again by a later
    worker after a failure or a preemption. `attempts`: how often it was begun; `workers`: in that
    order; `prefill_ms`, `decode_ms`: of all of them. `unknown`: the names of counts that no server
    has reported, or that are incomplete.
    """

    id: str
    code: str
    ended_ms: int
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    alias: str = ""
    adapter: str = ""
    service_class: str = "interactive"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    recomputed_tokens: int = 0
    attempts: int = 0
    prefill_ms: int = 0
    decode_ms: int = 0
    workers: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


FinishReason = Literal[
    "stop", "length", "cancelled", "error", "content_filter", "tool_calls", "function_call"
]
"""How an answer ended; the last two if a server reports them. On the wire any string, see
`PublicRecord`.
"""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Token counts of a whole request, over all its attempts. Part of a Chunk.

    `details`: further counts of a server, under OpenAI's names. `unknown`: the names of the counts
    above that no server has reported; they are 0.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    details: dict[str, Any] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def reasoning_tokens(self) -> int:
        """Those of the completion, as far as a server reports them in its details."""
        details = (self.details or {}).get("completion_tokens_details")
        found = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return found if isinstance(found, int) else 0


class LogProb(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token and the logarithm of its probability. Part of a Chunk, as [id, number].

    Workers write numbers only; null, of earlier ones, was no number in JSON.
    """

    token_id: int
    log_prob: float | None


class PassthroughDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Output that is not text: parsed by the worker, or a server's, unchanged. Part of a Chunk.

    `at`: length of the whole text before it. `delta`, `choice`, `event`: fields of the choice's
    delta (tool calls, reasoning …), of the choice, and of the event in OpenAI's form.
    """

    at: int = 0
    delta: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    event: dict[str, Any] = {}


class Chunk(PublicRecord, frozen=True, tag="Chunk"):
    """Some tokens of the answer. `run` is a u64 in decimals, for JSON readers without 64 bits.

    `seq` counts the Chunks of a run from 0. `index`: place of the first token in the whole answer,
    over all attempts; `chars`: length of the whole text after this Chunk. `stop_reason`: the stop
    string or token id that ended the answer; None for an end of text. `log_probs`: for each token,
    its own, then the likeliest; `token_chars`: with them, the characters that each token completes.
    `invalid`: the reason of an end with an error in the request; `invalid_status`: its HTTP status,
    if not 400. `data`: parts that are no text. `model`: its name, on the first Chunk of a run.
    """

    id: str
    attempt: int
    run: str
    seq: int
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    chars: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    invalid: str = ""
    data: tuple[PassthroughDelta, ...] = ()
    model: str = ""
    invalid_status: int = 0
    token_chars: tuple[int, ...] = ()


class Fence(PublicRecord, frozen=True, tag="Fence"):
    """`attempt` begins here; Chunks of lower attempts that come later do not count.

    `origin`: with reason renewed, the offset in `requests` of the record with the answer so far; -1
    in all others.
    """

    id: str
    attempt: int
    reason: str = ""
    origin: int = -1


class DryRunResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The result of a dry run: the worker, and the tokens of the prompt. Part of an End.

    `prefill_worker_id`: the worker of the prompt, if another one computes it.
    """

    worker_id: str
    dp_rank: int = 0
    token_ids: tuple[int, ...] = ()
    prefill_worker_id: str = ""
    prefill_dp_rank: int = 0


class End(PublicRecord, frozen=True, tag="End"):
    """A router ended the request with an EndCode; no last Chunk will come.

    `origin`: the offset of the record in `requests` that it ends; -1: unknown.
    """

    id: str
    code: str
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None
    placed: DryRunResult | None = None
    origin: int = -1
