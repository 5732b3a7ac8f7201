"""Tests of extensions of the OpenAI API, in the body and in headers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.nvext import NvExt, hints_of, mm_routing_of, routing_fields_of
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.streams import request as q

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BIGGEST = 2**64 - 1


def ext(headers: dict[str, str] | None = None, **fields: Any) -> NvExt:
    return read_openai("chat", CHAT | {"nvext": fields}, headers).ext


def hints(headers: dict[str, str] | None = None, **fields: Any) -> q.Hints:
    return hints_of(ext(headers, **fields))


def test_request_without_hints_has_no_hints_on_the_wire() -> None:
    assert hints() is q.NO_HINTS
    sent = msgspec.msgpack.encode(q.Request(id="a", hints=hints()))
    assert b"hints" not in sent
    assert msgspec.msgpack.decode(sent, type=q.Request).hints is q.NO_HINTS


# --- the body -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["backend_instance_id", "prefill_worker_id", "decode_worker_id"])
@pytest.mark.parametrize(("given", "name"), [(7, "7"), ("w1", "w1"), (BIGGEST, str(BIGGEST))])
def test_worker_is_named_or_numbered(field: str, given: Any, name: str) -> None:
    assert hints(**{field: given}) == q.Hints(**{field: name})


@pytest.mark.parametrize("given", [-1, 2**64, True, 1.5, "", "a b", ["w1"], "x" * 129])
def test_anything_else_is_no_worker(given: Any) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        ext(backend_instance_id=given)
    assert raised.value.field == "nvext.backend_instance_id"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, q.Hints()),
        ({"dp_rank": 0}, q.Hints(dp_rank=0)),
        ({"prefill_dp_rank": 3}, q.Hints(prefill_dp_rank=3)),
        ({"allowed_worker_ids": ["a", 7]}, q.Hints(allowed_worker_ids=("a", "7"))),
        ({"lora_name": "l"}, q.Hints(lora_name="l")),
        ({"agent_hints": {"osl": 50}}, q.Hints(expected_output_tokens=50)),
        ({"agent_hints": {"priority": 3}}, q.Hints(priority=3, priority_jump=3.0)),
        ({"agent_hints": {"priority": -3}}, q.Hints(priority=-3, priority_jump=0.0)),
        ({"agent_hints": {"latency_sensitivity": 1.5}}, q.Hints(priority_jump=1.5)),
        (
            {"agent_hints": {"latency_sensitivity": 1.5, "priority": 2}},
            q.Hints(priority=2, priority_jump=2.0),
        ),
        ({"agent_hints": {"strict_priority": 1}}, q.Hints(strict_priority=1)),
        ({"queue_class": "batch"}, q.Hints(queue_class="batch")),
        (
            {"session_control": {"session_id": "s"}},
            q.Hints(session_control=q.SessionControl(session_id="s")),
        ),
        (
            {"session_control": {"session_id": "s", "action": "close", "timeout": 5}},
            q.Hints(session_control=q.SessionControl(session_id="s", action="close", timeout=5)),
        ),
        (
            {"routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}}},
            q.Hints(
                routing_constraints=q.RoutingConstraints(
                    required_taints=("a",), preferred_taints={"b": 0.5}
                )
            ),
        ),
    ],
)
def test_hints_are_taken_over(fields: dict[str, Any], expected: q.Hints) -> None:
    assert hints(**fields) == expected


def test_targets_are_taken_over() -> None:
    assert routing_fields_of(ext(router={"ttft_target": 100}))["router"] == q.RouterParams(
        ttft_target=100.0
    )
    assert routing_fields_of(ext())["router"] is None


def test_settings_of_the_cost_are_taken_over() -> None:
    override = routing_fields_of(ext(router_config_override={"overlap_score_credit": 0}))[
        "router_config_override"
    ]
    assert override == q.RouterConfigOverride(overlap_score_credit=0.0)
    assert routing_fields_of(ext())["router_config_override"] is None


def test_agent_hints_are_passed_on() -> None:
    assert routing_fields_of(ext(agent_context={"id": ["a"]}))["agent_context"] == b'{"id":["a"]}'
    assert routing_fields_of(ext())["agent_context"] is None


def test_interval_of_a_stream_is_one_token_unless_it_is_given() -> None:
    bodies = [CHAT, CHAT | {"nvext": {"stream_interval": 8}}]
    assert [read_openai("chat", body).stream_interval for body in bodies] == [1, 8]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": 2**32}, "dp_rank"),
        ({"allowed_worker_ids": []}, "allowed_worker_ids"),
        ({"token_data": []}, "token_data"),
        ({"token_data": [2**32]}, "token_data.0"),
        ({"annotations": "x"}, "annotations"),
        ({"extra_fields": [1]}, "extra_fields.0"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 1025}, "stream_interval"),
        ({"cache_salt": "x" * 201}, "cache_salt"),
        ({"agent_context": "x"}, "agent_context"),
        ({"session_control": {}}, "session_control.session_id"),
        ({"session_control": {"session_id": "s", "action": "hide"}}, "session_control.action"),
        ({"router": {"itl_target": 0}}, "router.itl_target"),
        ({"use_raw_prompt": 1}, "use_raw_prompt"),
        (
            {"router_config_override": {"router_temperature": -1}},
            "router_config_override.router_temperature",
        ),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        ext(**fields)
    assert raised.value.field == f"nvext.{field}"


# --- headers --------------------------------------------------------------------------------------


def test_header_pins_the_worker_for_every_phase_but_prefill() -> None:
    expected = q.Hints(backend_instance_id="w1", decode_worker_id="w1")
    assert hints({"x-worker-instance-id": "w1"}) == expected


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-prefill-instance-id", "7", q.Hints(prefill_worker_id="7")),
        ("x-dp-rank", "0", q.Hints(dp_rank=0)),
        ("x-dp-rank", " 3 ", q.Hints(dp_rank=3)),
        ("x-prefill-dp-rank", "2", q.Hints(prefill_dp_rank=2)),
        ("x-session-id", "s", q.Hints(session_control=q.SessionControl(session_id="s"))),
        ("x-queue-class", "batch", q.Hints(queue_class="batch")),
    ],
)
def test_header_is_a_hint(header: str, value: str, expected: q.Hints) -> None:
    assert hints({header: value}) == expected


def test_headers_go_before_the_body() -> None:
    given = hints(
        {"x-worker-instance-id": "a", "x-prefill-instance-id": "b", "x-dp-rank": "1"},
        backend_instance_id="x",
        decode_worker_id="y",
        prefill_worker_id="z",
        dp_rank=9,
        prefill_dp_rank=8,
    )
    assert given == q.Hints(
        backend_instance_id="a",
        decode_worker_id="a",
        prefill_worker_id="b",
        dp_rank=1,
        prefill_dp_rank=8,
    )


def test_session_header_keeps_the_options_of_the_body() -> None:
    given = hints({"x-session-id": "s"}, session_control={"session_id": "x", "action": "open"})
    assert given.session_control == q.SessionControl(session_id="s", action="open")


def test_rank_for_prefill_may_be_unset() -> None:
    assert hints({"x-prefill-dp-rank": str(2**32 - 1)}, prefill_dp_rank=4).prefill_dp_rank == 4


def test_empty_header_is_ignored() -> None:
    assert hints({"x-worker-instance-id": "", "x-dp-rank": " "}, dp_rank=2) == q.Hints(dp_rank=2)


def test_other_headers_are_ignored() -> None:
    assert hints({"x-request-id": "r", "authorization": "Bearer k"}) == q.Hints()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-worker-instance-id", "a b"),
        ("x-prefill-instance-id", "a/b"),
        ("x-dp-rank", "one"),
        ("x-dp-rank", "-1"),
        ("x-dp-rank", str(2**32)),
        ("x-prefill-dp-rank", "1.5"),
        ("x-session-id", "s" * 201),
        ("x-queue-class", "c" * 201),
    ],
)
def test_wrong_header_is_named(header: str, value: str) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        ext({header: value})
    assert raised.value.field == header


# --- nulls ----------------------------------------------------------------------------------------

BLOCKS = [None, {"mm_objects": None}, {"mm_objects": [{"mm_hash": 1, "offsets": None}]}]


def test_null_in_a_field_with_another_default_is_not_given() -> None:
    session: dict[str, Any] = {"session_id": "s", "timeout": None, "action": None}
    taints = {"required_taints": None, "preferred_taints": None}
    routing = {"routing_token_ids": [1], "block_mm_infos": None}
    given = ext(session_control=session, routing_constraints=taints, mm_routing_info=routing)
    assert given == ext(
        session_control={"session_id": "s"}, routing_constraints={},
        mm_routing_info={"routing_token_ids": [1]},
    )  # fmt: skip
    info = mm_routing_of(ext(mm_routing_info=routing | {"block_mm_infos": BLOCKS}))
    assert info is not None
    assert info.block_mm_infos == (
        None, q.BlockExtraInfo(), q.BlockExtraInfo(mm_objects=(q.MmObject(mm_hash=1),)),
    )  # fmt: skip
