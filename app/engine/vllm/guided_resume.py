"""Continuation of answers with guided decoding in vLLM's engine core: the grammar of a request
accepts the tokens of its answer so far before it guides the rest.

    VllmEngine ─► extra_args[TAKEN_FIELD] ─► _create_grammar ─► accept_tokens ─► guided rest

vLLM begins each grammar at its root. The plugin replaces the method of `StructuredOutputManager`
that compiles the grammar of one request, in a thread beside the steps of the engine; an error there
ends this request alone. A logits processor would need a second compiler, in the process of the
model and within its steps, and has no place in speculative decoding.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

TAKEN_FIELD = "kvlane_taken_tokens"
"""Field of `SamplingParams.extra_args`: how many tokens at the end of the prompt are of the answer.
Clients may not set it."""
_EXPECTED = {
    "_create_grammar": ["self", "request"],
    "_get_reasoner": ["self", "request"],
    "_get_constraint_bounds": ["self", "request", "spec_tokens", "spec_tokens_committed"],
}


def interface_fault() -> str:
    """How vLLM's interface differs from the one that is replaced here; "" if it does not."""
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    for name, expected in _EXPECTED.items():
        method = getattr(StructuredOutputManager, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != expected:
            return (
                f"vLLM's StructuredOutputManager.{name} has the parameters {found}, not {expected}"
            )
    accept = getattr(StructuredOutputGrammar, "accept_tokens", None)
    if accept is None or list(inspect.signature(accept).parameters) != [
        "self", "request_id", "tokens",
    ]:  # fmt: skip
        return "vLLM's StructuredOutputGrammar.accept_tokens has other parameters"
    return ""


def install() -> None:
    """Replace vLLM's method, unless its interface is another one. Idempotent."""
    from vllm.v1.structured_output import StructuredOutputManager

    plain = StructuredOutputManager._create_grammar  # noqa: SLF001 - vLLM has no hook
    if getattr(plain, "is_kvlane", False):
        return
    if fault := interface_fault():
        log.warning("answers with guided decoding end with their worker: %s", fault)
        return

    @functools.wraps(plain)
    def create(manager: Any, request: Any) -> Any:
        grammar = plain(manager, request)
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        count = (extra or {}).get(TAKEN_FIELD)
        if count is not None:
            _accept(manager, request, grammar, int(count))
        return grammar

    create.is_kvlane = True  # type: ignore[attr-defined]
    StructuredOutputManager._create_grammar = create  # noqa: SLF001


def _accept(manager: Any, request: Any, grammar: Any, count: int) -> None:
    """Raises ValueError if the grammar refuses the last `count` tokens of the prompt."""
    prompt = request.prompt_token_ids or []
    if not 0 < count <= len(prompt):
        raise ValueError(f"{TAKEN_FIELD} is {count}, and the prompt has {len(prompt)} tokens")
    guided = _guided_part(manager, request, prompt[-count:])
    if not grammar.accept_tokens(request.request_id, list(guided)):
        raise ValueError("the tokens of the answer so far do not fit its grammar")


def _guided_part(manager: Any, request: Any, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens of an answer that its grammar guides: those after its reasoning, where the engine
    has a reasoning parser of its own."""
    reasoner = manager._get_reasoner(request)  # noqa: SLF001
    if reasoner is None or manager.enable_in_reasoning:
        return tokens
    if reasoner.is_reasoning_end(request.prompt_token_ids[: -len(tokens)]):
        return tokens
    state = request.structured_output_request
    state.reasoning_ended = False  # otherwise vLLM looks for it in the tokens so far, too
    start = manager._get_constraint_bounds(  # noqa: SLF001
        request, tokens, spec_tokens_committed=True
    ).grammar_start
    state.reasoning_ended = start <= len(tokens)
    return tokens[start:]
