"""The story of a request on a terminal: why it went where it went, and what became of it."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.audit.explain import Decision, Explained, Step
from app.audit.moments import clock_time
from app.audit.reasons import Reasons
from app.commands.screen import said, table
from streams.records import Request
from streams.topics import BY_NAME, LEDGER, REQUESTS

_SHOWN_ELSEWHERE = frozenset({
    "worker", "epoch", "rank", "attempt", "policy", "router", "held_ms", "cached_tokens_predicted",
    "ttft_ms_predicted",
})  # fmt: skip
_HOUR_MS = 3_600_000


def show(story: Explained, console: Console, *, inputs: bool = False) -> bool:
    """Print it; whether anything is known of the request."""
    if not story.steps:
        console.print(_unknown(story))
        return False
    began_ms = story.steps[0].at_ms
    asked = next((s for s in story.steps if s.name == Request.__name__), None)
    about = "" if asked is None else f": {asked.fields.get('prompt_tokens', 0)} prompt tokens"
    model = "" if asked is None else str(asked.fields.get("model", ""))
    console.print(
        f"[bold]{escape(story.request_id)}[/] in lane {story.lane}, from {clock_time(began_ms)} UTC"
        f"{about}{f' for {escape(model)}' if model else ''}"
    )
    if asked is None:
        hours = (BY_NAME[REQUESTS].retention_ms or 0) / _HOUR_MS
        console.print(f"what was asked is not kept any more ({hours:g} h)", style="yellow")
    if decisions := [step.decision for step in story.steps if step.decision is not None]:
        console.print()
        console.print(_summary(decisions))
    for step in story.steps:
        _show_step(step, step.at_ms - began_ms, console, inputs=inputs)
    ending = story.ending or "not ended yet, or its end is not kept any more"
    console.print(f"\n[bold]ended:[/] {escape(ending)}")
    return True


def as_data(story: Explained) -> dict[str, Any]:
    """The same for programs."""
    return {
        "id": story.request_id,
        "lane": story.lane,
        "ending": story.ending,
        "steps": [
            {
                "at_ms": step.at_ms, "topic": step.source.topic,
                "partition": step.source.partition, "offset": step.offset, "name": step.name,
                "fields": step.fields,
            }
            | (
                {}
                if (decision := step.decision) is None
                else {"reasons": decision.reasons, "actual": decision.actual._asdict()}
            )
            for step in story.steps
        ],
    }  # fmt: skip


def _unknown(story: Explained) -> str:
    """Why nothing may be known."""
    nothing = f"[red]nothing is known of[/] {escape(story.request_id)}: "
    hours = (BY_NAME[LEDGER].retention_ms or 0) / _HOUR_MS
    if story.is_deleted and story.drawn_ms is not None:
        return (
            f"{nothing}by its id it is of {clock_time(story.drawn_ms)} UTC, and what is older than "
            f"{hours:g} h is deleted. `kvlane capture` keeps a period for longer."
        )
    if story.drawn_ms is not None:
        return (
            f"{nothing}by its id it is of {clock_time(story.drawn_ms)} UTC, but no record of it is "
            f"in lane {story.lane}. Is the id right, and KVLANE_TOPIC_PREFIX?"
        )
    return (
        f"{nothing}no record of it is in lane {story.lane}. Is the id whole, KVLANE_TOPIC_PREFIX "
        f"right, and is it less than {hours:g} h old? What is older is deleted."
    )


def _summary(decisions: list[Decision]) -> Table:
    """A row for each decision."""
    shown = table(
        "attempt", "went to", "why", "cached: expected", "found", "ttft: expected", "took"
    )
    for record, reasons, actual in decisions:
        why = "its record has no inputs" if reasons is None else reasons.words
        expected_ms = f"{record.ttft_ms_predicted:.1f} ms" if record.ttft_ms_predicted else "-"
        shown.add_row(
            str(record.attempt), f"[bold]{escape(_place(record))}[/]", escape(why),
            f"{record.cached_tokens_predicted} tokens",
            "-" if actual.cached_tokens is None else f"{actual.cached_tokens}", expected_ms,
            "-" if actual.ttft_ms is None else f"{actual.ttft_ms:.1f} ms",
        )  # fmt: skip
    return shown


def _place(each: Any) -> str:
    """A worker, with its rank where that is not the first one."""
    return f"{each.worker}/{each.rank}" if each.rank else str(each.worker)


def _show_step(step: Step, after_ms: int, console: Console, *, inputs: bool) -> None:
    place = f"[dim]{step.source.topic}/{step.source.partition}:{step.offset}[/]"
    console.print(f"\n+{after_ms / 1000:.3f} s  [bold]{step.name}[/]  {place}")
    fields = step.fields
    if step.decision is not None:
        _show_decision(step.decision, console)
        fields = {name: value for name, value in fields.items() if name not in _SHOWN_ELSEWHERE}
    shown = "  ".join(f"[dim]{name}[/] {escape(said(value))}" for name, value in fields.items())
    console.print(f"  {shown}")
    if step.decision is not None and (reasons := step.decision.reasons) is not None:
        console.print(_terms(reasons))
        if inputs:
            console.print(_inputs(reasons))


def _show_decision(decision: Decision, console: Console) -> None:
    record, reasons = decision.record, decision.reasons
    by = f" by {record.router}" if record.router else ""
    held = f", held for {record.held_ms} ms" if record.held_ms else ""
    attempt = f", attempt {record.attempt}" if record.attempt else ""
    policy = f", policy {record.policy}" if record.policy else ""
    console.print(
        f"  to [bold]{escape(_place(record))}[/] (epoch {record.epoch}){escape(by)}"
        f"{policy}{attempt}{held}"
    )
    if reasons is not None:
        console.print(f"  {escape(reasons.words)}")
        if reasons.difference:
            console.print(f"  [red]taken again it differs:[/] {escape(reasons.difference)}")


def _terms(reasons: Reasons) -> Table:
    """A row for each candidate, the chosen one marked: its cost, the terms of it, its state."""
    names = list(reasons.chosen.terms)
    unit = f" {reasons.unit}" if reasons.unit else ""
    state = ["cached tokens", "open runs", "open tokens", "waiting tokens"]
    shown = table("", "worker", f"cost{unit}", *names, *state)
    for column in shown.columns[2:]:
        column.justify = "right"
    for each in sorted([reasons.chosen, *reasons.others], key=lambda w: w.cost):
        is_chosen = each is reasons.chosen
        has = each.inputs
        shown.add_row(
            "  *" if is_chosen else "", escape(_place(each)), _number(each.cost),
            *(_number(each.terms[name]) for name in names), str(each.cached_tokens),
            *(str(count) for count in (has.open_runs, has.open_tokens, has.prefill_tokens)),
            style="bold" if is_chosen else "",
        )  # fmt: skip
    return shown


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.4g}"


def _inputs(reasons: Reasons) -> Table:
    """A row for each candidate, and a column for each input that any has."""
    weighed = sorted([reasons.chosen, *reasons.others], key=lambda w: w.cost)
    candidates = [each.inputs for each in weighed]
    fields = [
        field.name
        for field in msgspec.structs.fields(candidates[0])
        if field.required or any(getattr(each, field.name) != field.default for each in candidates)
    ]
    shown = table("", *fields)
    for each in candidates:
        is_chosen = each is reasons.chosen.inputs
        values = (escape(said(getattr(each, name))) for name in fields)
        shown.add_row("  *" if is_chosen else "", *values, style="bold" if is_chosen else "")
    return shown
