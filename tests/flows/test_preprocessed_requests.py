"""Tests of preprocessed requests in the form of NVIDIA Dynamo, published to `prompts` as kind
`tokens`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvlane.streams import request as r
from kvlane.streams.codecs import AnyRecord, decode, pack_tokens
from kvlane.streams.records import Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS
from tests.flows.test_preprocessor import begin, publish, serve, serve_demo
from tests.harness.memory_world import MemoryWorld, scenario_test

WRITTEN: dict[str, Any] = {
    "model": "demo",
    "token_ids": [5, 6, 7],
    "stop_conditions": {
        "max_tokens": None,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_hidden": None,
        "min_tokens": None,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": None,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "output_options": {
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": None,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [],
    "mdc_sum": None,
    "annotations": [],
    "router_config_override": None,
}
"""A request that sets no option, as the reference serialises it."""


def records(world: MemoryWorld) -> list[AnyRecord]:
    return [decode(record) for record in world.all_records(REQUESTS)]


async def answers(world: MemoryWorld, bodies: list[dict[str, Any]]) -> list[Any]:
    """The records that a preprocessor publishes for these bodies, in their order."""
    await serve_demo(world)
    await begin(world)
    for number, body in enumerate(bodies):
        prompt = {"id": f"job-{number}", "kind": "tokens", "body": body}
        publish(world, f"job-{number}".encode(), json.dumps(prompt).encode())
    await world.wait_until(lambda: len(records(world)) == len(bodies))
    published = {record.id: record for record in records(world)}
    return [published[f"job-{number}"] for number in range(len(bodies))]


@scenario_test
async def test_request_without_options_equals_one_of_tokens_alone(world: MemoryWorld) -> None:
    written, bare, short = await answers(
        world, [WRITTEN, {"token_ids": [5, 6, 7], "model": "demo"}, {"token_ids": [5, 6, 7]}]
    )
    assert isinstance(written, Request)
    assert written.token_ids == pack_tokens([5, 6, 7])
    assert written.stop.max_tokens == 512 - 3
    for other in (bare, short):
        assert fields_of(other) == fields_of(written)


def fields_of(request: Request) -> dict[str, Any]:
    of_the_prompt = ("id", "received_ms", "queued_ms")
    names = (name for name in Request.__struct_fields__ if name not in of_the_prompt)
    return {name: getattr(request, name) for name in names}


OPTIONS: list[tuple[str, Any, Callable[[Request], Any], Any]] = [
    ("stop_conditions.max_tokens", 9, lambda q: q.stop.max_tokens, 9),
    ("stop_conditions.stop", ["a", "b"], lambda q: q.stop.stop, ("a", "b")),
    ("stop_conditions.stop_token_ids", [1], lambda q: q.stop.stop_token_ids, (1,)),
    ("stop_conditions.stop_token_ids_hidden", [2], lambda q: q.stop.stop_token_ids_hidden, (2,)),
    ("stop_conditions.min_tokens", 3, lambda q: q.stop.min_tokens, 3),
    ("stop_conditions.ignore_eos", True, lambda q: q.stop.ignore_eos, True),
    ("stop_conditions.max_thinking_tokens", 4, lambda q: q.stop.max_thinking_tokens, 4),
    ("sampling_options.presence_penalty", 0.5, lambda q: q.sampling.presence_penalty, 0.5),
    ("sampling_options.frequency_penalty", 0.5, lambda q: q.sampling.frequency_penalty, 0.5),
    ("sampling_options.repetition_penalty", 1.5, lambda q: q.sampling.repetition_penalty, 1.5),
    ("sampling_options.temperature", 0.25, lambda q: q.sampling.temperature, 0.25),
    ("sampling_options.top_p", 0.5, lambda q: q.sampling.top_p, 0.5),
    ("sampling_options.top_k", 7, lambda q: q.sampling.top_k, 7),
    ("sampling_options.min_p", 0.1, lambda q: q.sampling.min_p, 0.1),
    ("sampling_options.seed", 11, lambda q: q.sampling.seed, 11),
    ("sampling_options.include_stop_str_in_output", True,
     lambda q: q.sampling.include_stop_str_in_output, True),
    ("sampling_options.guided_decoding", {"regex": "a+", "backend": "x"},
     lambda q: q.sampling.guided_decoding, r.GuidedDecoding(regex="a+", backend="x")),
    ("sampling_options.guided_decoding", {"json": {"type": "object"}, "whitespace_pattern": " "},
     lambda q: q.sampling.guided_decoding,
     r.GuidedDecoding(json=b'{"type":"object"}', whitespace_pattern=" ")),
    ("sampling_options.guided_decoding", {"choice": ["a"]},
     lambda q: q.sampling.guided_decoding, r.GuidedDecoding(choice=("a",))),
    ("sampling_options.guided_decoding", {"grammar": "g"},
     lambda q: q.sampling.guided_decoding, r.GuidedDecoding(grammar="g")),
    ("sampling_options.guided_decoding", {"structural_tag": {"a": 1}},
     lambda q: q.sampling.guided_decoding, r.GuidedDecoding(structural_tag=b'{"a":1}')),
    ("sampling_options.allowed_token_ids", [1, 2], lambda q: q.sampling.allowed_token_ids, (1, 2)),
    ("sampling_options.bad_words_token_ids", [[1, 2], [3]],
     lambda q: q.sampling.bad_words_token_ids, ((1, 2), (3,))),
    ("sampling_options.logit_bias", {"7": -1.5}, lambda q: q.sampling.logit_bias, {7: -1.5}),
    ("output_options.logprobs", 2, lambda q: q.output.logprobs, 2),
    ("output_options.prompt_logprobs", 1, lambda q: q.output.prompt_logprobs, 1),
    ("output_options.skip_special_tokens", False, lambda q: q.output.skip_special_tokens, False),
    ("output_options.return_tokens_as_token_ids", True,
     lambda q: q.output.return_tokens_as_token_ids, True),
    ("routing.backend_instance_id", 7, lambda q: q.hints.backend_instance_id, "7"),
    ("routing.prefill_worker_id", "p", lambda q: q.hints.prefill_worker_id, "p"),
    ("routing.decode_worker_id", 2**64 - 1, lambda q: q.hints.decode_worker_id, f"{2**64 - 1}"),
    ("routing.dp_rank", 1, lambda q: q.hints.dp_rank, 1),
    ("routing.prefill_dp_rank", 2, lambda q: q.hints.prefill_dp_rank, 2),
    ("routing.expected_output_tokens", 70, lambda q: q.hints.expected_output_tokens, 70),
    ("routing.lora_name", "sql", lambda q: q.hints.lora_name, "sql"),
    ("routing.priority_jump", 1.5, lambda q: q.hints.priority_jump, 1.5),
    ("routing.priority", 3, lambda q: (q.hints.priority, q.hints.priority_jump), (3, 3.0)),
    ("routing.strict_priority", 2, lambda q: q.hints.strict_priority, 2),
    ("routing.allowed_worker_ids", [1, "b"], lambda q: q.hints.allowed_worker_ids, ("1", "b")),
    ("routing.routing_constraints", {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
     lambda q: q.hints.routing_constraints,
     r.RoutingConstraints(required_taints=("a",), preferred_taints={"b": 0.5})),
    ("routing.session_control", {"session_id": "s", "action": "open"},
     lambda q: q.hints.session_control,
     r.SessionControl(session_id="s", action="open", timeout=300)),
    ("routing.queue_class", "batch", lambda q: q.hints.queue_class, "batch"),
    ("eos_token_ids", [2, 3], lambda q: q.eos_token_ids, (2, 3)),
    ("annotations", ["x", "k:v"], lambda q: (q.annotations, q.annotation_value("k")),
     (("x", "k:v"), "v")),
    ("router_config_override", {"overlap_score_credit": 0.5, "assume_kv_reuse": False},
     lambda q: q.router_config_override,
     r.RouterConfigOverride(overlap_score_credit=0.5, assume_kv_reuse=False)),
    ("router", {"ttft_target": 100.0, "itl_target": 20.0}, lambda q: q.router,
     r.RouterParams(ttft_target=100.0, itl_target=20.0)),
    ("mm_routing_info", {"routing_token_ids": [9], "block_mm_infos": [None]},
     lambda q: q.routing_tokens().token_ids, pack_tokens([9])),
    ("mm_routing_info", {"routing_token_ids": [], "block_mm_infos": []},
     lambda q: q.routing_tokens().token_ids, pack_tokens([5, 6, 7])),
    ("prompt_embeds", "AAAA", lambda q: (q.prompt_embeds, q.routing_tokens().token_ids),
     ("AAAA", b"")),
    ("extra_args", {"a": 1}, lambda q: q.extra_args, b'{"a":1}'),
    ("agent_context", {"agent": "a"}, lambda q: q.agent_context, b'{"agent":"a"}'),
    ("mm_processor_kwargs", {"fps": 2}, lambda q: q.mm_processor_kwargs, b'{"fps":2}'),
    ("request_timestamp_ms", 17.5, lambda q: q.request_timestamp_ms, 17.5),
    ("multi_modal_data", {"image_url": [{"Url": "http://a/b"}]}, lambda q: q.multi_modal_data,
     {"image_url": (r.MultimodalData(kind="url", url="http://a/b"),)}),
    ("multi_modal_data", {"image_url": [{"RawUrl": "http://a/b"}, {"Url": "cat.png"}]},
     lambda q: [(item.kind, item.url) for item in q.multi_modal_data["image_url"]],  # type: ignore[index]
     [("raw_url", "http://a/b"), ("raw_url", "cat.png")]),
    ("multi_modal_data", {"image_url": [{"Decoded": {"shape": [1]}}]},
     lambda q: q.multi_modal_data,
     {"image_url": (r.MultimodalData(kind="decoded", decoded=b'{"shape":[1]}'),)}),
    ("_HEALTH_CHECK", True, lambda q: q.is_probe, True),
    ("_HEALTH_CHECK", False, lambda q: q.is_probe, False),
]  # fmt: skip


def with_option(path: str, value: Any) -> dict[str, Any]:
    """WRITTEN with one option."""
    group, _, name = path.rpartition(".")
    return WRITTEN | ({group: WRITTEN.get(group, {}) | {name: value}} if group else {name: value})


@scenario_test
async def test_every_option_reaches_the_request(world: MemoryWorld) -> None:
    published = await answers(world, [with_option(path, value) for path, value, _, _ in OPTIONS])
    came = [of(request) for request, (_, _, of, _) in zip(published, OPTIONS, strict=True)]
    assert came == [expected for _, _, _, expected in OPTIONS]


@scenario_test
async def test_probe_needs_only_its_tokens_and_its_marker(world: MemoryWorld) -> None:
    (probe,) = await answers(world, [{"token_ids": [1], "_HEALTH_CHECK": True}])
    assert isinstance(probe, Request)
    assert probe.is_probe


REFUSED: list[tuple[str, Any, str]] = [
    ("token_ids", [], "body.token_ids"),
    ("token_ids", [-1], "body.token_ids.0"),
    ("stop_conditions", [1], "body.stop_conditions"),
    ("stop_conditions.min_tokens", -1, "body.stop_conditions.min_tokens"),
    ("stop_conditions.max_thinking_tokens", -1, "body.stop_conditions.max_thinking_tokens"),
    ("sampling_options.temperature", 3, "body.sampling_options.temperature"),
    ("sampling_options.n", 2, "body.n"),
    ("sampling_options.use_beam_search", True, "body.sampling_options.use_beam_search"),
    ("sampling_options.length_penalty", 0.5, "body.sampling_options.length_penalty"),
    ("sampling_options.detokenize", False, "body.sampling_options.detokenize"),
    ("output_options.formatted_prompt", True, "body.output_options.formatted_prompt"),
    ("routing.expected_output_tokens", -1, "body.routing.expected_output_tokens"),
    ("routing.allowed_worker_ids", [], "body.routing.allowed_worker_ids"),
    ("migration_link", {"trace_id": "a", "span_id": "b"}, "body.migration_link"),
    ("prefill_result", {"disaggregated_params": {}}, "body.prefill_result"),
    ("bootstrap_info", {"bootstrap_host": "h"}, "body.bootstrap_info"),
    ("multi_modal_data", {"image_url": [{"Else": "a"}]}, "body.multi_modal_data"),
]


@scenario_test
async def test_unsupported_fields_are_refused_by_name(world: MemoryWorld) -> None:
    bodies = [with_option(path, value) for path, value, _ in REFUSED]
    for (_, _, path), record in zip(REFUSED, await answers(world, bodies), strict=True):
        assert isinstance(record, Refused), path
        assert record.message.startswith(f"{path}:"), record.message


@scenario_test
async def test_option_in_both_forms_is_refused(world: MemoryWorld) -> None:
    (refused,) = await answers(world, [WRITTEN | {"nvext": {"annotations": ["a"]}}])
    assert isinstance(refused, Refused)
    assert refused.message.startswith("body.annotations: is given twice")


@scenario_test
async def test_model_of_bytes_takes_text_only(world: MemoryWorld) -> None:
    serve(world, "m")
    await begin(world)
    body = {"token_ids": [1], "multi_modal_data": {"image_url": [{"Url": "http://a/b"}]}}
    prompt = {"id": "job", "kind": "tokens", "body": body}
    publish(world, b"job", json.dumps(prompt).encode())
    await world.wait_until(lambda: len(records(world)) == 1)
    (refused,) = records(world)
    assert isinstance(refused, Refused)
    assert refused.message.startswith("body.multi_modal_data:")
