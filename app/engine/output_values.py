"""The check of an engine's values, where they enter a worker (`app/serving/run_executor.py`).

Refuses, by the name of the field, numbers that JSON does not have, integers of other types and
strings that are not UTF-8; replaces only log probabilities of minus infinity.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.interface import U32_MAX, EngineError, EngineOutput
from kvlane.streams.records import EngineConfig, EngineStats, LogProb, Usage

LOWEST_LOG_PROB = -9999.0
"""Stands for minus infinity, a token that cannot be chosen, as in vLLM's OpenAI server."""

_encode = msgspec.json.Encoder().encode
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def checked_output(output: EngineOutput) -> EngineOutput:
    """The output as it may be written. Raises EngineError for a value that records cannot carry.
    Another worker may succeed: its weights may be whole."""
    for token_id in output.token_ids:
        _check_token("token_ids", token_id)
    _check_text("text", output.text)
    if output.finish_reason is not None:
        _check_end(output)
    if output.usage is not None:
        _check_usage(output.usage)
    for number, item in enumerate(output.data):
        if fault := json_fault(item):
            raise _refused(f"data[{number}] that is not JSON: {fault}")
        if type(item.at) is not int:
            raise _unusable(f"data[{number}].at", item.at, "a position is an integer")
    if output.log_probs is None:
        return output
    if len(output.log_probs) != len(output.token_ids):
        raise _refused(
            f"log_probs of {len(output.log_probs)} tokens with {len(output.token_ids)} tokens"
        )
    return replace(output, log_probs=tuple(map(_checked_ranking, output.log_probs)))


def checked_stats(stats: EngineStats | None) -> EngineStats | None:
    """The statistics of an engine; None if a heartbeat cannot carry them, whole numbers of 64 bits.
    Without statistics a worker is served by its own count of runs."""
    if stats is None:
        return None
    fields = msgspec.structs.astuple(stats)
    return stats if all(type(n) is int and 0 <= n < 1 << 63 for n in fields) else None


def check_config(config: EngineConfig) -> None:
    """Raise EngineError for a value that the card of a worker cannot carry."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        try:
            msgspec.msgpack.encode(value)
            fault = _non_finite(value, "")
        except (TypeError, ValueError, OverflowError) as e:
            fault = str(e)
        if fault:
            raise EngineError(f"the engine gave config.{name} {value!r:.100}: {fault}")


def json_fault(value: Any) -> str:
    """The part of a value that JSON cannot represent, with its place; "" without one."""
    try:
        encoded = _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        return str(e) or type(e).__name__
    # NaN and infinities are encoded as null.
    return _non_finite(msgspec.to_builtins(value), "") if b"null" in encoded else ""


def _non_finite(value: Any, place: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place.removeprefix('.')} is {value}"
    items: Any = ()
    if isinstance(value, dict):
        items = ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"[{number}]", item) for number, item in enumerate(value))
    return next(
        (fault for part, item in items if (fault := _non_finite(item, f"{place}{part}"))), ""
    )


def _checked_ranking(ranking: tuple[LogProb, ...]) -> tuple[LogProb, ...]:
    checked = []
    for likely in ranking:
        number = likely.log_prob
        if not isinstance(number, float | int) or math.isnan(number) or number == math.inf:
            raise _unusable("log_probs", number, f"of token {likely.token_id!r}")
        _check_token("log_probs", likely.token_id)
        checked.append(
            likely
            if type(number) is float and number != -math.inf
            else LogProb(likely.token_id, max(float(number), LOWEST_LOG_PROB))
        )
    return tuple(checked)


def _check_end(output: EngineOutput) -> None:
    _check_text("finish_reason", output.finish_reason)
    _check_text("message", output.message)
    stop = output.stop_reason
    if stop is None or (type(stop) is int and abs(stop) < 1 << 63):
        return
    _check_text("stop_reason", stop)


def _check_usage(usage: Usage) -> None:
    for name in _COUNTS:
        count = getattr(usage, name)
        if type(count) is not int or not 0 <= count <= U32_MAX:
            raise _unusable(f"usage.{name}", count, "a count is an integer of 32 bits")
    if usage.details is not None and (fault := json_fault(usage.details)):
        raise _refused(f"usage.details that are not JSON: {fault}")


def _check_token(field: str, token_id: Any) -> None:
    if type(token_id) is not int or not 0 <= token_id <= U32_MAX:
        raise _unusable(field, token_id, "a token id is an integer of 32 bits")


def _check_text(field: str, text: Any) -> None:
    if isinstance(text, str):
        if text.isascii():
            return
        with suppress(UnicodeEncodeError):
            text.encode()
            return
    raise _unusable(field, text, "it is a string of whole characters")


def _unusable(field: str, value: Any, rule: str) -> EngineError:
    return _refused(f"{field} {value!r:.100}: {rule}")


def _refused(reason: str) -> EngineError:
    return EngineError(f"the engine gave {reason}", retryable=True)
