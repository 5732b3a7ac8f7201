"""Remaining work of a request, all of it or the rest after a failure, and its continuation: the
options with which the rest is as without the failure.

The rest is a new request whose prompt ends with the tokens so far, with lower limits
(`resumed_request` in `app/serving/run_executor.py`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import QueueKey
from kvlane.app.settings import Settings
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import RequestOffset
from kvlane.streams.request import Request


class RemainingWork(NamedTuple):
    request: Request
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str] = frozenset()
    """Workers on which it failed."""
    emitted: Sequence[int] = ()
    """Token ids that readers have; `emitted_chars`: the length of their text; `emitted_data_chars`:
    of their `Chunk.data`."""
    emitted_chars: int = 0
    emitted_data_chars: int = 0
    renewal_ms: float = math.inf
    """Broker time at which its record is appended again, if it still waits."""

    @property
    def has_begun(self) -> bool:
        return bool(self.emitted or self.emitted_chars or self.excluded)

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens


class DeferredRequest(NamedTuple):
    """A `RemainingWork` without emitted tokens and without its request, which is in the log."""

    id: str
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str]
    queue_key: QueueKey
    size: QueueSize
    service_class: ServiceClass
    renewal_ms: float


def deadline_of(request: Request, appended_ms: int, settings: Settings) -> int:
    """The deadline of a request whose record was appended at `appended_ms`, in broker time. Its
    time limit counts from the append of its prompt. The record of a batch request must still be in
    the log when it changes hands: it ends `batch_run_limit_s` after its append (`renewal_of`)."""
    limit_ms = int(request.deadline_s * 1000)
    if request.service_class != "batch":
        since_ms = min(appended_ms, request.queued_ms or appended_ms)
        return since_ms + min(limit_ms, int(settings.max_lifetime_s * 1000))
    last_ms = (request.queued_ms or appended_ms) + limit_ms
    return min(last_ms, appended_ms + int(settings.batch_run_limit_s * 1000))


def renewal_of(request: Request, deadline_ms: int, settings: Settings) -> float:
    """When a request with this deadline is appended again, in broker time, while it waits for a
    worker: half of `max_lifetime_s` after the append of its record. inf: never."""
    last_ms = request.queued_ms + int(request.deadline_s * 1000)
    if request.service_class != "batch" or not request.queued_ms or last_ms <= deadline_ms:
        return math.inf
    return deadline_ms - 1000 * (settings.batch_run_limit_s - settings.max_lifetime_s / 2)


ContinuationClass = Literal["unaffected", "adjusted", "changed", "by_engine", "refused"]
"""`unaffected`: the option means the same for the rest. `adjusted`: the rest gets the remaining
part of it. `changed`: engines count only the tokens that they have generated themselves, so the
rest is another draw; refused if the answer was to be exact. `by_engine`: the rest is
for engines that can continue it (`EngineConfig.continues_guided`). `refused`: the answer cannot go
on."""

CONTINUATION: Mapping[str, ContinuationClass] = {
    "stop.max_tokens": "adjusted",
    "stop.min_tokens": "adjusted",
    "stop.max_thinking_tokens": "adjusted",
    "stop.stop": "unaffected",  # the text is made of all tokens
    "stop.stop_token_ids": "unaffected",
    "stop.stop_token_ids_hidden": "unaffected",
    "stop.ignore_eos": "unaffected",
    "sampling.temperature": "unaffected",
    "sampling.top_p": "unaffected",
    "sampling.top_k": "unaffected",
    "sampling.min_p": "unaffected",
    "sampling.seed": "adjusted",  # mixed with the tokens so far, so that no draw is repeated
    "sampling.n": "unaffected",  # each answer is a request
    "sampling.best_of": "unaffected",
    "sampling.use_beam_search": "unaffected",  # refused by every engine, like the next two
    "sampling.length_penalty": "unaffected",
    "sampling.detokenize": "unaffected",
    "sampling.presence_penalty": "changed",
    "sampling.frequency_penalty": "changed",
    "sampling.repetition_penalty": "unaffected",  # counts the prompt too
    "sampling.include_stop_str_in_output": "unaffected",
    "sampling.guided_decoding": "by_engine",
    "sampling.allowed_token_ids": "unaffected",
    "sampling.bad_words_token_ids": "refused",  # of several tokens: one may begin before the rest
    "sampling.logit_bias": "unaffected",
    "output.logprobs": "unaffected",
    "output.prompt_logprobs": "unaffected",
    "output.skip_special_tokens": "unaffected",
    "output.formatted_prompt": "unaffected",
    "output.return_tokens_as_token_ids": "unaffected",
    "eos_token_ids": "unaffected",
    "prompt_embeds": "refused",  # the tokens so far cannot follow them
    "multi_modal_data": "unaffected",
    "mm_processor_kwargs": "unaffected",
    "extra_args": "changed",  # logit processors of the server
    "body": "refused",
    "parsing": "unaffected",  # the parts are made of all tokens
}


def continuation_blocker(request: Request) -> str:
    """Why no engine can continue an answer to this request in its middle; "" if one can. Guided
    decoding is a rule on eligible workers (`app/routing/selection/eligibility.py`)."""
    sampling = request.sampling
    if request.body is not None:
        return "its engine gives no token ids to continue from"
    if any(len(word) > 1 for word in sampling.bad_words_token_ids or ()):
        return "bad words of several tokens cannot be recognised across the interruption"
    if request.prompt_embeds is not None:
        return "the tokens of an answer cannot follow embeddings"
    if is_exact(request) and (changed := _changed_options(request)):
        return f"{changed} would not count the tokens before the interruption"
    return ""


def is_exact(request: Request) -> bool:
    """True if the request has one exact answer: greedy, or drawn with a seed."""
    return request.sampling.temperature == 0 or request.sampling.seed is not None


def _changed_options(request: Request) -> str:
    """The options in use that make the rest another draw."""
    sampling = request.sampling
    used = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "extra_args": request.extra_args not in (None, b"", b"{}", b"null"),
    }
    return ", ".join(name for name, value in used.items() if value)
