"""Impact of each round of injected faults on client streams. Pure functions.

A gap is attributed to a fault when the stream depended on the target: the worker that ran it, the
gateway that sent it, or a process that all streams depend on. A stream that depended on several is
counted separately, as `several sent_at once`; one that depended on none, as `none of these`: the
noise of the machine itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from workbench.bench.chaos.fault_injection import BROKER_FAULTS, ROLLING, InjectedFault
from workbench.bench.chaos.load_generator import Conversation
from workbench.bench.chaos.log_observer import ObservedRequest, WorkerLoss
from workbench.bench.report import Report, Threshold, at_most, figure, none_of
from workbench.bench.statistics import percentile

ROUND_S = 10.0
"""The least time between the starts of two rounds."""
LOOK_BACK_S, LOOK_AHEAD_S = 1.0, 8.0
"""A gap can belong to a round when it began within this time before or after its first fault: the
last text came a little before it, and a later gap may belong to the next round."""
RECENT_FAULT_S = 20.0
"""A worker that is declared lost within this time after a fault was rightly declared lost."""
SHOWN_GAPS = 3
"""Number of the longest gaps of a round that are listed in its line."""
SEVERAL_CAUSES, NO_CAUSE = "several at once", "none of these"
_OF_ALL = BROKER_FAULTS | {"router", "router-pause", ROLLING}
_LONG = BROKER_FAULTS | {ROLLING}
"""Faults with a long effect: targets follow each other, and a broker's return is an event too."""
ROUTER_FAULTS = ("router", "router-pause")
LATENESS_LIMIT_S = 2.0
"""A load generator that is later than this does not keep the rate of the report."""
WORKER_GAP_MARGIN_S, ROUTER_GAP_LIMIT_S, ASSIGNMENT_LIMIT_S, BROKER_STALL_LIMIT_S = (
    2.0,
    1.0,
    8.0,
    10.0,
)


