"""Mutations for mutation testing: each disables one rule of the real code while it is applied.

A simulation that passes without a rule does not check it. So every rule of the delivery guarantees
has a mutation here, and the tests require that the simulation detects it: alone, or together with
the rule that masks its loss, which is named with the reason.

A mutation replaces attributes of real modules and classes; the product has no code for it.

    python -m tests.simulation.mutations NAME[+NAME] SEED     the history of a seed without rules
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import NamedTuple

from tests.simulation.replacements import Replacement, edge, reading, router, worker
from workbench.testing.seed_simulation import simulate_seed
from workbench.testing.world_parameters import Scenario


class MaskingRule(NamedTuple):
    """Why the loss of a rule has no visible effect as long as another one (`by`) holds."""

    by: str
    because: str


class Mutation(NamedTuple):
    """One disabled rule. A covered one has to be detected together with its cover.

    `expected_kinds`: kinds of problems that follow from the loss of this rule, as a verdict names
    them, separated by spaces. Others do not count: a faulty mutation causes them, too.
    `scenarios`: only worlds with them show the harm often enough.
    """

    name: str
    expected_kinds: str
    rule: str
    replacements: Callable[[], Iterable[Replacement]]
    covered: MaskingRule | None = None
    scenarios: tuple[Scenario, ...] = ()

    @property
    def to_detect(self) -> str:
        """The mutations to apply: this one alone, or together with its cover."""
        return f"{self.name}+{self.covered.by}" if self.covered else self.name


def scenarios_of(names: str) -> tuple[Scenario, ...]:
    """The scenarios that these mutations need (see `simulate_seed`)."""
    needed = (MUTATIONS[name].scenarios for name in filter(None, names.split("+")))
    return tuple(dict.fromkeys(chain.from_iterable(needed)))


@contextmanager
def apply_mutations(names: str) -> Iterator[None]:
    """Apply these mutations (names joined by "+") inside the block. Raises KeyError."""
    with ExitStack() as stack:
        for name in filter(None, names.split("+")):
            for owner, attribute, replacement in MUTATIONS[name].replacements():
                original = getattr(owner, attribute, _MISSING)
                if isinstance(owner, type):
                    original = owner.__dict__[attribute]
                setattr(owner, attribute, replacement)
                stack.callback(_restore, owner, attribute, original)
        yield


_MISSING = object()


def _restore(owner: object, attribute: str, original: object) -> None:
    if original is _MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, original)


MUTATIONS: dict[str, Mutation] = {
    m.name: m
    for m in (
        Mutation("edge", "open hanging", "level-triggered reconciliation", router.only_on_change),
        Mutation(
            "newest-run",
            "load",
            "reconciliation of each run",
            router.only_the_newest_run_counts,
            MaskingRule(
                "no-barrier",
                "an attempt has two runs only where two routers decided it, and a "
                "router that reads the ledger before it serves knows the first decision",
            ),
            scenarios=("take-overs",),
        ),
        Mutation(
            "no-verify",
            "open hanging",
            "looking for runs that are missing",
            router.missing_runs_are_not_detected,
            scenarios=("take-overs",),
        ),
        Mutation(
            "count-refusals", "causeless", "free worker_full", router.refusals_count_as_failures
        ),
        Mutation(
            "cancel-early",
            "open hanging job",
            "Cancel done after its Ended",
            router.cancel_done_when_read,
        ),
        Mutation(
            "no-fencing", "StepLimitExceeded", "Fencing before Fence", router.fence_without_fencing
        ),
        Mutation("no-fence", "hanging", "Fence before gathering", router.no_fence),
        Mutation(
            "no-started",
            "hanging",
            "Started before the first Chunk",
            router.no_started,
            scenarios=("take-overs",),
        ),
        Mutation(
            "started-unknown",
            "hanging",
            "a Started alone makes its id known",
            router.started_is_not_knowledge,
            scenarios=("take-overs",),
        ),
        Mutation(
            "finished-once",
            "open hanging",
            "Finished until acknowledged",
            router.finished_once,
            MaskingRule(
                "no-verify", "a run whose end was lost is missing from its worker's heartbeat"
            ),
        ),
        Mutation("ended-first", "hanging", "End before Ended", router.ended_before_end),
        Mutation(
            "no-barrier",
            "load",
            "reading the ledger to its end on take-over",
            router.no_barrier_on_take_over,
            MaskingRule(
                "newest-run", "a request decided twice has twin runs, and each is reconciled"
            ),
            scenarios=("take-overs",),
        ),
        Mutation("commit-early", "hanging", "low-water commits", router.commit_early),
        Mutation(
            "highest-from",
            "hanging",
            "the lowest responses_from",
            router.highest_responses_from,
            MaskingRule("no-barrier", "as for newest-run: one decision has one responses_from"),
            scenarios=("take-overs",),
        ),
        Mutation(
            "old-attempts",
            "StepLimitExceeded open",
            "nothing opens below an attempt",
            router.late_records_open_old_attempts,
        ),
        Mutation(
            "past-fence",
            "hanging hole",
            "gathering to the first Fence",
            router.gather_past_the_first_fence,
        ),
        Mutation(
            "finished-early",
            "hanging",
            "Finished after the last ack",
            worker.finished_before_the_last_ack,
        ),
        Mutation(
            "go-on", "hole hanging", "fail-stop after a lost Chunk", worker.go_on_after_a_lost_chunk
        ),
        Mutation(
            "last-words",
            "causeless",
            "no records after one's own Lost",
            worker.records_are_written_when_lost,
        ),
        Mutation(
            "card-first",
            "open hanging",
            "slot position before the card",
            worker.card_before_slot_position,
            MaskingRule(
                "no-verify", "an assignment that was skipped is found as one that never starts"
            ),
        ),
        Mutation(
            "same-epoch",
            "StepLimitExceeded",
            "a new epoch for each registration",
            worker.epoch_used_again,
        ),
        Mutation(
            "zombies",
            "hanging hole",
            "skipping Chunks of lower attempts",
            edge.lower_attempts_are_accepted,
        ),
        Mutation(
            "own-clock", "causeless", "broker time for deadlines and deaths", worker.own_clock
        ),
        Mutation(
            "ask-once", "failure", "retrying until a broker answers", worker.reads_are_not_retried
        ),
        Mutation(
            "prompts-early",
            "hanging",
            "prompts committed when published",
            edge.commit_prompts_early,
            scenarios=("backlog",),
        ),
        Mutation(
            "prompts-by-poll",
            "again",
            "prompts committed as they are acknowledged",
            edge.commit_whole_polls,
            MaskingRule(
                "ended-forgotten",
                "a prompt that is published again after its end is known by its append",
            ),
            scenarios=("backlog",),
        ),
        Mutation(
            "prompts-refused",
            "causeless",
            "prompts are queued, not rejected",
            edge.prompts_are_refused,
        ),
        Mutation(
            "paused", "uncommitted", "resuming prompts after a pause", edge.prompts_paused_for_ever
        ),
        Mutation(
            "credit-acknowledged",
            "credit",
            "credit of a request is used until a report has read it",
            edge.acknowledged_requests_return_credit,
            scenarios=("batch",),
        ),
        Mutation(
            "credit-late",
            "credit",
            "a report returns the credit of what its router has read only",
            edge.late_reports_return_credit,
            scenarios=("batch",),
        ),
        Mutation(
            "room-unshared",
            "shares",
            "a preprocessor uses the room by its share of the partitions",
            edge.room_is_not_shared,
        ),
        Mutation(
            "from-start",
            "received",
            "resuming a stream from a position",
            edge.answers_from_their_beginning,
            scenarios=("keys",),
        ),
        Mutation(
            "from-now",
            "waiting",
            "attaching from the beginning",
            edge.answers_from_now_on,
            scenarios=("keys",),
        ),
        Mutation(
            "events-once",
            "caches",
            "cache events until acknowledged",
            router.cache_events_once,
            scenarios=("caches",),
        ),
        Mutation(
            "snapshot-ahead",
            "caches",
            "state and position of a snapshot from one moment",
            worker.snapshot_ahead_of_its_state,
            scenarios=("caches",),
        ),
        Mutation(
            "join-ahead",
            "caches load",
            "reading on from the position of a view that joins",
            edge.joining_views_skip_records,
            scenarios=("caches",),
        ),
        Mutation(
            "preempt-unfenced",
            "hanging hole wrong",
            "Fence before a preempted run ends",
            router.preempt_without_a_fence,
            scenarios=("batch",),
        ),
        Mutation(
            "evacuate-unfenced",
            "hanging hole wrong",
            "Fence before an evacuated run ends",
            router.evacuate_without_a_fence,
            scenarios=("cordons",),
        ),
        Mutation(
            "cordon-forgotten",
            "cordons",
            "an order about a worker in all its epochs",
            router.restarted_worker_is_not_cordoned,
            scenarios=("cordons",),
        ),
        Mutation(
            "renewal-blank",
            "hanging hole wrong results",
            "the answer so far in the record of a renewal",
            router.renewals_lack_the_answer,
            scenarios=("batch", "backlog"),
        ),
        Mutation(
            "result-early",
            "results",
            "commit after the result was written",
            router.commit_before_the_result,
            scenarios=("batch",),
        ),
        Mutation(
            "result-open",
            "result results",
            "results of finished requests only",
            router.results_of_what_goes_on,
            scenarios=("batch",),
        ),
        Mutation(
            "prefill-chunks",
            "hole wrong hanging",
            "no Chunk of a prefill",
            router.prefill_writes_chunks,
            scenarios=("roles",),
        ),
        Mutation(
            "decode-early",
            "invalid",
            "decode after the hand-over",
            router.decode_before_the_handover,
            scenarios=("roles",),
        ),
        Mutation(
            "handover-twice",
            "twice",
            "a hand-over is used once",
            router.handovers_are_used_again,
            scenarios=("roles", "take-overs"),
        ),
        Mutation(
            "handover-late",
            "late",
            "no hand-over past its lease",
            router.handovers_never_expire,
            scenarios=("roles",),
        ),
        Mutation(
            "decode-lost",
            "StepLimitExceeded open hanging",
            "the next attempt after a hand-over that is not used",
            router.unused_handovers_are_forgotten,
            scenarios=("roles",),
        ),
        Mutation(
            "prefill-failed",
            "open hanging running uncommitted",
            "the end of decode when the prefill that it waits for has failed",
            router.decode_waits_for_failed_prefills,
            MaskingRule("transfer-endless", "the wait of decode ends, if later"),
            scenarios=("roles",),
        ),
        Mutation(
            "transfer-endless",
            "open hanging running uncommitted",
            "the limit on the wait for a transfer",
            router.transfers_never_time_out,
            MaskingRule("prefill-failed", "most waits in vain are for prefills that failed"),
            scenarios=("roles",),
        ),
        Mutation(
            "transfer-cancelled",
            "interrupted",
            "no cancel of a transfer",
            router.cancels_interrupt_transfers,
            scenarios=("roles", "take-overs"),
        ),
        Mutation(
            "merge-across",
            "received",
            "a piece of what a resuming reader lacks alone",
            reading.pieces_merge_across_positions,
            scenarios=("long answers",),
        ),
        Mutation(
            "results-unseen",
            "results",
            "no second result of a request that has one",
            reading.results_are_written_unseen,
            scenarios=("batch jobs",),
        ),
        Mutation(
            "results-unread",
            "results",
            "reading the results of other owners of a lane",
            reading.results_of_others_are_not_looked_for,
            scenarios=("backlog",),
        ),
        Mutation(
            "ended-forgotten",
            "again",
            "ids of ended prompts for as long as a copy can be read",
            router.ended_prompts_are_forgotten,
            scenarios=("backlog",),
        ),
        Mutation(
            "start-late",
            "hanging open",
            "reading the ledger back for as long as a request may take",
            router.ledger_is_read_from_a_minute_ago,
            scenarios=("absence",),
        ),
        Mutation(
            "revoked-kept",
            "surprise",
            "following the file of keys",
            edge.revoked_keys_are_kept,
            scenarios=("keys",),
        ),
        Mutation(
            "any-tenant",
            "surprise",
            "streams of the same tenant only",
            edge.streams_are_read_by_any_tenant,
            scenarios=("keys",),
        ),
        Mutation(
            "tenants-meet",
            "tenants",
            "sessions and cache salts by tenant",
            edge.tenants_share_sessions_and_caches,
            scenarios=("keys",),
        ),
        Mutation(
            "limits-kept",
            "limits",
            "a limit counts requests until they end",
            edge.ended_requests_count_on,
            scenarios=("limits",),
        ),
        Mutation(
            "limits-apart",
            "limits",
            "shares of gateways in a limit",
            edge.limits_hold_for_each_gateway,
            scenarios=("limits",),
        ),
        Mutation(
            "files-apart",
            "limits",
            "bytes of files of a tenant in the order of the log, over all gateways",
            edge.files_count_at_each_gateway,
            scenarios=("limits",),
        ),
        Mutation(
            "batches-apart",
            "limits",
            "batches of a tenant in the order of the log, over all gateways",
            edge.batches_count_at_each_gateway,
            scenarios=("limits",),
        ),
        Mutation(
            "replies-awaited",
            "held",
            "results that wait for no topic of a client",
            reading.results_wait_for_replies,
            scenarios=("replies",),
        ),
        Mutation(
            "reply-early",
            "reply",
            "a request with a reply is done when that is sent",
            reading.requests_are_done_before_their_replies,
            scenarios=("replies",),
        ),
        Mutation(
            "reply-again",
            "reply",
            "looking for a reply that may be there",
            reading.replies_are_not_looked_for,
            scenarios=("replies",),
        ),
        Mutation("any-model", "misrouted", "workers of the model only", edge.any_model),
        Mutation("any-lane", "poison", "dead letters for records of other lanes", edge.any_lane),
        Mutation(
            "no-objections",
            "causeless",
            "rejecting requests that no worker can run",
            edge.no_objections,
        ),
        Mutation(
            "grammar-at-root",
            "wrong",
            "a grammar that accepts the tokens so far",
            worker.grammar_is_not_advanced,
            scenarios=("agents",),
        ),
        Mutation(
            "ids-drawn",
            "parts",
            "ids of calls that follow from the request",
            worker.ids_of_calls_are_drawn,
            scenarios=("agents",),
        ),
        Mutation(
            "delta-dropped",
            "parts",
            "replays that end where readers are",
            worker.replay_drops_a_delta,
            scenarios=("agents",),
        ),
        Mutation(
            "data-again",
            "parts",
            "replays whose parts are not shown again",
            worker.replay_shows_its_data_again,
            scenarios=("agents",),
        ),
    )
}


if __name__ == "__main__":
    _, without, seed = sys.argv
    with apply_mutations(without):
        report = simulate_seed(int(seed), scenarios_of(without)).report()
        sys.stdout.write(report + "\n")
