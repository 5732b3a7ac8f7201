"""Tests of the coverage of the behaviour of five parts of NVIDIA Dynamo, line by line.

Field names are the same as there, and so is the behaviour of covered lines; texts are not. A line
is covered by tests that would fail without it, or it is missing, with the reason. Rows that must be
complete are in `WHOLE`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


class Missing(str):
    """The reason why no test covers a line yet."""

    __slots__ = ()


Ids = tuple[str, ...]
"""Ids of tests, from the folder `tests` on."""
Row = dict[str, Ids | Missing]

FORM = "flows/test_preprocessed_requests.py::test_"
PREPROCESS = "unit/app/preprocess"
FLEET = "unit/app/routing/state/test_fleet.py::test_"
CODECS = "unit/streams/test_codecs.py::test_"
PLAN = "unit/app/routing/selection/test_select.py::test_"
WHO = "unit/app/routing/selection/test_eligibility.py::test_"
HINTS = "flows/test_hints.py::test_"
DRY = "flows/test_dry_runs.py::test_"
ROUTER = "flows/test_router_metrics.py::test_"
BOOKS = "flows/test_active_load.py::test_"
CANCELS = "flows/test_router_cancels.py::test_"
ENDS = "unit/app/routing/test_interleavings.py::test_"
KEYS = "unit/app/routing/selection/test_prompt_keys.py::test_"
LOAD = "unit/app/routing/state/test_ledger_state.py::test_"
WORKER = "flows/test_worker.py::test_"
CONTRACT = "unit/app/engine/test_engine_contract.py::test_"
ENGINE = "contracts/test_engine.py::test_"
SPLIT = "flows/test_router_handover.py::test_"
MEETING = "flows/test_router_bootstrap.py::test_"
HANDED = "flows/test_worker_handover.py::test_"
MODELS = "flows/test_gateway_models.py::test_"


PREPROCESSED_REQUEST: Row = {
    "a request that says nothing: every field's default, and what is left out": (
        f"{FORM}request_without_options_equals_one_of_tokens_alone",
        f"{FORM}unsupported_fields_are_refused_by_name",
    ),
    "mdc_sum and router_config_override are null when there are none": (
        f"{FORM}request_without_options_equals_one_of_tokens_alone",
    ),
    "every field is read from its name, and carried to the worker": (
        f"{FORM}every_option_reaches_the_request",
        f"{CODECS}golden_bytes_are_written",
        f"{CODECS}golden_bytes_are_read",
        f"{CODECS}golden_request_sets_every_field",
    ),
    "RoutingHints: all fields": (
        f"{FORM}every_option_reaches_the_request",
        f"{PREPROCESS}/test_nvext.py::test_hints_are_taken_over",
    ),
    "RoutingHints appear with the first one that is written": (
        f"{PREPROCESS}/test_nvext.py::test_request_without_hints_has_no_hints_on_the_wire",
        f"{HINTS}chosen_rank_is_in_the_request_of_the_worker",
    ),
    "RouterParams: ttft and itl targets": (
        f"{PREPROCESS}/test_nvext.py::test_targets_are_taken_over",
        f"{FORM}every_option_reaches_the_request",
        f"{HINTS}informative_fields_reach_the_worker_and_the_log",
    ),
    "BootstrapInfo, TraceLink and PrefillResult: carried between servers, refused of clients": (
        f"{CODECS}golden_request_sets_every_field",
        f"{FORM}unsupported_fields_are_refused_by_name",
    ),
    "MmRoutingInfo: other tokens for overlap; empty or missing means the prompt": (
        f"{FORM}every_option_reaches_the_request",
        f"{HINTS}routing_tokens_replace_the_prompt_in_the_overlap_only",
        f"{KEYS}routing_tokens_and_their_block_contents_replace_the_prompt",
    ),
    "MultimodalData: a url, a raw url, a descriptor of decoded data": (
        f"{FORM}every_option_reaches_the_request",
        f"{FORM}unsupported_fields_are_refused_by_name",
        f"{FORM}model_of_bytes_takes_text_only",
    ),
    "prompt_embeds override the tokens": (
        f"{FORM}every_option_reaches_the_request",
        f"{HINTS}embeddings_have_no_overlap",
    ),
    "annotations with a value and without": (
        f"{FORM}every_option_reaches_the_request",
        f"{DRY}annotation_without_a_value_is_no_dry_run",
    ),
    "the mark of a probe: its own name, left out when false, a minimal probe is valid": (
        f"{FORM}every_option_reaches_the_request",
        f"{FORM}probe_needs_only_its_tokens_and_its_marker",
    ),
    "a request for embeddings with model, checksum and annotations": (
        f"{PREPROCESS}/test_passthrough.py::test_embeddings_keep_their_model_checksum_and_annotations",
    ),
    "agent_context, request_timestamp_ms, mm_processor_kwargs and extra_args are carried": (
        f"{FORM}every_option_reaches_the_request",
        f"{HINTS}informative_fields_reach_the_worker_and_the_log",
        f"{PREPROCESS}/test_nvext.py::test_agent_hints_are_passed_on",
    ),
}

KV_PUSH_ROUTER: Row = {
    "selection by overlap": (
        "flows/test_router_caches.py::test_requests_with_a_prefix_go_where_it_is",
        f"{PLAN}documented_example_is_decided_as_documented",
        f"{HINTS}request_sets_the_credit_of_its_overlap",
    ),
    "selection by a pin of the phase; the phase is aggregated unless said": (
        f"{WHO}each_phase_has_its_own_pin_and_falls_back",
        f"{HINTS}pin_decides_by_name_by_number_and_by_header",
        f"{HINTS}pins_of_the_phases_do_not_bind_a_whole_request",
    ),
    "a pin of a phase falls back to backend_instance_id": (
        f"{WHO}each_phase_has_its_own_pin_and_falls_back",
    ),
    "rank 0 for a pin without dp_rank": (
        f"{HINTS}rank_decides_and_a_pin_without_one_means_rank_0",
    ),
    "a pinned request is booked, with its overlap": (
        f"{PLAN}pinned_request_is_booked_with_its_overlap",
        f"{HINTS}pinned_request_is_booked_with_its_overlap",
    ),
    "a dry run by query_instance_id with any value, and by nothing else": (
        f"{DRY}dry_run_returns_the_worker_and_the_tokens_and_books_nothing",
        f"{DRY}annotation_without_a_value_is_no_dry_run",
    ),
    "a dry run returns worker and tokens and books nothing": (
        f"{DRY}dry_run_returns_the_worker_and_the_tokens_and_books_nothing",
        f"{DRY}dry_run_sees_pins_and_opens_no_session",
        f"{DRY}dry_run_is_also_answered_as_a_stream",
    ),
    "a dry run counts in prompt lengths and hit rates": (
        f"{ROUTER}dry_run_is_in_prompt_lengths_and_hit_rates_and_is_no_decision",
    ),
    "the hit rate is of ceil(length / block) blocks": (
        f"{PLAN}hit_rate_counts_a_block_that_is_not_full_as_one",
        f"{ROUTER}decision_is_counted_with_its_prompt_its_hit_rate_and_its_wait",
    ),
    "approximate mode: what was routed counts as cached, pinned or not": (
        f"{HINTS}prompts_served_by_an_engine_without_events_count_as_cached",
    ),
    "failed marks, additions, releases and guesses are warnings only": (
        f"{BOOKS}lost_worker_reports_fail_no_request",
        "flows/test_worker_epochs.py::test_lost_heartbeat_is_not_repeated",
        f"{WORKER}finished_is_repeated_and_listed_until_it_is_acknowledged",
    ),
    "metrics are there as zeros before the first request": (
        f"{ROUTER}all_metrics_are_zero_before_the_first_request",
        "flows/test_gateway_streams.py::test_metrics_are_there_before_the_first_request",
    ),
    "the start of the prefill is recorded once: the first call wins": (
        f"{ROUTER}second_attempt_is_a_decision_but_its_wait_began_with_the_first",
    ),
    "the first token is recorded once": (
        "unit/app/metrics/test_http_metrics.py::test_first_token_is_counted_once_whatever_follows",
    ),
    "time from token to token by blocks": (
        "unit/app/metrics/test_http_metrics.py::test_times_from_token_to_token_are_counted_by_blocks",
    ),
    "output length and total exactly once, on a dropped stream too": (
        "flows/test_gateway_streams.py::test_metrics_count_answers",
    ),
    "prefill is done with the first item that is not empty": (
        f"{BOOKS}prefill_is_done_with_the_first_token_and_not_with_an_empty_output",
        f"{LOAD}prefill_counts_until_it_is_done_and_as_much_as_was_predicted",
    ),
    "output blocks with decay by the expected length, under a switch": (
        f"{FLEET}answer_weighs_less_the_nearer_it_is_to_its_expected_length",
        f"{PLAN}tokens_that_workers_report_count_as_open",
        f"{PLAN}tokens_of_answers_count_only_under_the_switch",
    ),
    "freed exactly once on end, cancel and a dropped stream": (
        f"{BOOKS}load_of_a_request_is_released_once_for_every_ending",
        f"{BOOKS}two_ends_of_one_request_release_its_load_once",
        f"{LOAD}first_close_of_a_run_is_final",
        f"{ENDS}finished_requests_leave_no_state_and_no_duties",
    ),
    "a cancel wins over an item that is ready": (
        f"{BOOKS}cancel_wins_over_tokens_that_are_ready",
        f"{CANCELS}cancel_precedes_earlier_records_and_waits_as_well",
    ),
    "the rank that was chosen is written into the request": (
        f"{HINTS}chosen_rank_is_in_the_request_of_the_worker",
    ),
    "direct: the decode worker, else the backend; without either an error that names both": (
        f"{WHO}direct_policy_uses_the_pinned_worker",
        f"{HINTS}policy_direct_goes_by_the_decode_worker_else_by_the_backend",
    ),
    "direct books nothing": (
        f"{PLAN}direct_books_no_tokens",
        f"{LOAD}run_of_policy_direct_has_no_load",
    ),
    "spans with their fields": (
        "flows/test_router_spans.py::test_selecting_and_routing_are_spans_with_the_decision",
    ),
}

PREFILL_ROUTER: Row = {
    "without prefill workers a request is served whole": (
        f"{WHO}prefill_workers_take_no_whole_requests",
    ),
    "enforce_disagg makes that an error": (
        f"{SPLIT}enforced_disaggregation_waits_for_a_prefill_worker",
    ),
    "a prefill copy with max_tokens 1; decode gets the original, absent stays absent": (
        f"{SPLIT}prompt_is_computed_by_a_prefill_worker_and_decoded_by_another",
        f"{SPLIT}limits_that_are_absent_stay_absent",
    ),
    "direct mode needs the id of a prefill worker": (f"{SPLIT}policy_direct_needs_both_workers",),
    "the four outcomes of choosing prefill, and what follows each": (
        f"{SPLIT}prompt_is_computed_by_a_prefill_worker_and_decoded_by_another",
        f"{SPLIT}requests_stay_whole_while_prefill_workers_are_gone",
        f"{SPLIT}full_prefill_workers_refuse_as_full_workers_do",
        f"{MEETING}decode_is_dispatched_beside_its_prefill",
    ),
    "decode starts beside prefill on the bootstrap path": (
        f"{MEETING}decode_is_dispatched_beside_its_prefill",
        f"{MEETING}room_has_the_rank_of_the_prefill_and_is_never_repeated",
        f"{MEETING}failed_prefill_ends_the_run_of_decode",
        f"{HANDED}run_waits_for_its_transfer_for_a_limited_time",
    ),
    "round robin's turn goes on with what is dispatched only": (
        f"{DRY}dry_run_sees_pins_and_opens_no_session",
        f"{SPLIT}round_robin_continues_per_phase_and_not_for_pinned_requests",
    ),
    "the prefill's worker and rank are on its copy, its id on decode": (
        f"{SPLIT}prompt_is_computed_by_a_prefill_worker_and_decoded_by_another",
    ),
    "topology: required and unknown fails before prefill starts": (
        f"{SPLIT}prefill_worker_outside_of_required_domains_gets_no_prompt",
    ),
    "topology joins the request's; its value wins on an equal preferred taint": (
        f"{SPLIT}decode_stays_in_the_required_domain",
        f"{SPLIT}preferred_domain_overrides_the_weight_of_the_client",
    ),
    "topology that says nothing makes no constraints": (
        f"{SPLIT}domain_without_taints_adds_no_constraint",
    ),
    "decode's overrides keep the request's others": (
        f"{SPLIT}prompt_is_computed_by_a_prefill_worker_and_decoded_by_another",
    ),
    "a cancel after prefill still dispatches decode": (
        f"{SPLIT}cancel_after_prefill_still_dispatches_decode_for_one_token",
        f"{MEETING}cancel_before_decode_has_room_still_dispatches_it",
        f"{HANDED}cancel_by_a_client_interrupts_no_transfer",
        f"{HANDED}prefill_that_a_decode_waits_for_is_not_cancelled",
    ),
    "deactivation and reactivation are idempotent; readiness with and without enforce_disagg": (
        f"{SPLIT}requests_stay_whole_while_prefill_workers_are_gone",
        f"{SPLIT}enforced_disaggregation_waits_for_a_prefill_worker",
    ),
    "a prefill that was handed off is neither an end nor a failure": (
        "unit/app/routing/test_reconcile.py::test_decode_is_due_after_a_prefill_that_was_handed_off",
        f"{LOAD}prefill_that_was_handed_off_is_not_the_end_of_its_request",
    ),
    "the trace link on the completed path only": (
        "flows/test_router_spans.py::test_run_of_decode_is_linked_to_that_of_its_prefill",
        "flows/test_router_spans.py::test_run_of_decode_beside_its_prefill_is_not_linked_to_it",
    ),
    "dropping the router cancels the activation": Missing(
        "there is nothing to cancel: prefill workers are in the fold of the registry"
    ),
}

LLM_ENGINE: Row = {
    "cleanup after a failed start": (
        f"{WORKER}engine_that_fails_to_start_is_cleaned_up",
        f"{ENGINE}engine_cancelled_during_its_start_is_cleaned_up",
    ),
    "cleanup exactly once, and idempotent": (
        f"{ENGINE}engine_is_cleaned_up_once_and_not_aborted_when_its_worker_ends",
        f"{CONTRACT}second_cleanup_is_named_and_idempotence_is_exercised",
    ),
    "no cleanup when start never ran": (
        f"{ENGINE}engine_that_was_never_started_is_not_cleaned_up",
    ),
    "the worker's id is opaque, unique and stable": (
        f"{ENGINE}worker_id_is_that_of_the_card_in_every_epoch",
        "flows/test_worker_epochs.py::test_newer_process_of_the_same_name_ends_this_one",
    ),
    "the served name defaults to the model": (
        f"{ENGINE}without_a_served_name_the_model_is_served_as_itself",
        f"{ENGINE}clients_request_the_served_name",
    ),
    "one terminal output, and nothing after it": (
        f"{CONTRACT}stream_without_an_end_is_named",
        f"{CONTRACT}output_after_the_end_is_named",
        "flows/test_worker_failures.py::test_answer_without_an_end_is_a_retryable_error",
    ),
    "an error inside the stream is typed and terminal, and not the finish reason error": (
        f"{CONTRACT}typed_error_is_an_end_of_its_own",
        f"{CONTRACT}error_after_the_end_is_named",
        "flows/test_worker_failures.py::test_retryable_engine_error_leaves_the_end_to_the_owner",
        "flows/test_worker_failures.py::test_final_engine_error_has_a_last_chunk",
    ),
    "a cancel between two outputs ends with cancelled": (
        f"{CONTRACT}output_after_a_cancel_is_named",
        f"{CONTRACT}ending_with_cancelled_after_a_cancel_is_right",
        "flows/test_worker_failures.py::test_cancelled_run_ends_with_a_last_chunk_and_aborts_the_engine",
    ),
    "the first token is signalled once": (f"{CONTRACT}first_token_is_reported_once",),
    "the signal does nothing outside decode": Missing(
        "a difference: here it ends the prefill of every run, whatever its phase"
    ),
    "abort on an explicit cancel only, never because a stream was left": (
        f"{ENGINE}engine_is_cleaned_up_once_and_not_aborted_when_its_worker_ends",
        f"{CONTRACT}abort_without_a_cancel_is_named",
    ),
    "drain when nothing new comes any more; its failure is swallowed": (
        f"{WORKER}stopping_worker_drains_finishes_its_runs_and_leaves",
        f"{WORKER}failing_drain_does_not_keep_the_worker_from_leaving",
        f"{ENGINE}worker_whose_engine_fails_to_drain_and_to_clean_up_leaves",
        f"{CONTRACT}second_drain_is_named",
    ),
    "what an engine does not advertise switches off what needs it": (
        f"{ENGINE}without_a_block_size_no_cache_events_are_published",
        f"{ENGINE}without_a_block_size_requests_are_not_routed_by_cache",
        f"{ENGINE}without_max_num_seqs_the_setting_bounds_concurrent_runs",
        f"{ENGINE}without_a_context_length_that_of_the_models_files_counts",
        f"{ENGINE}without_numbers_of_its_cache_and_steps_the_published_ones_count",
    ),
    "bootstrap host and port, both or none": (
        f"{ENGINE}bootstrap_host_and_port_are_on_the_card_both_or_not_at_all",
        f"{CONTRACT}half_a_bootstrap_address_is_named",
    ),
    "constructors of outputs, and their setters": (f"{CONTRACT}outputs_have_their_finish_reason",),
    "usage saturates": (f"{CONTRACT}usage_saturates_at_u32",),
    "a validator in debug": (f"{ENGINE}debug_puts_the_validator_before_every_engine",),
}

MODEL_WATCHER: Row = {
    "a new model gets its pipelines: template, detokeniser, router": (
        f"{MODELS}model_is_loaded_before_its_first_request",
        f"{MODELS}chat_is_rendered_by_the_template_of_its_model",
    ),
    "a pass-through pipeline for backends that take chats or texts themselves": (
        "flows/test_passthrough_models.py::test_server_receives_the_body_unchanged",
        "flows/test_passthrough_models.py::test_stream_has_all_fields_of_the_server",
        "flows/test_passthrough_models.py::test_each_prompt_of_a_completion_is_a_request",
        f"{PREPROCESS}/test_passthrough.py::test_body_is_unchanged_except_for_fields_of_kvlane",
    ),
    "a known model: another endpoint joins": (
        f"{PREPROCESS}/test_model_names.py::test_only_the_models_own_workers_count",
        f"{HINTS}only_allowed_workers_are_considered",
    ),
    "an invalid entry is logged and skipped, and what follows is taken": (
        "unit/streams/views/test_follower.py::test_malformed_records_are_counted_and_skipped",
    ),
    "a missing card is an error for token backends": (
        f"{PREPROCESS}/test_model.py::test_card_without_a_tokenizer_cannot_be_loaded",
        f"{MODELS}model_whose_files_are_missing_is_unavailable_until_they_come",
    ),
    "artifacts are fetched and checked": (
        f"{PREPROCESS}/test_artifacts.py::test_file_is_found_by_its_checksum",
        f"{PREPROCESS}/test_artifacts.py::test_file_with_a_damaged_part_is_unavailable",
        f"{PREPROCESS}/test_artifacts.py::test_file_of_another_size_than_on_its_card_is_unavailable",
    ),
    "a failed put is told and tried again": (f"{MODELS}failed_load_of_a_model_is_repeated",),
    "a model that left is gone for chats and texts alike, whichever of them there were": (
        f"{MODELS}unserved_models_are_released",
        "flows/test_gateway.py::test_only_models_with_a_live_worker_are_listed",
    ),
    "names by slug": Missing("a difference: names are keys of the registry as they are"),
    "the watcher never dies of one bad entry": (
        "unit/streams/views/test_follower.py::test_malformed_records_are_counted_and_skipped",
        "flows/test_preprocessor.py::test_model_without_its_files_is_refused_and_others_continue",
    ),
}

ROWS: dict[str, Row] = {
    "preprocessed_request": PREPROCESSED_REQUEST,
    "kv_push_router": KV_PUSH_ROUTER,
    "prefill_router": PREFILL_ROUTER,
    "llm_engine": LLM_ENGINE,
    "model_watcher": MODEL_WATCHER,
}
WHOLE = ("preprocessed_request", "kv_push_router")
"""Rows in which no line is missing."""


@lru_cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def _covered_lines() -> Iterator[tuple[str, str, str]]:
    for name, row in ROWS.items():
        for line, tests in row.items():
            if not isinstance(tests, Missing):
                yield from ((name, line, test) for test in tests)


def test_every_test_that_covers_a_line_exists() -> None:
    gone = [
        f"{name}: {line}: {test}"
        for name, line, test in _covered_lines()
        if not (TESTS / test.partition("::")[0]).is_file()
        or test.partition("::")[2] not in _tests_of(test.partition("::")[0])
    ]
    assert gone == []


@pytest.mark.parametrize("row", WHOLE)
def test_whole_row_has_no_missing_line(row: str) -> None:
    missing = [line for line, tests in ROWS[row].items() if isinstance(tests, Missing)]
    assert missing == []


@pytest.mark.parametrize("row", ROWS)
def test_line_has_tests_or_a_reason(row: str) -> None:
    for line, tests in ROWS[row].items():
        assert tests, f"{line}: neither tests nor a reason"
