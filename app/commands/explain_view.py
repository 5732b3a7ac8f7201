"""The timeline of a request on a terminal: its decisions, and the records about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvlane.app.audit.cost_terms import DecisionReasons
from kvlane.app.audit.drift import error_share
from kvlane.app.audit.time_range import format_time
from kvlane.app.audit.timeline import PROMPT_STEP, ExplainedDecision, RequestTimeline, TimelineStep
from kvlane.app.audit.unknown_ids import explain_unknown
from kvlane.app.audit.waits import REPORTED_AFTER_S, RouterReports
from kvlane.app.commands.console import escape_control, escape_text, format_value, plain_table
from kvlane.app.operator_error import OperatorError
from kvlane.streams.records import Assigned, Cancel, Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import HOUR_MS, REGISTRY, REQUESTS, TOPICS_BY_NAME

_SHOWN_ELSEWHERE = frozenset({
    "worker", "epoch", "rank", "attempt", "policy", "router", "held_ms", "cached_tokens_predicted",
    "ttft_ms_predicted", "routing_order",
})  # fmt: skip
MAX_LISTED_WAITS = 50
NO_WAITS = (
    f"no request has waited in a router for {REPORTED_AFTER_S} s; others may wait before a "
    "router or at their worker (docs/kafka-protocol.md#where-requests-wait)"
)
_UNREAD = (
    "its prompt waits: preprocessors pass on no more prompts than routers have room for "
    "(`kvlane_backlog_records`)"
)


class NothingFound(OperatorError):
    """The log has no record of a request."""


def check_found(timeline: RequestTimeline) -> None:
    """Raises NothingFound."""
    if not timeline.steps:
        why = explain_unknown(timeline.request_id, timeline.now_ms)
        raise NothingFound(f"nothing found about {escape_control(timeline.request_id)}: {why}")


def show_timeline(
    timeline: RequestTimeline, console: Console, *, inputs: bool = False, wait: str = ""
) -> None:
    """Print a timeline with records, and why the request waits."""
    began_ms = timeline.steps[0].at_ms
    request = next((s for s in timeline.steps if s.name == Request.__name__), None)
    about = "" if request is None else f": {request.fields.get('prompt_tokens', 0)} prompt tokens"
    model = "" if request is None else str(request.fields.get("model", ""))
    console.print(
        f"[bold]{escape_text(timeline.request_id)}[/] in lane {timeline.lane}, from "
        f"{format_time(began_ms)} UTC"
        f"{about}{f' for {escape_text(model)}' if model else ''}"
    )
    names = {step.name for step in timeline.steps}
    if request is None:
        console.print(_without_request(names), style="yellow")
    elif wait:
        console.print(escape_text(wait), style="yellow")
    if decisions := [step.decision for step in timeline.steps if step.decision is not None]:
        console.print()
        console.print(_summary(decisions))
    for step in timeline.steps:
        _show_step(step, step.at_ms - began_ms, console, inputs=inputs)
    ending = timeline.ending or "not ended yet, or its end is no longer retained"
    console.print(f"\n[bold]ended:[/] {escape_text(ending)}")


def show_waits(reports: RouterReports, console: Console) -> None:
    """Print the reported waits: how many have each reason, then the longest ones."""
    reasons = Counter(wait.reason for wait in reports.waits)
    counted = plain_table("requests", "reason", right="requests")
    for reason, count in reasons.most_common():
        counted.add_row(str(count), escape_text(reason))
    listed = plain_table("id", "waits", "router", "reason", right="waits")
    for wait in sorted(reports.waits, key=lambda wait: wait.since_ms)[:MAX_LISTED_WAITS]:
        waited_s = (reports.now_ms - wait.since_ms) / 1000
        listed.add_row(
            escape_text(wait.request_id), f"{waited_s:.0f} s", escape_text(wait.router),
            escape_text(wait.reason),
        )  # fmt: skip
    if reasons:
        console.print(counted)
        console.print()
        console.print(listed)
    left_out = max(0, len(reports.waits) - MAX_LISTED_WAITS) + reports.left_out
    if left_out or not reasons:
        console.print(f"{left_out} more" if left_out else NO_WAITS)


def _without_request(steps: AbstractSet[str]) -> str:
    """Why the request itself is missing from a timeline."""
    if PROMPT_STEP in steps and steps <= {PROMPT_STEP, Cancel.__name__}:
        return _UNREAD
    if Refused.__name__ in steps:
        return "its prompt was rejected before a router got it"
    if Cancel.__name__ in steps and Assigned.__name__ not in steps:
        return "only a cancel has this id: no request, as far as the log goes back"
    hours = (TOPICS_BY_NAME[REQUESTS].retention_ms or 0) / HOUR_MS
    return f"the request is no longer retained ({hours:g} h)"


def _summary(decisions: list[ExplainedDecision]) -> Table:
    shown = plain_table(
        "attempt", "worker", "why", "cached: expected", "actual", "ttft: expected", "actual",
        "itl: expected", "actual",
    )  # fmt: skip
    for record, reasons, actual, _ in decisions:
        why = "no inputs recorded" if reasons is None else reasons.words
        shown.add_row(
            _attempt(record), f"[bold]{escape_text(_place(record))}[/]", escape_text(why),
            _expected_tokens(record),
            "-" if actual.cached_tokens is None else f"{actual.cached_tokens}",
            *_compared(record.ttft_ms_predicted, actual.ttft_ms),
            *_compared(record.itl_ms_predicted, actual.itl_ms),
        )  # fmt: skip
    return shown


def _expected_tokens(decision: Assigned) -> str:
    estimated = decision.params.get("estimated_tokens")
    words = f", {estimated:g} of them estimated" if estimated else ""
    return f"{decision.cached_tokens_predicted} tokens{words}"


def _compared(expected_ms: float, actual_ms: float | None) -> tuple[str, str]:
    expected = f"{expected_ms:.1f} ms" if expected_ms else "-"
    if actual_ms is None:
        return expected, "-"
    error = error_share(expected_ms, actual_ms)
    return expected, f"{actual_ms:.1f} ms" + ("" if error is None else f" ({error:.0%} off)")


def _attempt(record: Assigned) -> str:
    """An attempt, with the phase of its decision unless that is the only one."""
    is_whole = record.phase == "aggregated"
    return str(record.attempt) if is_whole else f"{record.attempt} {record.phase}"


def _place(each: Any) -> str:
    """A worker, with its rank unless that is 0."""
    return f"{each.worker}/{each.rank}" if each.rank else str(each.worker)


def _show_step(step: TimelineStep, after_ms: int, console: Console, *, inputs: bool) -> None:
    place = f"[dim]{step.source.topic}/{step.source.partition}:{step.offset}[/]"
    console.print(f"\n+{after_ms / 1000:.3f} s  [bold]{step.name}[/]  {place}")
    fields = step.fields
    if step.decision is not None:
        _show_decision(step.decision, console)
        fields = {name: value for name, value in fields.items() if name not in _SHOWN_ELSEWHERE}
    shown = "  ".join(
        f"[dim]{name}[/] {escape_text(format_value(value))}" for name, value in fields.items()
    )
    console.print(f"  {shown}")
    if step.decision is not None and (reasons := step.decision.reasons) is not None:
        console.print(_terms(reasons))
        if inputs:
            console.print(_inputs(reasons))


def _show_decision(decision: ExplainedDecision, console: Console) -> None:
    record, reasons = decision.record, decision.reasons
    by = f" by {record.router}" if record.router else ""
    held = f", queued {record.held_ms} ms" if record.held_ms else ""
    attempt = f", attempt {record.attempt}" if record.attempt else ""
    policy = f", policy {record.policy}" if record.policy else ""
    if record.routing_order is not None:
        policy += f" by the order {REGISTRY}/0:{record.routing_order}"
    console.print(
        f"  to [bold]{escape_text(_place(record))}[/] (epoch {record.epoch}){escape_text(by)}"
        f"{policy}{attempt}{held}"
    )
    if decision.cordoned:
        names = ", ".join(map(escape_text, decision.cordoned))
        console.print(f"  cordoned, so left out: {names}")
    if reasons is not None:
        console.print(f"  {escape_text(reasons.words)}")
        if reasons.choice:
            console.print(f"  {escape_text(reasons.choice)}")
        if reasons.difference:
            console.print(f"  [red]recomputed, it differs:[/] {escape_text(reasons.difference)}")


def _terms(reasons: DecisionReasons) -> Table:
    """A row for each candidate, the chosen one marked: its cost, the terms of it, its state."""
    names = list(reasons.chosen.terms)
    unit = f" {reasons.unit}" if reasons.unit else ""
    state = ["cached tokens", "open runs", "open tokens", "waiting tokens"]
    shown = plain_table("", "worker", f"cost{unit}", *names, *state)
    for column in shown.columns[2:]:
        column.justify = "right"
    for each in sorted([reasons.chosen, *reasons.others], key=lambda w: w.cost):
        is_chosen = each is reasons.chosen
        has = each.inputs
        shown.add_row(
            "  *" if is_chosen else "", escape_text(_place(each)), _number(each.cost),
            *(_number(each.terms[name]) for name in names), str(each.cached_tokens),
            *(str(count) for count in (has.open_runs, has.open_tokens, has.prefill_tokens)),
            style="bold" if is_chosen else "",
        )  # fmt: skip
    return shown


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.4g}"


def _inputs(reasons: DecisionReasons) -> Table:
    weighed = sorted([reasons.chosen, *reasons.others], key=lambda w: w.cost)
    candidates = [each.inputs for each in weighed]
    fields = [
        field.name
        for field in msgspec.structs.fields(candidates[0])
        if field.required or any(getattr(each, field.name) != field.default for each in candidates)
    ]
    shown = plain_table("", *fields)
    for each in candidates:
        is_chosen = each is reasons.chosen.inputs
        values = (escape_text(format_value(getattr(each, name))) for name in fields)
        shown.add_row("  *" if is_chosen else "", *values, style="bold" if is_chosen else "")
    return shown