def longest_silence(moments: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """The longest time between two moments that began in [start, end], and when it did."""
    return max(
        ((b - a, a) for a, b in pairwise(moments) if start <= a <= end), default=(0.0, start)
    )


def attribute(
    chat: Conversation, observed: ObservedRequest | None, faults: Iterable[InjectedFault]
) -> set[InjectedFault]:
    """The faults of a round whose targets this stream depended on at that time."""

    def depends(hit: InjectedFault) -> bool:
        part = hit.kind.partition("-")[0]
        if part == "worker":
            return observed is not None and observed.worker_at(hit.at) == hit.target
        if part == "gateway":
            return chat.gateway_at(hit.at) == hit.target
        return hit.kind in _OF_ALL

    return {hit for hit in faults if depends(hit)}


class Gap(NamedTuple):
    """The longest gap of a stream in a round and its cause: `seconds` from `sent_at` on."""

    cause: str
    seconds: float
    at: float
    chat: Conversation


def stream_gaps(
    faults: Sequence[InjectedFault],
    conversations: Iterable[Conversation],
    observed: Mapping[str, ObservedRequest],
) -> list[Gap]:
    """The longest gap of each stream that ran when the round began, or during a long round.

    A stream runs from its first text on. A stream with several causes is counted separately.
    """
    found: list[Gap] = []
    if not faults:
        return found
    start = min(hit.at for hit in faults)
    began, end = start, start + LOOK_AHEAD_S
    if any(hit.kind in _LONG for hit in faults):  # streams begin and end meanwhile
        began = end = max(hit.recovered_at for hit in faults)
    for chat in conversations:
        times = chat.expected.text_times
        if not times or times[0] >= began or times[-1] <= start:
            continue
        causes = {hit.kind for hit in attribute(chat, observed.get(chat.expected.id), faults)}
        if not causes:
            cause = NO_CAUSE
        else:
            cause = next(iter(causes)) if len(causes) == 1 else SEVERAL_CAUSES
        found.append(Gap(cause, *longest_silence(times, start - LOOK_BACK_S, end), chat))
    return sorted(found, key=lambda gap: gap.seconds)


def longest_assignment_wait_s(
    faults: Sequence[InjectedFault], observed: Iterable[ObservedRequest]
) -> float:
    """The longest wait of a new request for its assignment after a router fault, in seconds.

    -1 without a router fault; infinite for one that was never assigned and has not ended.
    """
    start = min((hit.at for hit in faults if hit.kind in ROUTER_FAULTS), default=None)
    if start is None:
        return -1.0
    waits = [0.0]
    for request in observed:
        if (
            request.requested_at is None
            or not start - 0.5 <= request.requested_at <= start + ROUND_S
        ):
            continue
        if request.assigned:
            waits.append(request.assigned[0][0] - max(request.requested_at, start))
        elif not request.transcript.is_over:
            waits.append(float("inf"))
    return max(waits)


def slowest_first_text(
    faults: Sequence[InjectedFault], conversations: Iterable[Conversation]
) -> Conversation | None:
    """The request with the slowest first text, of those sent during a broker fault."""
    if not any(hit.kind in BROKER_FAULTS for hit in faults):
        return None
    start, end = min(hit.at for hit in faults), max(hit.recovered_at for hit in faults)
    started = (chat for chat in conversations if start <= chat.expected.sent_at <= end)
    return max(started, key=lambda chat: chat.expected.ttft_s, default=None)


def false_positives(
    deaths: Iterable[WorkerLoss], faults: Sequence[InjectedFault]
) -> list[WorkerLoss]:
    """Workers that were declared lost without a fault."""
    return [
        death
        for death in deaths
        if not any(
            hit.target == death.worker and hit.at <= death.at <= hit.recovered_at + RECENT_FAULT_S
            for hit in faults
        )
    ]


def round_line(
    number: int,
    faults: Sequence[InjectedFault],
    conversations: Sequence[Conversation],
    observed: Mapping[str, ObservedRequest],
    deaths: Sequence[WorkerLoss],
) -> dict[str, Any]:
    """A round as a line of the log. Times in ms, or in seconds after the first fault.

    Times are of interactive requests: batch requests wait for free capacity, also in the middle.
    """
    start = min((hit.at for hit in faults), default=0.0)
    batch = {chat.expected.id for chat in conversations if chat.is_batch}
    conversations = [chat for chat in conversations if not chat.is_batch]
    observed = {name: request for name, request in observed.items() if name not in batch}
    wait_s = longest_assignment_wait_s(faults, observed.values())
    slow = slowest_first_text(faults, conversations)
    found = stream_gaps(faults, conversations, observed)
    by_cause: dict[str, list[int]] = {}
    for gap in found:
        by_cause.setdefault(gap.cause, []).append(round(1000 * gap.seconds))
    return {
        "round": number,
        "strikes": [
            {"kind": hit.kind, "victim": hit.target, "ready_s": round(hit.recovered_at - hit.at, 2)}
            for hit in faults
        ],
        "gaps_ms": by_cause,
        "longest": [
            _failed_row(gap, start, observed.get(gap.chat.expected.id))
            for gap in found[-SHOWN_GAPS:]
        ],
        "assigned_ms": None if wait_s < 0 else round(1000 * min(wait_s, 1e6)),
        "first_text_ms": round(1000 * min(slow.expected.ttft_s, 1e6)) if slow else None,
        "slowest": _slow(slow, start, observed.get(slow.expected.id)) if slow else None,
        "false_deaths": [
            {"worker": d.worker, "after_s": round(d.at - start, 2), "silent_ms": d.silent_ms}
            for d in deaths
        ],
    }


def _failed_row(gap: Gap, start: float, request: ObservedRequest | None) -> dict[str, Any]:
    chat = gap.chat
    return {
        "id": chat.expected.id, "cause": gap.cause, "gap_ms": round(1000 * gap.seconds),
        "from_s": round(gap.at - start, 2), "breaks": chat.disconnects,
        "gateways": [name for _, name in chat.gateways],
        "workers": [worker for _, worker in request.assigned] if request else [],
    }  # fmt: skip


def _slow(chat: Conversation, start: float, request: ObservedRequest | None) -> dict[str, Any]:
    """Wait of a request: seconds after the first fault, then after the request was sent."""
    expected = chat.expected
    steps: dict[str, Any] = {}
    if request is not None and request.requested_at is not None:
        steps["on_log_s"] = round(request.requested_at - expected.sent_at, 2)
    if request is not None and request.assigned:
        steps["assigned_s"] = [round(at - expected.sent_at, 2) for at, _ in request.assigned]
    steps |= {"refusals": chat.rejections, "breaks": chat.disconnects}
    return {"id": expected.id, "asked_s": round(expected.sent_at - start, 2), **steps}


def completed_line(
    conversations: Sequence[Conversation], observed: Mapping[str, ObservedRequest]
) -> dict[str, Any]:
    """Completed requests, as a part of a line of the log."""
    bad = [
        {
            "id": chat.expected.id, "verdict": verdict, "ended": chat.expected.finish_reason,
            "class": "batch" if chat.is_batch else "interactive",
            "told": len(chat.expected.text), "due": len(chat.expected.expected.text),
            "breaks": chat.disconnects, "gateways": [name for _, name in chat.gateways],
        }
        for chat in conversations
        if (verdict := _verdict(chat, observed.get(chat.expected.id))) != "right"
    ]  # fmt: skip
    own = [observed[chat.expected.id] for chat in conversations if chat.expected.id in observed]
    batch_s = [
        chat.ended_at - chat.expected.sent_at
        for chat in conversations
        if chat.is_batch and chat.ended_at is not None
    ]
    return {
        "asked": len(conversations),
        "batch": sum(chat.is_batch for chat in conversations),
        "agents": sum(chat.agent_content is not None for chat in conversations),
        "batch_s": round(max(batch_s, default=0.0), 1),
        "bad": bad,
        "broken": sum(chat.disconnects > 0 for chat in conversations),
        "refused": sum(chat.rejections for chat in conversations),
        "failed_over": sum(request.transcript.attempt > 0 for request in own),
    }


def _verdict(chat: Conversation, request: ObservedRequest | None) -> str:
    """The verdict on the client's text and on the text in the log: both must be right."""
    if chat.verdict != "right" or request is None:
        return chat.verdict
    seen = request.transcript
    due = chat.expected.expected.text if chat.agent_content is None else chat.agent_content
    return "right" if seen.text == due and not seen.gaps else "wrong"


def chaos_report(rounds: Sequence[Mapping[str, Any]], worker_timeout_s: float) -> Report:
    """The report of all rounds of a log."""
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in rounds:
        for strike in line.get("strikes", ()):
            kinds[strike["kind"]]["ready"].append(strike["ready_s"])
        for cause, found in line.get("gaps_ms", {}).items():
            kinds[cause]["gaps"] += found
        hit = {strike["kind"] for strike in line.get("strikes", ())}
        for wait, of in (("assigned", set(ROUTER_FAULTS)), ("first_text", set(BROKER_FAULTS))):
            if line.get(f"{wait}_ms") is not None and len(hit & of) == 1:
                kinds[next(iter(hit & of))][wait].append(line[f"{wait}_ms"])
    rows = [_row(kind, own) for kind, own in sorted(kinds.items(), key=lambda k: _place(k[0]))]
    return Report("chaos", rows, [*_verdicts(rounds), *_bars(kinds, rounds, worker_timeout_s)])


def _place(kind: str) -> tuple[bool, str]:
    return kind in (SEVERAL_CAUSES, NO_CAUSE), kind


def _row(kind: str, own: Mapping[str, list[float]]) -> dict[str, Any]:
    gaps_ms, assigned = own.get("gaps", []), own.get("assigned", [])
    ready_s = own.get("ready", [])
    return {
        "hit": kind,
        "times": len(ready_s),
        "streams that ran": len(gaps_ms),
        "gap ms": {
            "p50": percentile(gaps_ms, 0.5),
            "p99": percentile(gaps_ms, 0.99),
            "max": max(gaps_ms, default=float("nan")),
        },
        "longest wait for assignment ms": {
            "p50": percentile(assigned, 0.5),
            "max": max(assigned, default=float("nan")),
        },
        "well again s, p50": percentile(ready_s, 0.5),
    }


def _verdicts(lines: Sequence[Mapping[str, Any]]) -> list[Threshold]:
    bad = [b["verdict"] for line in lines for b in line.get("bad", ())]
    requests = sum(line.get("asked", 0) for line in lines)
    kills = sum(len(line.get("strikes", ())) for line in lines)
    unended = sum(line.get("unended", 0) for line in lines)
    named = ("lost", "twice", "wrong")
    agents = sum(line.get("agents", 0) for line in lines)
    thresholds = [
        figure("kills and stops", kills, ""),
        figure("asked", requests, ""),
        figure("agents of them", agents, ""),
    ]
    if asking_s := sum(line.get("asking_s", 0) for line in lines):
        kept = sum(line.get("requests", 0) for line in lines) / asking_s
        thresholds.append(figure("asked a second", kept, ""))
    late_s = max((line.get("late_ms", 0) for line in lines), default=0) / 1000
    limit = f"<= {LATENESS_LIMIT_S:g}"
    is_met = late_s <= LATENESS_LIMIT_S
    thresholds.append(Threshold("greatest delay of the load generator", late_s, "s", limit, is_met))
    thresholds += [
        Threshold(name, bad.count(name), "texts", "0", name not in bad) for name in named
    ]
    thresholds.append(none_of("requests on the log without an end", unended))
    if any("preemptions" in line for line in lines):
        batch = sum(line.get("batch", 0) for line in lines)
        preemptions = sum(line.get("preemptions", 0) for line in lines)
        longest_s = max(line.get("batch_s", 0.0) for line in lines)
        thresholds += [
            figure("batch requests of them", batch, ""),
            figure("preemptions", preemptions, ""),
            figure("longest batch request", longest_s, "s"),
        ]
    if any("handover_ms" in line for line in lines):
        times_ms = [ms for line in lines for ms in line.get("handover_ms", ())]
        thresholds.append(
            Threshold("handed over", len(times_ms), "requests", "> 0", bool(times_ms))
        )
        thresholds.append(
            figure("hand-over to Started of decode, p50", percentile(times_ms, 0.5), "ms")
        )
    for field, faulty in (("without_result", "without"), ("several_results", "with several")):
        count = sum(len(line.get(field, ())) for line in lines)
        thresholds.append(none_of(f"answers {faulty} results", count))
    return thresholds


def _bars(
    kinds: Mapping[str, Mapping[str, list[float]]],
    lines: Sequence[Mapping[str, Any]],
    worker_timeout_s: float,
) -> list[Threshold]:
    thresholds = []
    limits = {
        "worker": worker_timeout_s + WORKER_GAP_MARGIN_S,
        "worker-pause": worker_timeout_s + WORKER_GAP_MARGIN_S,
        "router": ROUTER_GAP_LIMIT_S,
        "router-pause": ROUTER_GAP_LIMIT_S,
        **dict.fromkeys(sorted(BROKER_FAULTS), BROKER_STALL_LIMIT_S),
    }
    for kind, limit_s in limits.items():
        if kind in kinds and (found := kinds[kind].get("gaps")):
            gap_s = max(found) / 1000
            name = f"longest gap of a running stream, {kind}"
            thresholds.append(at_most(name, gap_s, "s", limit_s))
    waits = {
        "assigned": ("assignment", ROUTER_FAULTS, ASSIGNMENT_LIMIT_S),
        "first_text": ("first text", sorted(BROKER_FAULTS), BROKER_STALL_LIMIT_S),
    }
    for wait, (awaited, of, limit_s) in waits.items():
        for kind in of:
            if kind in kinds and (found := kinds[kind].get(wait)):
                wait_s = max(found) / 1000
                name = f"longest wait of a new request for its {awaited}, {kind}"
                thresholds.append(at_most(name, wait_s, "s", limit_s))
    false = sum(len(line.get("false_deaths", ())) for line in lines)
    thresholds.append(none_of("workers declared lost that were not hit", false))
    return thresholds
