"""What the strikes of a round cost those who asked: pure functions of what was heard and when.

A silence is blamed on a strike when the stream depended on what was hit: a worker that ran it, the
gateway that told it, or what all streams depend on. One that depended on several is counted apart,
as `several at once`; one that depended on none, as `none of these`: what the machine itself does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.bench.crowd import Talk
from app.bench.report import Bar, Report
from app.bench.samples import percentile
from app.bench.strikes import OF_BROKERS, ROLLING, Hit
from app.bench.witness import Death, Story

REACH_S = 10.0
"""Rounds follow each other after so long at least."""
BEFORE_S, AFTER_S = 1.0, 8.0
"""A silence can be a round's doing when it began so long before its first strike or after it: the
last text came a little before, and what begins later may be the next round's."""
RECENT_S = 20.0
"""A worker that is declared lost so long after it was hit was rightly so."""
SHOWN = 3
"""How many of the longest gaps of a round are told of in its line."""
SEVERAL, NOBODY = "several at once", "none of these"
_OF_ALL = OF_BROKERS | {"router", "router-pause", ROLLING}
_LONG = OF_BROKERS | {ROLLING}
"""What goes on being felt: parts follow each other, a broker's return is an event of its own."""
ROUTERS = ("router", "router-pause")
LATE_S = 2.0
"""Those who ask later than that do not keep the pace that the report is about."""
WORKER_BEYOND_S, ROUTER_GAP_S, ASSIGNED_S, STALL_S = 2.0, 1.0, 8.0, 10.0


