"""The command `kvlane doctor`: the faults of a deployment, each with what to do about it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlane.app.commands import console as screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvlane.app.audit.diagnosis.fact_reader import FactReader
    from kvlane.app.audit.diagnosis.facts import Facts
    from kvlane.app.audit.diagnosis.findings import Finding

FAULT_CODE, WARNING_CODE = 1, 4
"""Exit codes of findings: 2 is a wrong option, 3 an error of the command."""
PROGRESS_AFTER_S = 1.0
_POLL_S = 0.1
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "fault": "red"}


def doctor(
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Address of a gateway, or of the port of another process; repeatable."),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="API key for the metrics of --url.")
    ] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(help="Role whose rights these credentials should have; default: operator."),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Read records from then on, as of `status`.")
    ] = "-1m",
    json: screen.JsonOption = None,
) -> None:
    """Check a deployment, and print each fault with what to do. Takes ten seconds at most.

    Exit code 0 without a finding, 1 with a fault, 4 with warnings only; 2 for wrong options, 3 for
    other errors. A check that cannot run is `skipped`, with the reason.

    It runs with the settings of this shell, and compares them with the deployment. Nothing is
    written, and no group is joined.

    Examples:

    - `kvlane doctor`

    - `kvlane doctor --url http://127.0.0.1:8000 --url http://127.0.0.1:8090`

    - `kvlane doctor --role gateway`: with the credentials of a gateway

    - `kvlane doctor --json - | jq -r '.findings[] | select(.severity == "fault") | .name'`
    """
    from kvlane.app.audit.diagnosis.diagnosis import diagnose
    from kvlane.app.audit.diagnosis.fact_reader import FactReader
    from kvlane.app.settings import Settings
    from kvlane.streams.clock import SystemClock
    from kvlane.streams.topics import required_acls

    settings, roles = Settings(), role or ["operator"]
    settings.require_bootstrap_servers()
    known = sorted({rule.role for rule in required_acls()})
    for name in roles:
        if name not in known:
            raise typer.BadParameter(f"no role {name!r}: {', '.join(known)}")
    began_s = time.monotonic()
    reader = FactReader(settings, SystemClock(), since)
    findings = diagnose(asyncio.run(_read(reader, roles, url or [], api_key)))
    counts = Counter[str](finding.severity for finding in findings)
    took_s = time.monotonic() - began_s

    def show() -> None:
        screen.make_console().print(_view(findings))
        words = [f"{counts[name]} {name}" for name in _STYLES]
        typer.echo(f"\n{', '.join(words)}; {took_s:.1f} s")

    screen.show_result(json, {"counts": counts, "findings": findings}, show)
    if counts["fault"] or counts["warning"]:
        raise typer.Exit(FAULT_CODE if counts["fault"] else WARNING_CODE)


async def _read(reader: FactReader, roles: list[str], urls: list[str], key: str) -> Facts:
    """The facts, with the names of the readings that go on after a second."""
    reading = asyncio.create_task(reader.read(roles, urls, key))
    await asyncio.wait({reading}, timeout=PROGRESS_AFTER_S)
    stderr = Console(stderr=True)
    if not reading.done() and stderr.is_terminal:
        with stderr.status("") as shown:
            while not reading.done():
                shown.update(f"reading {', '.join(sorted(reader.pending))}")
                await asyncio.wait({reading}, timeout=_POLL_S)
    return await reading


def _view(findings: list[Finding]) -> RenderableType:
    """The checks without a finding, those that were skipped, then warnings and faults, each with
    its action below."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")

    def add(severity: str, words: str, more: str = "") -> None:
        text = Text(screen.escape_control(words))
        if more:
            text.append(f"\n{screen.escape_control(more)}", style="dim")
        shown.add_row(Text(severity, _STYLES[severity]), text)

    by = {name: [each for each in findings if each.severity == name] for name in _STYLES}
    if by["ok"]:
        add("ok", ", ".join(each.name for each in by["ok"]))
    skipped = defaultdict[str, list[str]](list)
    for each in by["skipped"]:
        skipped[each.message].append(f"{each.name} ({each.object})" if each.object else each.name)
    for reason, names in skipped.items():
        add("skipped", f"{', '.join(names)}: {reason}")
    for each in (*by["warning"], *by["fault"]):
        more = f"{each.action} {each.section}".strip()
        add(each.severity, f"{each.name}  {each.object}: {each.message}", more)
    return shown
