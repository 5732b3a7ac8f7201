"""Tests of the dialect of an attached server: request bodies, and the parsing of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.engine.attached.completion_events import parse_completion_event
from kvlane.app.engine.attached.request_body import ServerDialect, completion_body
from kvlane.app.engine.attached.server_errors import (
    RequestRejected,
    ServerFailed,
    error_of_body,
    error_of_event,
)
from kvlane.app.engine.attached.server_metrics import read_metrics
from kvlane.app.engine.attached.token_engine import Retokenizer
from kvlane.app.engine.interface import EngineFull, InvalidRequest
from kvlane.app.engine.output_values import LOWEST_LOG_PROB
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import LogProb
from kvlane.streams.request import (
    BootstrapInfo,
    GuidedDecoding,
    Hints,
    MultimodalData,
    OutputOptions,
    PrefillResult,
    Request,
    SamplingOptions,
    StopConditions,
)
from tests.harness.model_servers import TOKENIZER

VLLM = ServerDialect("m", "vllm", adapters=frozenset({"ada"}))
LLAMA = ServerDialect("m", "llamacpp", answer_tokens="log_probs")
OTHER = ServerDialect("m", "somebody", "text", "text")


def body(speech: ServerDialect = VLLM, max_tokens: int = 7, **sent: Any) -> dict[str, Any]:
    fields = {"id": "r", "token_ids": pack_tokens([1, 2])} | sent
    return completion_body(Request(**fields), speech, max_tokens, lambda ids: f"text of {ids}")


def test_plain_request_is_tokens_and_a_limit() -> None:
    assert body() == {
        "model": "m", "prompt": [1, 2], "max_tokens": 7, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True, "request_id": "r",
    }  # fmt: skip


def test_server_without_token_input_gets_text() -> None:
    assert body(OTHER)["prompt"] == "text of [1, 2]"
    assert "return_token_ids" not in body(OTHER)


SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4, "presence_penalty": 0.1,
    "frequency_penalty": 0.2, "repetition_penalty": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("speech", [VLLM, LLAMA, OTHER])
def test_sampling_is_passed_on(speech: ServerDialect) -> None:
    sent = body(speech, sampling=SamplingOptions(**SAMPLING))
    assert {name: sent[name] for name in SAMPLING} == SAMPLING


def test_llama_has_a_name_of_its_own_for_repetition() -> None:
    assert body(LLAMA, sampling=SamplingOptions(repetition_penalty=1.5))["repeat_penalty"] == 1.5


def test_ends_are_passed_on_as_tokens_and_strings_are_not() -> None:
    stop = StopConditions(
        max_tokens=9, min_tokens=2, stop=("END",), stop_token_ids=(5,), stop_token_ids_hidden=(6,)
    )
    sent = body(stop=stop, eos_token_ids=(7,))
    assert (sent["min_tokens"], sent["stop_token_ids"]) == (2, [5, 6, 7])
    assert "stop" not in sent


def test_end_of_text_that_is_ignored_ends_nothing() -> None:
    stop = StopConditions(ignore_eos=True, stop_token_ids=(5,), stop_token_ids_hidden=(6,))
    sent = body(stop=stop, eos_token_ids=(7,))
    assert (sent["ignore_eos"], sent["stop_token_ids"]) == (True, [5])


def test_biases_and_single_token_bad_words_are_one_field() -> None:
    sampling = SamplingOptions(logit_bias={5: 1.5}, bad_words_token_ids=((6,),))
    assert body(sampling=sampling)["logit_bias"] == {"5": 1.5, "6": -100.0}


def test_vllm_options_are_passed_on_to_vllm() -> None:
    sent = body(
        cache_salt="s",
        hints=Hints(lora_name="ada"),
        extra_args=b'{"a": 1}',
        sampling=SamplingOptions(allowed_token_ids=(1, 2)),
        stop=StopConditions(max_thinking_tokens=3),
    )
    names = ("model", "cache_salt", "vllm_xargs", "allowed_token_ids", "thinking_token_budget")
    assert [sent[name] for name in names] == ["ada", "s", {"a": 1}, [1, 2], 3]


def test_transfer_of_a_prefill_is_passed_on() -> None:
    handed = PrefillResult(disaggregated_params=b'{"kv_transfer_params": {"a": 1}}')
    assert body(prefill_result=handed)["kv_transfer_params"] == {"a": 1}
    assert "kv_transfer_params" not in body(prefill_result=handed, is_probe=True)


def test_embeddings_take_the_place_of_the_prompt() -> None:
    sent = body(prompt_embeds="AAAA")
    assert sent["prompt_embeds"] == "AAAA"
    assert "prompt" not in sent


@pytest.mark.parametrize(
    ("guided", "form"),
    [
        (GuidedDecoding(json=b'{"type":"object"}'), {"json": {"type": "object"}}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(choice=("a", "b")), {"choice": ["a", "b"]}),
        (GuidedDecoding(grammar="g"), {"grammar": "g"}),
    ],
)
def test_forms_are_vllms_structured_outputs(guided: GuidedDecoding, form: dict[str, Any]) -> None:
    assert body(sampling=SamplingOptions(guided_decoding=guided))["structured_outputs"] == form


def test_schema_is_openais_response_format_elsewhere() -> None:
    guided = GuidedDecoding(json=b"{}")
    sent = body(OTHER, sampling=SamplingOptions(guided_decoding=guided))
    assert sent["response_format"]["json_schema"]["schema"] == {}
    guided = GuidedDecoding(grammar="g")
    assert body(LLAMA, sampling=SamplingOptions(guided_decoding=guided))["grammar"] == "g"


def test_log_probabilities_are_requested_by_token() -> None:
    sent = body(output=OutputOptions(logprobs=3))
    assert (sent["logprobs"], sent["return_tokens_as_token_ids"]) == (3, True)
    assert body(LLAMA)["logprobs"] == 1


@pytest.mark.parametrize(
    ("speech", "sent", "field"),
    [
        (VLLM, {"sampling": SamplingOptions(n=2)}, "n, best_of"),
        (VLLM, {"sampling": SamplingOptions(use_beam_search=True)}, "use_beam_search"),
        (VLLM, {"sampling": SamplingOptions(detokenize=False)}, "detokenize"),
        (VLLM, {"sampling": SamplingOptions(bad_words_token_ids=((1, 2),))}, "bad_words"),
        (VLLM, {"output": OutputOptions(prompt_logprobs=1)}, "prompt_logprobs"),
        (VLLM, {"multi_modal_data": {"image_url": (MultimodalData(kind="url"),)}}, "multi_modal"),
        (VLLM, {"bootstrap_info": BootstrapInfo(bootstrap_host="h")}, "bootstrap_info"),
        (VLLM, {"token_ids": b""}, "empty"),
        (VLLM, {"hints": Hints(lora_name="no")}, "lora_name"),
        (VLLM, {"extra_args": b"[1]"}, "extra_args"),
        (VLLM, {"extra_args": b"{"}, "extra_args"),
        (VLLM, {"extra_args": b'{"kv_transfer_params": {"b": 2}}'}, "between servers"),
        (VLLM, {"sampling": SamplingOptions(guided_decoding=GuidedDecoding(backend="x"))},
         "guided_decoding_backend"),
        (OTHER, {"cache_salt": "s"}, "cache_salt"),
        (OTHER, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (OTHER, {"extra_args": b"{}"}, "extra_args"),
        (OTHER, {"output": OutputOptions(logprobs=1)}, "logprobs"),
        (OTHER, {"sampling": SamplingOptions(allowed_token_ids=(1,))}, "allowed_token_ids"),
        (OTHER, {"sampling": SamplingOptions(guided_decoding=GuidedDecoding(regex="a"))},
         "guided_decoding"),
    ],
)  # fmt: skip
def test_unsupported_options_are_refused_by_name(
    speech: ServerDialect, sent: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        body(speech, **sent)


# --- answers --------------------------------------------------------------------------------------


def test_tokens_are_in_their_own_field() -> None:
    piece = parse_completion_event(
        b'{"choices":[{"text":"a","token_ids":[5],"stop_reason":7}]}', VLLM
    )
    assert (piece.token_ids, piece.stop_reason, piece.finish_reason) == ((5,), 7, None)


def test_tokens_are_in_the_log_probabilities_of_llama() -> None:
    event = (
        b'{"choices":[{"text":"a","logprobs":{"content":[{"id":5,"token":"a","logprob":-1.0,'
        b'"top_logprobs":[{"id":6,"token":"b","logprob":-2.0}]}]}}]}'
    )
    piece = parse_completion_event(event, LLAMA)
    assert piece.token_ids == (5,)
    assert piece.log_probs == ((LogProb(5, -1.0), LogProb(6, -2.0)),)


def test_log_probabilities_of_vllm_are_by_number_the_likeliest_first() -> None:
    event = (
        b'{"choices":[{"token_ids":[5],"logprobs":{"tokens":["token_id:5"],'
        b'"token_logprobs":[-2.0],"top_logprobs":[{"token_id:5":-2.0,"token_id:6":-1.0}]}}]}'
    )
    assert parse_completion_event(event, VLLM).log_probs == (
        (LogProb(5, -2.0), LogProb(6, -1.0), LogProb(5, -2.0)),
    )


def test_null_for_a_log_probability_is_the_lowest_one() -> None:
    """Servers write it for numbers that JSON does not have."""
    event = (
        b'{"choices":[{"token_ids":[5],"logprobs":{"tokens":["token_id:5"],'
        b'"token_logprobs":[null],"top_logprobs":[{"token_id:5":null,"token_id:6":-1.0}]}}]}'
    )
    assert parse_completion_event(event, VLLM).log_probs == (
        (LogProb(5, LOWEST_LOG_PROB), LogProb(6, -1.0), LogProb(5, LOWEST_LOG_PROB)),
    )
    event = b'{"choices":[{"text":"a","logprobs":{"content":[{"id":5,"logprob":null}]}}]}'
    assert parse_completion_event(event, LLAMA).log_probs == ((LogProb(5, LOWEST_LOG_PROB),),)


@pytest.mark.parametrize("usage", ["NaN", "+Inf", "-Inf"])
def test_share_of_a_cache_that_is_not_a_number_is_unknown(usage: str) -> None:
    metrics = read_metrics(
        f'vllm:kv_cache_usage_perc {usage}\nvllm:cache_config_info{{num_gpu_blocks="9"}} 1\n'
    )
    assert metrics.cache_usage is None
    assert metrics.engine_stats().kv_used_blocks == 0


def test_counts_come_without_a_choice() -> None:
    event = (
        b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}'
    )
    counts = parse_completion_event(event, VLLM).usage
    assert counts is not None
    assert (counts.prompt_tokens, counts.cached_tokens) == (9, 8)


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_ends_of_the_model_are_ends(reason: str) -> None:
    event = b'{"choices":[{"finish_reason":"%b"}]}' % reason.encode()
    assert parse_completion_event(event, VLLM).finish_reason == reason


@pytest.mark.parametrize("reason", ["abort", "error", "whatever"])
def test_other_ends_are_failures_of_the_server(reason: str) -> None:
    with pytest.raises(ServerFailed, match=repr(reason)):
        parse_completion_event(b'{"choices":[{"finish_reason":"%b"}]}' % reason.encode(), VLLM)


def test_errors_in_a_stream_are_distinguished_by_their_code() -> None:
    with pytest.raises(RequestRejected, match="bad"):
        parse_completion_event(b'{"error":{"message":"bad","code":400}}', VLLM)
    for event in (b'{"error":{"message":"bad","code":500}}', b'{"error":"bad"}'):
        with pytest.raises(ServerFailed, match="bad"):
            parse_completion_event(event, VLLM)


PLAIN = "the server answered 500"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"error":"a"}', "a"),
        (b'{"error":{"error":{"message":"a","code":7}}}', "a"),
        (b'{"error":{"message":{"message":"a"}}}', "a"),
        (b'{"error":[{"message":"a"}]}', "a"),
        (b'[{"error":{"code":500,"message":"a","status":"INTERNAL"}}]', "a"),
        (b'{"errors":[{"detail":"a"}]}', "a"),
        (b'{"error":{"code":"core_died"}}', "core_died"),
        (b'{"object":"error","message":"a"}', "a"),
        (b'{"detail":"a"}', "a"),
        (b'{"detail":[{"msg":"a"}]}', "[{'msg': 'a'}]"),
        (b"upstream connect error", "upstream connect error"),
        (
            b"<html><title>502</title><body><h1>Bad Gateway</h1>nginx</body></html>",
            "502 Bad Gateway nginx",
        ),
        (b"<html>", ""),
        (b"", ""),
        (b"[" * 10_000, "[" * 500),
        (b'{"detail":"\xff"}', '{"detail":"\ufffd"}'),
        (b'{"error":null}', ""),
        (b"5", ""),
    ],
)
def test_error_has_the_message_of_the_server(text: bytes, message: str) -> None:
    assert str(error_of_body(500, text)) == (f"{PLAIN}: {message}" if message else PLAIN)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400}, 400),
        ({"code": "400"}, 400),
        ({"code": 429.0}, 429),
        ({"code": None, "status": 413}, 413),
        ({"status_code": "422 Unprocessable Entity"}, 422),
        ({"code": "context_length_exceeded", "type": "invalid_request_error"}, 400),
        ({"code": None, "type": "invalid_request_error"}, 400),
        ({"type": "BadRequestError"}, 400),
        ({"status": "INVALID_ARGUMENT"}, 400),
        ({"code": 0, "type": "UnprocessableEntityError"}, 422),
        ({"code": "invalid_api_key"}, 401),
        ({"code": "model_not_found", "type": "invalid_request_error"}, 404),
        ({"code": "rate_limit_exceeded", "type": "tokens"}, 429),
        ({"code": "concurrency_limit_exceeded"}, 429),
        ({"code": "tokens_per_minute_exceeded"}, 429),
        ({"code": "usage_limit_exceeded"}, 429),
        ({"code": "billing_hard_limit_exceeded", "type": "invalid_request_error"}, 429),
        ({"code": "missing_credentials"}, 401),
        ({"type": "overloaded_error"}, 503),
        ({"type": "TimeoutError"}, 504),
        ({"code": "internal_error", "type": "server_error"}, 500),
        ({"code": 1301}, 500),
        ({"code": True}, 500),
        ({}, 500),
        ({"error": {"error": {"code": "400"}}}, 400),
        ([{"code": 404}], 404),
    ],
)
def test_error_event_has_the_status_that_it_names_in_any_form(error: Any, status: int) -> None:
    found = error_of_event(
        {"error": {"message": "x"} | error if isinstance(error, dict) else error}
    )
    assert isinstance(found, ServerFailed | RequestRejected)
    assert found.status == status
    assert found.retryable == isinstance(found, ServerFailed)


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        ({"code": 429, "msg": "too fast"}, 429, "too fast"),
        ({"error_code": 336003, "error_msg": "too long"}, 500, "too long"),
        ({"message": "busy", "status": 503}, 503, "busy"),
    ],
)
def test_error_that_stands_in_no_object_is_one(
    event: dict[str, Any], status: int, message: str
) -> None:
    found = error_of_event(event)
    assert isinstance(found, ServerFailed)
    assert found.status == status
    assert message in str(found)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": "a"}], "error": None},
        {"choices": [], "error": {}, "usage": None},
        {"choices": [{"delta": {}, "error": None}]},
        {"id": "x", "message": "hello"},
        {},
    ],
)
def test_event_without_an_error_is_none(event: dict[str, Any]) -> None:
    assert error_of_event(event) is None


def test_used_up_account_is_a_failure_and_no_overload() -> None:
    found = error_of_event({"error": {"message": "x", "code": "insufficient_quota"}})
    assert isinstance(found, ServerFailed)
    assert not isinstance(found, EngineFull)
    limited = error_of_event({"error": {"message": "x", "code": "rate_limit_exceeded"}})
    assert isinstance(limited, EngineFull)


def test_clients_see_no_message_about_the_operators_account() -> None:
    assert error_of_body(401, b'{"error":{"message":"wrong key sk-1"}}').reason == (
        "the server answered 401"
    )
    assert (
        error_of_body(502, b"<h1>Bad Gateway</h1>").reason == "the server answered 502: Bad Gateway"
    )


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["A small town learned to swim.", "  two  spaces\n\nand lines ", "naïve €uro 漢字", "word"],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_tokens_of_text_are_that_text(text: str, step: int) -> None:
    retokenised, tokens = Retokenizer(TOKENIZER), list[int]()
    for start in range(0, len(text), step):
        tokens += retokenised.push(text[start : start + step])
    tokens += retokenised.flush()
    assert TOKENIZER.decode(tokens, skip_special=False) == text


def test_text_is_tokenised_whole_in_any_pieces() -> None:
    text = "The last page was missing, and in the morning"
    retokenised, tokens = Retokenizer(TOKENIZER), list[int]()
    for character in text:
        tokens += retokenised.push(character)
    assert [*tokens, *retokenised.flush()] == list(TOKENIZER.encode_now(text))


# --- figures --------------------------------------------------------------------------------------

PAGE = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 5.0
vllm:iteration_tokens_total_count{engine="0"} 55.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="%s",num_gpu_blocks="41"} 1.0
process_start_time_seconds 1.7e+09
"""


def test_server_metrics_are_read() -> None:
    metrics = read_metrics(PAGE % "True")
    figures = metrics.engine_stats()
    assert (figures.running, figures.waiting, figures.steps) == (2, 1, 55)
    assert (figures.kv_used_blocks, figures.kv_total_blocks) == (20, 40)
    assert (metrics.block_size, metrics.started_at, metrics.ranks) == (32, 1.7e9, 1)


def test_server_that_reuses_no_prefixes_has_no_blocks_to_route_by() -> None:
    assert read_metrics(PAGE % "False").block_size is None


def test_metrics_of_other_servers_are_read_or_missing() -> None:
    other = read_metrics('sglang:num_running_reqs{a="b"} 3.0\nllamacpp:requests_deferred 2\n')
    assert (other.running, other.waiting, other.block_size) == (3, 2, None)
    assert read_metrics("python_info 1.0\n").running is None
