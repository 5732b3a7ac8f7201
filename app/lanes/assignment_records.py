"""The two records of a dispatch: `Assigned`, the decision, and `Assignment`, the work. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kvlane.app.lanes.remaining_work import RemainingWork, continuation_blocker
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.selection.handover_rules import prefill_request
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.request_state import RunId
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assigned, Assignment, SessionUse
from kvlane.streams.request import BootstrapInfo, Request


def decision_record(
    rest: RemainingWork, run: RunId, choice: Placement, router: str, known_ms: int,
    *, continues_guided: bool,
) -> Assigned:  # fmt: skip
    """The decision for a run. `known_ms`: append time of the youngest record of the ledger read.
    `continues_guided`: as in the config of the run's engine."""
    request = rest.request
    is_guided = request.sampling.guided_decoding is not None
    can_continue = (continues_guided or not is_guided) and not continuation_blocker(request)
    return Assigned(
        id=request.id, attempt=run.attempt, phase=run.phase, worker=run.worker, epoch=run.epoch,
        origin=rest.origin, responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
        rank=choice.worker_rank.rank, base_tokens=len(rest.emitted),
        prompt_tokens=rest.prompt_tokens,
        policy=choice.policy, params=choice.params, seed=choice.seed,
        block_size=choice.block_size, cached_tokens_predicted=choice.cached_tokens,
        prefill_tokens=choice.prefill_tokens, router=router,
        held_ms=choice.forecast.waited_ms, ttft_ms_predicted=choice.forecast.ttft_ms,
        session=_session_use(request, choice), lora_name=request.hints.lora_name or "",
        known_ms=known_ms,
        service_class=request.service_class, is_preemptible=can_continue,
        choice=choice.choice, candidate_rows=choice.record, is_prompt=request.queued_ms > 0,
        itl_ms_predicted=choice.forecast.itl_ms, prefix_marks=choice.prefix_marks,
    )  # fmt: skip


def assignment_record(
    rest: RemainingWork, run: RunId, choice: Placement, bootstrap: BootstrapInfo | None,
    now_ms: int, handover_until_ms: int,
) -> Assignment:  # fmt: skip
    return Assignment(
        worker=run.worker, epoch=run.epoch, rank=choice.worker_rank.rank, attempt=run.attempt,
        phase=run.phase, request=_request_of(rest, choice, bootstrap), origin=rest.origin,
        responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
        budget_s=(rest.deadline_ms - now_ms) / 1000,
        taken=pack_tokens(rest.emitted), taken_chars=rest.emitted_chars,
        handoff_until_ms=handover_until_ms, taken_data_chars=rest.emitted_data_chars,
    )  # fmt: skip


def _request_of(rest: RemainingWork, choice: Placement, bootstrap: BootstrapInfo | None) -> Request:
    """The request as its worker gets it: with the rank that was chosen."""
    request, place = rest.request, choice.worker_rank
    if request.result is not None and request.result.stored is not None:
        request = replace(request, result=None)  # no worker reads it
    if choice.phase == "prefill":
        return prefill_request(request, place, len(rest.emitted), bootstrap)
    if place.rank == (request.hints.dp_rank or 0):
        return request
    return replace(request, hints=replace(request.hints, dp_rank=place.rank))


def _session_use(request: Request, choice: Placement) -> SessionUse | None:
    control = request.hints.session_control
    if control is None:
        return None
    bound = choice.session_rank or WorkerRank("", 0)
    return SessionUse(
        id=control.session_id, timeout_s=control.timeout, closes=control.action == "close",
        bound_worker=bound.worker, bound_epoch=bound.epoch, bound_rank=bound.rank,
    )  # fmt: skip
