"""Requests as JSON: what is written, what is left out, and what may be missing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.preprocess.wire import embedding_from_json, embedding_to_json, from_json, to_json
from streams import records as r
from streams.codecs import pack_tokens
from streams.errors import Malformed

ALWAYS = {
    "model": "",
    "token_ids": [],
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


def written(**fields: Any) -> dict[str, Any]:
    fields_of: dict[str, Any] = json.loads(to_json(r.Request(id="x", **fields)))
    return fields_of


def read(**fields: Any) -> r.Request:
    return from_json(json.dumps({"token_ids": [1], **fields}, separators=(",", ":")).encode())


# --- what is there without being said -------------------------------------------------------------


def test_a_request_that_says_nothing_writes_this() -> None:
    assert written() == ALWAYS


@pytest.mark.parametrize("field", ["mdc_sum", "router_config_override"])
def test_these_are_null_when_there_are_none(field: str) -> None:
    assert written()[field] is None


def test_a_probe_needs_its_tokens_and_its_mark_only() -> None:
    probe = from_json(b'{"token_ids":[1],"_HEALTH_CHECK":true}')
    assert probe == r.Request(id="", token_ids=pack_tokens([1]), is_probe=True)


def test_a_probe_is_marked_by_a_name_of_its_own() -> None:
    assert written(is_probe=True)["_HEALTH_CHECK"] is True


def test_a_request_that_is_no_probe_has_no_mark() -> None:
    assert b"_HEALTH_CHECK" not in to_json(r.Request(id="x"))


def test_an_absent_mark_is_no_probe() -> None:
    assert not read().is_probe


def test_a_mark_may_be_false() -> None:
    assert not read(_HEALTH_CHECK=False).is_probe


def test_tokens_are_needed() -> None:
    with pytest.raises(Malformed, match="token_ids"):
        from_json(b'{"model":"m"}')


def test_a_request_gets_the_id_it_is_read_under() -> None:
    assert from_json(b'{"token_ids":[1]}', "job-17").id == "job-17"


def test_unknown_fields_are_ignored() -> None:
    assert read(newer={"a": [1]}, sampling_options={"newer": 1}) == read()


# --- every field ----------------------------------------------------------------------------------

FIELDS: list[tuple[str, Any, str, Any]] = [
    ("model", "m", "model", "m"),
    ("token_ids", pack_tokens([1, 2**32 - 1]), "token_ids", [1, 2**32 - 1]),
    ("prompt_embeds", "AAAA", "prompt_embeds", "AAAA"),
    (
        "multi_modal_data",
        {"image_url": (r.MultimodalData(kind="url", url="http://a/b.png"),)},
        "multi_modal_data",
        {"image_url": [{"Url": "http://a/b.png"}]},
    ),
    (
        "mm_routing_info",
        r.MmRoutingInfo(
            routing_token_ids=pack_tokens([5, 6]),
            block_mm_infos=(
                None,
                r.BlockExtraInfo(mm_objects=(r.MmObject(mm_hash=2**64 - 1, offsets=((0, 2),)),)),
            ),
        ),
        "mm_routing_info",
        {
            "routing_token_ids": [5, 6],
            "block_mm_infos": [
                None,
                {"mm_objects": [{"mm_hash": 2**64 - 1, "offsets": [[0, 2]]}]},
            ],
        },
    ),
    ("eos_token_ids", (2, 3), "eos_token_ids", [2, 3]),
    ("mdc_sum", "ab", "mdc_sum", "ab"),
    ("annotations", ("x", "k:v"), "annotations", ["x", "k:v"]),
    (
        "router_config_override",
        r.RouterConfigOverride(overlap_score_credit=0.0, track_prefill_tokens=False),
        "router_config_override",
        {
            "overlap_score_credit": 0.0,
            "prefill_load_scale": None,
            "router_temperature": None,
            "assume_kv_reuse": None,
            "track_prefill_tokens": False,
            "shared_cache_multiplier": None,
        },
    ),
    (
        "prefill_result",
        r.PrefillResult(
            disaggregated_params=b'{"kv":[1]}',
            prompt_tokens_details=r.PromptTokensDetails(cached_tokens=5),
        ),
        "prefill_result",
        {"disaggregated_params": {"kv": [1]}, "prompt_tokens_details": {"cached_tokens": 5}},
    ),
    (
        "migration_link",
        r.TraceLink(trace_id="ab" * 16, span_id="cd" * 8),
        "migration_link",
        {"trace_id": "ab" * 16, "span_id": "cd" * 8},
    ),
    (
        "bootstrap_info",
        r.BootstrapInfo(bootstrap_host="h", bootstrap_port=9000, bootstrap_room=2**63 - 1),
        "bootstrap_info",
        {"bootstrap_host": "h", "bootstrap_port": 9000, "bootstrap_room": 2**63 - 1},
    ),
    ("extra_args", b'{"a":[1,2.5]}', "extra_args", {"a": [1, 2.5]}),
    ("router", r.RouterParams(ttft_target=100.0), "router", {"ttft_target": 100.0}),
    ("router", r.RouterParams(itl_target=20.0), "router", {"itl_target": 20.0}),
    ("agent_context", b'{"id":"a"}', "agent_context", {"id": "a"}),
    ("mm_processor_kwargs", b'{"fps":2}', "mm_processor_kwargs", {"fps": 2}),
    ("request_timestamp_ms", 12.5, "request_timestamp_ms", 12.5),
    ("is_probe", True, "_HEALTH_CHECK", True),
]


@pytest.mark.parametrize(("field", "value", "name", "form"), FIELDS)
def test_a_field_is_written_under_its_name(field: str, value: Any, name: str, form: Any) -> None:
    assert written(**{field: value}) == ALWAYS | {name: form}


@pytest.mark.parametrize(("field", "value", "name", "form"), FIELDS)
def test_a_field_is_read_from_its_name(field: str, value: Any, name: str, form: Any) -> None:
    assert getattr(read(**{name: form}), field) == value


def test_every_field_of_a_request_has_a_form_but_those_of_the_log() -> None:
    ours = {"id", "tenant", "deadline_s", "received_ms", "cache_salt", "body"}
    parts = {"stop", "sampling", "output", "hints"}
    fields = {field.name for field in msgspec.structs.fields(r.Request)}
    assert fields - ours - parts == {field for field, *_ in FIELDS}


NULLABLE = [name for _, _, name, _ in FIELDS if name not in ALWAYS and name != "_HEALTH_CHECK"]


@pytest.mark.parametrize("name", [*NULLABLE, "mdc_sum", "router_config_override", "routing"])
def test_null_is_as_good_as_nothing(name: str) -> None:
    assert read(**{name: None}) == read()


# --- options --------------------------------------------------------------------------------------

OPTIONS = [
    ("stop", "stop_conditions", r.StopConditions, "max_tokens", 5, 5),
    ("stop", "stop_conditions", r.StopConditions, "min_tokens", 5, 5),
    ("stop", "stop_conditions", r.StopConditions, "stop", ("a",), ["a"]),
    ("stop", "stop_conditions", r.StopConditions, "stop_token_ids", (1,), [1]),
    ("stop", "stop_conditions", r.StopConditions, "stop_token_ids_hidden", (1,), [1]),
    ("stop", "stop_conditions", r.StopConditions, "ignore_eos", True, True),
    ("stop", "stop_conditions", r.StopConditions, "max_thinking_tokens", 5, 5),
    ("sampling", "sampling_options", r.SamplingOptions, "n", 1, 1),
    ("sampling", "sampling_options", r.SamplingOptions, "best_of", 2, 2),
    ("sampling", "sampling_options", r.SamplingOptions, "presence_penalty", 0.5, 0.5),
    ("sampling", "sampling_options", r.SamplingOptions, "frequency_penalty", 0.5, 0.5),
    ("sampling", "sampling_options", r.SamplingOptions, "repetition_penalty", 1.5, 1.5),
    ("sampling", "sampling_options", r.SamplingOptions, "temperature", 0.0, 0.0),
    ("sampling", "sampling_options", r.SamplingOptions, "top_p", 0.5, 0.5),
    ("sampling", "sampling_options", r.SamplingOptions, "top_k", -1, -1),
    ("sampling", "sampling_options", r.SamplingOptions, "min_p", 0.5, 0.5),
    ("sampling", "sampling_options", r.SamplingOptions, "use_beam_search", False, False),
    ("sampling", "sampling_options", r.SamplingOptions, "length_penalty", 1.0, 1.0),
    ("sampling", "sampling_options", r.SamplingOptions, "seed", -1, -1),
    ("sampling", "sampling_options", r.SamplingOptions, "include_stop_str_in_output", True, True),
    ("sampling", "sampling_options", r.SamplingOptions, "detokenize", False, False),
    ("sampling", "sampling_options", r.SamplingOptions, "allowed_token_ids", (), []),
    ("sampling", "sampling_options", r.SamplingOptions, "bad_words_token_ids", ((1, 2),), [[1, 2]]),
    ("sampling", "sampling_options", r.SamplingOptions, "logit_bias", {7: 1.5}, {"7": 1.5}),
    (
        "sampling",
        "sampling_options",
        r.SamplingOptions,
        "guided_decoding",
        r.GuidedDecoding(json=b'{"type":"object"}', backend="x"),
        {"json": {"type": "object"}, "backend": "x"},
    ),
    (
        "sampling",
        "sampling_options",
        r.SamplingOptions,
        "guided_decoding",
        r.GuidedDecoding(regex="a+", choice=("a",), grammar="g", whitespace_pattern=" "),
        {"regex": "a+", "choice": ["a"], "grammar": "g", "whitespace_pattern": " "},
    ),
    (
        "sampling",
        "sampling_options",
        r.SamplingOptions,
        "guided_decoding",
        r.GuidedDecoding(structural_tag=b"[]"),
        {"structural_tag": []},
    ),
    ("output", "output_options", r.OutputOptions, "logprobs", 0, 0),
    ("output", "output_options", r.OutputOptions, "prompt_logprobs", 2, 2),
    ("output", "output_options", r.OutputOptions, "skip_special_tokens", False, False),
    ("output", "output_options", r.OutputOptions, "formatted_prompt", True, True),
    ("output", "output_options", r.OutputOptions, "return_tokens_as_token_ids", True, True),
]


@pytest.mark.parametrize(("part", "name", "kind", "option", "value", "form"), OPTIONS)
def test_an_option_is_written(
    part: str, name: str, kind: Any, option: str, value: Any, form: Any
) -> None:
    expected = ALWAYS | {name: {**ALWAYS[name], option: form}}
    assert written(**{part: kind(**{option: value})}) == expected


@pytest.mark.parametrize(("part", "name", "kind", "option", "value", "form"), OPTIONS)
def test_an_option_is_read(
    part: str, name: str, kind: Any, option: str, value: Any, form: Any
) -> None:
    assert getattr(read(**{name: {option: form}}), part) == kind(**{option: value})


def test_every_option_is_tried() -> None:
    tried = {(kind, option) for _, _, kind, option, _, _ in OPTIONS}
    for kind in (r.StopConditions, r.SamplingOptions, r.OutputOptions):
        for field in msgspec.structs.fields(kind):
            assert (kind, field.name) in tried, field.name


@pytest.mark.parametrize("name", ["stop_conditions", "sampling_options", "output_options"])
def test_options_may_all_be_null(name: str) -> None:
    assert read(**{name: ALWAYS[name]}) == read()


# --- hints ----------------------------------------------------------------------------------------

HINTS: list[tuple[str, Any, Any]] = [
    ("backend_instance_id", "7", 7),
    ("backend_instance_id", "w1", "w1"),
    ("backend_instance_id", str(2**64 - 1), 2**64 - 1),
    ("backend_instance_id", "007", "007"),
    ("backend_instance_id", str(2**64), str(2**64)),
    ("prefill_worker_id", "8", 8),
    ("decode_worker_id", "9", 9),
    ("dp_rank", 0, 0),
    ("prefill_dp_rank", 1, 1),
    ("expected_output_tokens", 50, 50),
    ("lora_name", "l", "l"),
    ("priority_jump", 0.5, 0.5),
    ("priority", -1, -1),
    ("strict_priority", 2, 2),
    ("queue_class", "batch", "batch"),
    ("allowed_worker_ids", ("1", "w2"), [1, "w2"]),
    (
        "routing_constraints",
        r.RoutingConstraints(required_taints=("a",), preferred_taints={"b": 0.5}),
        {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
    ),
    (
        "session_control",
        r.SessionControl(session_id="s", action="open", timeout=60),
        {"session_id": "s", "action": "open", "timeout": 60},
    ),
    ("session_control", r.SessionControl(session_id="s"), {"session_id": "s"}),
]


@pytest.mark.parametrize(("hint", "value", "form"), HINTS)
def test_a_hint_is_written_and_no_other(hint: str, value: Any, form: Any) -> None:
    assert written(hints=r.Hints(**{hint: value}))["routing"] == {hint: form}


@pytest.mark.parametrize(("hint", "value", "form"), HINTS)
def test_a_hint_is_read(hint: str, value: Any, form: Any) -> None:
    assert read(routing={hint: form}).hints == r.Hints(**{hint: value})


def test_every_hint_is_tried() -> None:
    assert {hint for hint, *_ in HINTS} == {f.name for f in msgspec.structs.fields(r.Hints)}


def test_hints_appear_with_the_first_one() -> None:
    request = r.Request(id="x")
    assert "routing" not in json.loads(to_json(request))
    hinted = msgspec.structs.replace(
        request, hints=msgspec.structs.replace(request.hints, dp_rank=1)
    )
    assert json.loads(to_json(hinted))["routing"] == {"dp_rank": 1}


def test_a_set_of_no_workers_is_refused() -> None:
    with pytest.raises(Malformed, match="allowed_worker_ids"):
        read(routing={"allowed_worker_ids": []})


def test_a_session_waits_five_minutes_unless_told_otherwise() -> None:
    session = read(routing={"session_control": {"session_id": "s"}}).hints.session_control
    assert session is not None
    assert session.timeout == 300


# --- images and the like --------------------------------------------------------------------------


def media(*data: r.MultimodalData) -> dict[str, tuple[r.MultimodalData, ...]]:
    return {"image_url": data}


def test_a_raw_url_is_written_as_a_url() -> None:
    raw = media(r.MultimodalData(kind="raw_url", url="data:image/png;base64,AA"))
    assert written(multi_modal_data=raw)["multi_modal_data"] == {
        "image_url": [{"Url": "data:image/png;base64,AA"}]
    }


@pytest.mark.parametrize("url", ["http://a/b.png", "data:image/png;base64,AA"])
def test_a_url_is_read_as_a_url(url: str) -> None:
    got = read(multi_modal_data={"image_url": [{"Url": url}]}).multi_modal_data
    assert got == media(r.MultimodalData(kind="url", url=url))


@pytest.mark.parametrize("form", [{"RawUrl": "http://a/b"}, {"Url": "no url"}, {"Url": "http://["}])
def test_what_is_no_url_or_says_so_is_read_as_a_raw_one(form: dict[str, str]) -> None:
    got = read(multi_modal_data={"image_url": [form]}).multi_modal_data
    assert got == media(r.MultimodalData(kind="raw_url", url=next(iter(form.values()))))


DECODED_FORM = {"nixl_metadata": "AA", "shape": [1, 2], "dtype": "UINT8"}
DECODED = r.MultimodalData(
    kind="decoded", decoded=b'{"nixl_metadata":"AA","shape":[1,2],"dtype":"UINT8"}'
)


def test_decoded_data_is_written_in_the_words_of_the_transfer() -> None:
    got = written(multi_modal_data=media(DECODED))["multi_modal_data"]
    assert got == {"image_url": [{"Decoded": DECODED_FORM}]}


def test_decoded_data_is_read_as_it_came() -> None:
    got = read(multi_modal_data={"image_url": [{"Decoded": DECODED_FORM}]}).multi_modal_data
    assert got == media(DECODED)


@pytest.mark.parametrize(
    "item", [{}, {"Url": "http://a", "RawUrl": "b"}, {"Else": "x"}, {"Url": 7}]
)
def test_data_of_no_known_kind_is_malformed(item: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read(multi_modal_data={"image_url": [item]})


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [2**32]},
        {"token_ids": [-1]},
        {"token_ids": ["1"]},
        {"bootstrap_info": {"bootstrap_host": "h", "bootstrap_port": 2**16, "bootstrap_room": 1}},
        {"bootstrap_info": {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2**64}},
        {"bootstrap_info": {"bootstrap_host": "h", "bootstrap_port": 1}},
        {"migration_link": {"trace_id": "a"}},
        {"routing": {"backend_instance_id": -1}},
        {"prefill_result": {}},
        {"mm_routing_info": {"routing_token_ids": [2**32]}},
        {"sampling_options": {"seed": 2**64}},
    ],
)
def test_what_cannot_be_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read(**fields)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{", b'{"x":' + b"[" * 100_000])
def test_what_is_no_request_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        from_json(data)


# --- together -------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(FIELDS)),
    st.lists(st.sampled_from(OPTIONS)),
    st.lists(st.sampled_from(HINTS)),
)
def test_what_is_written_is_read(fields: list[Any], options: list[Any], hints: list[Any]) -> None:
    parts: dict[str, dict[str, Any]] = {}
    for part, _, _, option, value, _ in options:
        parts.setdefault(part, {})[option] = value
    request = r.Request(
        id="job",
        **{field: value for field, value, *_ in fields},
        stop=r.StopConditions(**parts.get("stop", {})),
        sampling=r.SamplingOptions(**parts.get("sampling", {})),
        output=r.OutputOptions(**parts.get("output", {})),
        hints=r.Hints(**{hint: value for hint, value, _ in hints}),
    )
    assert from_json(to_json(request), "job") == request


names = st.text(max_size=5)


@given(st.binary(max_size=60) | st.dictionaries(names, names).map(lambda d: json.dumps(d).encode()))
def test_any_bytes_are_a_clear_error(data: bytes) -> None:
    with pytest.raises(Malformed):
        from_json(data)


# --- embeddings -----------------------------------------------------------------------------------

EMBEDDING = r.EmbeddingRequest(
    id="job",
    token_ids=(pack_tokens([1, 2]), pack_tokens([3])),
    model="m",
    encoding_format="float",
    dimensions=64,
    mdc_sum="ab",
    annotations=("x",),
)
EMBEDDING_FORM = {
    "token_ids": [[1, 2], [3]],
    "model": "m",
    "encoding_format": "float",
    "dimensions": 64,
    "mdc_sum": "ab",
    "annotations": ["x"],
}


def test_a_request_for_embeddings_is_written() -> None:
    assert json.loads(embedding_to_json(EMBEDDING)) == EMBEDDING_FORM


def test_a_request_for_embeddings_is_read() -> None:
    assert embedding_from_json(json.dumps(EMBEDDING_FORM).encode(), "job") == EMBEDDING


def test_a_request_for_embeddings_writes_null_for_what_it_does_not_say() -> None:
    plain = r.EmbeddingRequest(id="job", token_ids=(), model="m")
    assert json.loads(embedding_to_json(plain)) == {
        "token_ids": [],
        "model": "m",
        "encoding_format": None,
        "dimensions": None,
        "mdc_sum": None,
        "annotations": [],
    }


@pytest.mark.parametrize("data", [b"{}", b'{"token_ids":[[-1]],"model":"m"}', b"\xff"])
def test_what_is_no_request_for_embeddings_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        embedding_from_json(data)


def test_a_request_for_embeddings_has_annotations() -> None:
    assert EMBEDDING.has_annotation("x")
    assert not EMBEDDING.has_annotation("y")


# --- what a request answers -----------------------------------------------------------------------


def test_an_annotation_is_there_or_not() -> None:
    request = r.Request(id="x", annotations=("formatted_prompt", "query_instance_id:7"))
    assert request.has_annotation("formatted_prompt")
    assert not request.has_annotation("formatted")
    assert not request.has_annotation("query_instance_id")


@pytest.mark.parametrize(
    ("annotations", "value"),
    [
        (("k:v",), "v"),
        (("k:",), ""),
        (("k:a:b",), "a:b"),
        (("kk:v", "k:w", "k:x"), "w"),
        (("k",), None),
        ((), None),
    ],
)
def test_an_annotation_may_have_a_value(annotations: tuple[str, ...], value: str | None) -> None:
    assert r.Request(id="x", annotations=annotations).annotation_value("k") == value


PROMPT, OTHER = pack_tokens([1, 2]), pack_tokens([3])
BLOCKS = (None, r.BlockExtraInfo())


def test_overlap_is_found_by_the_prompt() -> None:
    assert r.Request(id="x", token_ids=PROMPT).routing_tokens() == (PROMPT, None)


def test_overlap_is_found_by_other_tokens_if_there_are_any() -> None:
    info = r.MmRoutingInfo(routing_token_ids=OTHER, block_mm_infos=BLOCKS)
    request = r.Request(id="x", token_ids=PROMPT, mm_routing_info=info)
    assert request.routing_tokens() == (OTHER, BLOCKS)


def test_overlap_is_found_by_the_prompt_if_the_other_tokens_are_none() -> None:
    info = r.MmRoutingInfo(block_mm_infos=BLOCKS)
    request = r.Request(id="x", token_ids=PROMPT, mm_routing_info=info)
    assert request.routing_tokens() == (PROMPT, None)


def test_embeddings_instead_of_tokens_overlap_with_nothing() -> None:
    request = r.Request(id="x", token_ids=PROMPT, prompt_embeds="AAAA")
    assert request.routing_tokens() == (b"", None)