def silence(moments: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """The longest time between two moments that began in [start, end], and when it did."""
    return max(
        ((b - a, a) for a, b in pairwise(moments) if start <= a <= end), default=(0.0, start)
    )


def blamed(talk: Talk, story: Story | None, hits: Iterable[Hit]) -> set[Hit]:
    """The hits of a round that this stream depended on, when they came."""

    def depends(hit: Hit) -> bool:
        part = hit.kind.partition("-")[0]
        if part == "worker":
            return story is not None and story.worker_at(hit.at) == hit.victim
        if part == "gateway":
            return talk.gateway_at(hit.at) == hit.victim
        return hit.kind in _OF_ALL

    return {hit for hit in hits if depends(hit)}


class Gap(NamedTuple):
    """The longest silence of a stream in a round, by its cause: `seconds` from `at` on."""

    cause: str
    seconds: float
    at: float
    talk: Talk


def gaps(hits: Sequence[Hit], talks: Iterable[Talk], stories: Mapping[str, Story]) -> list[Gap]:
    """The longest silence of each stream that ran when the round began, or while it went round.

    A stream runs from its first text on. Those that several kinds of hits held up count apart.
    """
    found: list[Gap] = []
    if not hits:
        return found
    start = min(hit.at for hit in hits)
    began, end = start, start + AFTER_S
    if any(hit.kind in _LONG for hit in hits):  # streams begin and end meanwhile
        began = end = max(hit.ready_at for hit in hits)
    for talk in talks:
        times = talk.asked.times
        if not times or times[0] >= began or times[-1] <= start:
            continue
        causes = {hit.kind for hit in blamed(talk, stories.get(talk.asked.id), hits)}
        if not causes:
            cause = NOBODY
        else:
            cause = next(iter(causes)) if len(causes) == 1 else SEVERAL
        found.append(Gap(cause, *silence(times, start - BEFORE_S, end), talk))
    return sorted(found, key=lambda gap: gap.seconds)


def assignment_s(hits: Sequence[Hit], stories: Iterable[Story]) -> float:
    """The longest wait of any new request for its assignment, from a router's end on, in seconds.

    -1 without a hit on routers; infinite for one that was never assigned and has not ended.
    """
    start = min((hit.at for hit in hits if hit.kind in ROUTERS), default=None)
    if start is None:
        return -1.0
    waits = [0.0]
    for story in stories:
        if story.asked_at is None or not start - 0.5 <= story.asked_at <= start + REACH_S:
            continue
        if story.assigned:
            waits.append(story.assigned[0][0] - max(story.asked_at, start))
        elif not story.transcript.over:
            waits.append(float("inf"))
    return max(waits)


def slowest(hits: Sequence[Hit], talks: Iterable[Talk]) -> Talk | None:
    """Who waited longest for a first text, of those who asked while a broker was hurt."""
    if not any(hit.kind in OF_BROKERS for hit in hits):
        return None
    start, end = min(hit.at for hit in hits), max(hit.ready_at for hit in hits)
    asked = (talk for talk in talks if start <= talk.asked.at <= end)
    return max(asked, key=lambda talk: talk.asked.ttft_s, default=None)


def false_deaths(deaths: Iterable[Death], hits: Sequence[Hit]) -> list[Death]:
    """Workers that were declared lost although nothing had been done to them."""
    return [
        death
        for death in deaths
        if not any(
            hit.victim == death.worker and hit.at <= death.at <= hit.ready_at + RECENT_S
            for hit in hits
        )
    ]


def row_of(
    number: int,
    hits: Sequence[Hit],
    talks: Sequence[Talk],
    stories: Mapping[str, Story],
    deaths: Sequence[Death],
) -> dict[str, Any]:
    """A round as a line of the log. Milliseconds, and seconds from the first strike on."""
    start = min((hit.at for hit in hits), default=0.0)
    wait_s = assignment_s(hits, stories.values())
    slow = slowest(hits, talks)
    found = gaps(hits, talks, stories)
    by_cause: dict[str, list[int]] = {}
    for gap in found:
        by_cause.setdefault(gap.cause, []).append(round(1000 * gap.seconds))
    return {
        "round": number,
        "strikes": [
            {"kind": hit.kind, "victim": hit.victim, "ready_s": round(hit.ready_at - hit.at, 2)}
            for hit in hits
        ],
        "gaps_ms": by_cause,
        "longest": [_told(gap, start, stories.get(gap.talk.asked.id)) for gap in found[-SHOWN:]],
        "assigned_ms": None if wait_s < 0 else round(1000 * min(wait_s, 1e6)),
        "first_text_ms": round(1000 * min(slow.asked.ttft_s, 1e6)) if slow else None,
        "slowest": _slow(slow, start, stories.get(slow.asked.id)) if slow else None,
        "false_deaths": [
            {"worker": d.worker, "after_s": round(d.at - start, 2), "silent_ms": d.silent_ms}
            for d in deaths
        ],
    }


def _told(gap: Gap, start: float, story: Story | None) -> dict[str, Any]:
    """A gap, for those who ask what it was."""
    talk = gap.talk
    return {
        "id": talk.asked.id, "cause": gap.cause, "gap_ms": round(1000 * gap.seconds),
        "from_s": round(gap.at - start, 2), "breaks": talk.breaks,
        "gateways": [name for _, name in talk.gateways],
        "workers": [worker for _, worker in story.assigned] if story else [],
    }  # fmt: skip


def _slow(talk: Talk, start: float, story: Story | None) -> dict[str, Any]:
    """Where a request waited: seconds from the first strike on, then from being asked on."""
    asked = talk.asked
    steps: dict[str, Any] = {}
    if story is not None and story.asked_at is not None:
        steps["on_log_s"] = round(story.asked_at - asked.at, 2)
    if story is not None and story.assigned:
        steps["assigned_s"] = [round(at - asked.at, 2) for at, _ in story.assigned]
    steps |= {"refusals": talk.refusals, "breaks": talk.breaks}
    return {"id": asked.id, "asked_s": round(asked.at - start, 2), **steps}


def account(talks: Sequence[Talk], stories: Mapping[str, Story]) -> dict[str, Any]:
    """Requests that are over, as a part of a line of the log."""
    bad = [
        {
            "id": talk.asked.id, "verdict": verdict, "ended": talk.asked.ended,
            "told": len(talk.asked.text), "due": len(talk.asked.due.text),
            "breaks": talk.breaks, "gateways": [name for _, name in talk.gateways],
        }
        for talk in talks if (verdict := _verdict(talk, stories.get(talk.asked.id))) != "right"
    ]  # fmt: skip
    own = [stories[talk.asked.id] for talk in talks if talk.asked.id in stories]
    return {
        "asked": len(talks),
        "bad": bad,
        "broken": sum(talk.breaks > 0 for talk in talks),
        "refused": sum(talk.refusals for talk in talks),
        "failed_over": sum(story.transcript.attempt > 0 for story in own),
    }


def _verdict(talk: Talk, story: Story | None) -> str:
    """What the client was told, and what anybody reads from the log: both must be right."""
    if talk.verdict != "right" or story is None:
        return talk.verdict
    seen = story.transcript
    return "right" if seen.text == talk.asked.due.text and not seen.holes else "wrong"


def report(lines: Sequence[Mapping[str, Any]], worker_timeout_s: float) -> Report:
    """All rounds of a log, added up."""
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for strike in line.get("strikes", ()):
            kinds[strike["kind"]]["ready"].append(strike["ready_s"])
        for cause, found in line.get("gaps_ms", {}).items():
            kinds[cause]["gaps"] += found
        hit = {strike["kind"] for strike in line.get("strikes", ())}
        for wait, of in (("assigned", set(ROUTERS)), ("first_text", set(OF_BROKERS))):
            if line.get(f"{wait}_ms") is not None and len(hit & of) == 1:
                kinds[next(iter(hit & of))][wait].append(line[f"{wait}_ms"])
    rows = [_row(kind, own) for kind, own in sorted(kinds.items(), key=lambda k: _place(k[0]))]
    return Report("chaos", rows, [*_verdicts(lines), *_bars(kinds, lines, worker_timeout_s)])


def _place(kind: str) -> tuple[bool, str]:
    return kind in (SEVERAL, NOBODY), kind


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


def _verdicts(lines: Sequence[Mapping[str, Any]]) -> list[Bar]:
    bad = [b["verdict"] for line in lines for b in line.get("bad", ())]
    asked = sum(line.get("asked", 0) for line in lines)
    kills = sum(len(line.get("strikes", ())) for line in lines)
    unended = sum(line.get("unended", 0) for line in lines)
    named = ("lost", "twice", "wrong")
    bars = [Bar("kills and stops", kills, "", "", met=True), Bar("asked", asked, "", "", met=True)]
    if asking_s := sum(line.get("asking_s", 0) for line in lines):
        kept = sum(line.get("requests", 0) for line in lines) / asking_s
        bars.append(Bar("asked a second", kept, "", "", met=True))
    late_s = max((line.get("late_ms", 0) for line in lines), default=0) / 1000
    bars.append(Bar("those who ask were behind, at most", late_s, "s", f"<= {LATE_S:g}",
                    late_s <= LATE_S))  # fmt: skip
    bars += [Bar(name, bad.count(name), "texts", "0", name not in bad) for name in named]
    bars.append(Bar("requests on the log without an end", unended, "", "0", not unended))
    return bars


def _bars(
    kinds: Mapping[str, Mapping[str, list[float]]],
    lines: Sequence[Mapping[str, Any]],
    worker_timeout_s: float,
) -> list[Bar]:
    bars = []
    limits = {
        "worker": worker_timeout_s + WORKER_BEYOND_S,
        "worker-pause": worker_timeout_s + WORKER_BEYOND_S,
        "router": ROUTER_GAP_S,
        "router-pause": ROUTER_GAP_S,
        **dict.fromkeys(sorted(OF_BROKERS), STALL_S),
    }
    for kind, limit_s in limits.items():
        if kind in kinds and (found := kinds[kind].get("gaps")):
            gap_s = max(found) / 1000
            name = f"longest gap of a running stream, {kind}"
            bars.append(Bar(name, gap_s, "s", f"<= {limit_s:g}", gap_s <= limit_s))
    waits = {
        "assigned": ("assignment", ROUTERS, ASSIGNED_S),
        "first_text": ("first text", sorted(OF_BROKERS), STALL_S),
    }
    for wait, (awaited, of, limit_s) in waits.items():
        for kind in of:
            if kind in kinds and (found := kinds[kind].get(wait)):
                wait_s = max(found) / 1000
                name = f"longest wait of a new request for its {awaited}, {kind}"
                bars.append(Bar(name, wait_s, "s", f"<= {limit_s:g}", wait_s <= limit_s))
    false = sum(len(line.get("false_deaths", ())) for line in lines)
    bars.append(Bar("workers declared lost that were not hit", false, "", "0", not false))
    return bars
