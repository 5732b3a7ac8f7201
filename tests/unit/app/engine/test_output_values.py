"""Tests of values of outputs that records can carry, and the refusal of others by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvlane.app.engine.interface import EngineError, EngineOutput
from kvlane.app.engine.output_values import (
    LOWEST_LOG_PROB,
    check_config,
    checked_output,
    checked_stats,
)
from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import (
    Chunk,
    EngineConfig,
    EngineStats,
    LogProb,
    PassthroughDelta,
    Usage,
)

NAN, INF = math.nan, math.inf


def likely(*numbers: Any) -> dict[str, Any]:
    """Fields of a token with these log probabilities."""
    return {"token_ids": (7,), "log_probs": (tuple(LogProb(7, n) for n in numbers),)}


def ended(**fields: Any) -> dict[str, Any]:
    return {"finish_reason": "stop"} | fields


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (likely(NAN), "log_probs nan"),
        (likely(-1.0, NAN), "log_probs nan"),
        (likely(INF), "log_probs inf"),
        (likely("-1"), "log_probs '-1'"),
        ({"token_ids": (7, 8), "log_probs": ((LogProb(7, -1.0),),)}, "log_probs of 1 tokens"),
        ({"token_ids": (7.0,)}, "token_ids 7.0"),
        ({"token_ids": (True,)}, "token_ids True"),
        ({"token_ids": (-1,)}, "token_ids -1"),
        ({"token_ids": (2**32,)}, "token_ids 4294967296"),
        ({"text": "a\ud800"}, "text"),
        ({"text": b"a"}, "text"),
        ({"data": (PassthroughDelta(delta={"a": [{"b": NAN}]}),)}, "delta.a[0].b is nan"),
        ({"data": (PassthroughDelta(choice={"logprobs": {"content": [-INF]}}),)}, "data[0]"),
        ({"data": (PassthroughDelta(event={"a": object()}),)}, "data[0]"),
        ({"data": (PassthroughDelta(event={"a": "\udfff"}),)}, "data[0]"),
        ({"data": (PassthroughDelta(at=NAN, delta={"a": 1}),)}, "data[0]"),  # type: ignore[arg-type]
        ({"data": (PassthroughDelta(at=1.5, delta={"a": 1}),)}, "data[0].at"),  # type: ignore[arg-type]
        ({"usage": Usage(prompt_tokens=NAN)}, "usage.prompt_tokens nan"),  # type: ignore[arg-type]
        ({"usage": Usage(completion_tokens=2**32)}, "usage.completion_tokens"),
        ({"usage": Usage(cached_tokens=-1)}, "usage.cached_tokens -1"),
        ({"usage": Usage(details={"rate": INF})}, "rate is inf"),
        (ended(stop_reason=NAN), "stop_reason nan"),
        (ended(stop_reason=2**70), "stop_reason"),
        (ended(message="\ud800"), "message"),
        ({"finish_reason": 3}, "finish_reason 3"),
    ],
)
def test_value_that_no_reader_could_decode_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError) as refused:
        checked_output(EngineOutput(**fields))
    assert named in str(refused.value)
    assert refused.value.retryable


@pytest.mark.parametrize(
    "fields",
    [
        likely(-0.5, -1e30, -INF),
        likely(-1),
        {"text": "a\u0000é😀"},
        {"data": (PassthroughDelta(at=1, delta={"a": [None, 1.5, (1, 2)], "b": 10**30}),)},
        {"usage": Usage(prompt_tokens=2**32 - 1, details={"a": {"b": None}})},
        ended(stop_reason=2**62),
    ],
)
def test_checked_output_can_be_read_from_the_log(fields: dict[str, Any]) -> None:
    output = checked_output(EngineOutput(**fields))
    chunk = Chunk(
        id="a", attempt=0, run="1", seq=0, index=0, token_ids=output.token_ids, text=output.text,
        finish_reason=output.finish_reason, usage=output.usage, stop_reason=output.stop_reason,
        log_probs=output.log_probs, data=output.data,
    )  # fmt: skip
    read = decode(MemoryRecord("responses", 0, 0, 0, *encode(chunk, "a")))
    assert isinstance(read, Chunk)
    for ranking in read.log_probs or ():
        assert all(each.log_prob is not None for each in ranking)


def test_minus_infinity_is_the_lowest_log_probability() -> None:
    (ranking,) = checked_output(EngineOutput(**likely(-0.5, -INF))).log_probs or ()
    assert [each.log_prob for each in ranking] == [-0.5, LOWEST_LOG_PROB]


@pytest.mark.parametrize("odd", [NAN, 1.0, -1, 2**64])
def test_statistics_that_a_heartbeat_cannot_carry_are_left_out(odd: Any) -> None:
    assert checked_stats(EngineStats(running=odd)) is None
    assert checked_stats(EngineStats(running=3)) == EngineStats(running=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_length", np.int64(4096)),
        ("total_kv_blocks", 2**64),
        ("curve", (1.0, NAN)),
        ("transfer_lease_s", INF),
        ("model", "a\ud800"),
    ],
)
def test_config_that_a_card_cannot_carry_is_refused_by_name(field: str, value: Any) -> None:
    given: dict[str, Any] = {"model": "m"} | {field: value}
    with pytest.raises(EngineError, match=rf"config\.{field} "):
        check_config(EngineConfig(**given))


def test_config_with_all_fields_passes() -> None:
    config = EngineConfig(model="m", context_length=9, curve=(1.0, 2.0), lora_names=("a",))
    check_config(config)
