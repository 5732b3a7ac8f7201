"""Requests of a period of the log, sampled by their ids: the same ones each time it is read.

Owns the choice of requests, and the prompt that repeats each. Reads `requests` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from hashlib import blake2b
from heapq import heappush, heappushpop
from typing import Any

import msgspec

from kvlane.app.operator_error import OperatorError
from kvlane.app.preprocess.request_reader import flatten
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.ports import Log
from kvlane.streams.prompt import Prompt
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.reading.range_reader import OffsetBounds, Progress, read_range
from kvlane.streams.records import ModelCard
from kvlane.streams.request import Request, ResultKind

REHEARSAL_TENANT = "rehearsal"
"""The tenant of all repeated requests, so that `kvlane usage` tells them apart."""
MAX_SAMPLE_BYTES = 256 * 1024 * 1024
"""Bound of the prompts of a sample, and of the answers to them, which are in memory."""
_RANK_BYTES = 8
_OF_TOKENS = frozenset({
    "token_ids", "stop_token_ids", "stop_token_ids_hidden", "allowed_token_ids", "logit_bias",
    "bad_words_token_ids",
})  # fmt: skip
"""Fields of a body that have token ids, which another tokenizer does not share."""


class RehearsalRefused(OperatorError):
    """A rehearsal that cannot take place; the message has the reason."""


class RequestSample:
    """The requests of a sample, by id. `read`: requests of the period that count, sampled or not;
    `left_out`: numbers of sampled requests that are not repeated, by reason."""

    def __init__(self, share: float, limit: int) -> None:
        self.requests: dict[str, Request] = {}
        self.left_out = Counter[str]()
        self._limit = limit
        self._below = int(share * 256**_RANK_BYTES)
        """Rank from which on requests do not belong to the sample."""
        self._heap: list[tuple[int, str]] = []
        self._bytes = 0

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and _rank_of(key) < self._below

    def add(self, request: Request) -> None:
        """Add a request, in the place of one of a higher rank if there are too many. Raises
        RehearsalRefused for a sample that is too large."""
        if request.tenant == REHEARSAL_TENANT or request.is_renewed or request.id in self.requests:
            return
        if reason := _unfit(request):
            self.left_out[reason] += 1
            return
        self.requests[request.id] = request
        self._bytes += request.prompt_bytes
        entry = (-_rank_of(request.id.encode()), request.id)
        if len(self._heap) < self._limit:
            heappush(self._heap, entry)
        else:
            rank, dropped = heappushpop(self._heap, entry)
            self._bytes -= self.requests.pop(dropped).prompt_bytes
            self._below = -rank
        check_size(self._bytes, "prompts")


def check_size(size: int, what: str) -> None:
    """Raises RehearsalRefused above MAX_SAMPLE_BYTES."""
    if size > MAX_SAMPLE_BYTES:
        raise RehearsalRefused(
            f"the {what} of the sample have more than {MAX_SAMPLE_BYTES // 2**20} MiB",
            correction="Give a lower --share or --limit.",
        )


async def sample_requests(
    log: Log, clock: Clock, bounds: OffsetBounds, model: str, sample: RequestSample,
    progress: Progress = lambda _done, _total: None,
) -> None:  # fmt: skip
    """Add the requests for a model ("": any), by its name or an alias. Raises RehearsalRefused,
    BrokerUnavailable, PositionLost, NewerRecord."""
    decoding = RecordDecoder(log, clock)
    reading = read_range(log, clock, *bounds, progress=progress, keys=sample)
    async with aclosing(reading) as pieces:
        async for source, records, _ in pieces:
            for log_record in await decoding.decode_records(source, records):
                request = log_record.record
                if isinstance(request, Request) and model in ("", request.model, request.alias):
                    sample.add(request)


def _rank_of(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=_RANK_BYTES).digest(), "little")


def _unfit(request: Request) -> str:
    """Why a request cannot be repeated; "" if it can."""
    if request.is_query or request.is_probe:
        return "dry runs and probes"
    if request.kind == "embedding":
        return "embeddings"
    if request.prompt_embeds or request.multi_modal_data or request.mm_routing_info:
        return "prompts that are not text alone"
    return ""


def is_exact(request: Request) -> bool:
    """Whether the same model repeats the answer token by token: it is greedy, or has a seed."""
    sampling: Any = request.sampling
    if request.body is not None:
        fields = msgspec.json.decode(request.body.json, type=dict[str, Any])
        temperature, seed, top_k = (fields.get(n) for n in ("temperature", "seed", "top_k"))
    else:
        temperature, seed, top_k = sampling.temperature, sampling.seed, sampling.top_k
    return temperature == 0 or seed is not None or top_k == 1


def rehearsal_id(request: Request, card: ModelCard, label: str) -> str:
    """The id of a repeated request: the same for the same request, model, files and label."""
    parts = f"{request.id}\0{card.name}\0{card.checksum}\0{label}"
    return f"rehearsal-{blake2b(parts.encode(), digest_size=16).hexdigest()}"


def rehearsal_prompt(
    request: Request, source_card: ModelCard | None, card: ModelCard, text: str | None,
    prompt_id: str, deadline_s: float,
) -> Prompt:  # fmt: skip
    """The prompt of class batch that repeats a request, without its routing, session,
    priority and reply. `card`: of the target; `source_card`: of its own model, None if unknown;
    `text`: its prompt, if they have different tokenizers. Raises RehearsalRefused if the target
    cannot take it."""
    kind: ResultKind
    if (body := request.body) is not None:
        kind, fields = body.kind, msgspec.json.decode(body.json, type=dict[str, Any])
        for name in ("n", "nvext", "stream", "stream_options"):
            fields.pop(name, None)
        if card.kind not in ("tokens", kind):
            raise RehearsalRefused(f"bodies of another kind than the {card.kind} of the target")
    elif card.kind != "tokens":
        raise RehearsalRefused("prompts in tokens, where the target takes bodies only")
    else:
        kind, fields = "tokens", _fields_of(request, source_card)
        if text is not None:
            kind = "completion"
            fields = {n: value for n, value in fields.items() if n not in _OF_TOKENS}
            fields |= {"prompt": text, "add_special_tokens": False}
    return Prompt(
        id=prompt_id, kind=kind, body=fields | {"model": card.name}, tenant=REHEARSAL_TENANT,
        service_class="batch", deadline_s=deadline_s,
    )  # fmt: skip


def _fields_of(request: Request, source_card: ModelCard | None) -> dict[str, Any]:
    """The options of a request that decide its answer, as fields of a body for tokens."""
    stop, guided = msgspec.to_builtins(request.stop), request.sampling.guided_decoding
    context = None if source_card is None else source_card.context_length
    if context is not None and request.stop.max_tokens == context - request.prompt_tokens:
        del stop["max_tokens"]  # the client set no limit
    sampling = msgspec.to_builtins(
        msgspec.structs.replace(request.sampling, guided_decoding=None), str_keys=True
    )
    if guided is not None:
        forms = {name: getattr(guided, name) for name in guided.__struct_fields__}
        sampling["guided_decoding"] = {
            name: msgspec.json.decode(form) if isinstance(form, bytes) else form
            for name, form in forms.items()
        }
    output = {"skip_special_tokens": request.output.skip_special_tokens}
    groups: Mapping[str, Any] = {
        "token_ids": list(unpack_tokens(request.token_ids)),
        "stop_conditions": stop,
        "sampling_options": sampling,
        "output_options": output,
        "cache_salt": request.cache_salt or None,
        "routing": {"lora_name": request.hints.lora_name},
    }
    return {n: value for n, value in flatten(groups).fields.items() if n not in _GROUPS_OF_BODY}


_GROUPS_OF_BODY = ("stop_conditions", "sampling_options", "output_options", "routing")
