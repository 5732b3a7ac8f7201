"""The command `kvlane size`: the parts of a deployment for a load, with the arithmetic."""

from __future__ import annotations

import re
import textwrap
from typing import Annotated

import typer

WIDTH = 100
_NAME, _COUNT = 12, 7


def _rate(text: str) -> float:
    """The value of `10000/s` or `10000`. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no rate: give a number above 0, such as 10000/s")
    return float(found[1])


def size(
    *,
    requests: Annotated[str, typer.Option(metavar="N/s", help="Requests a second.")] = "100/s",
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 8,
    tokens: Annotated[
        str, typer.Option(metavar="N/s", help="Generated tokens a second.")
    ] = "10000/s",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2000,
    step: Annotated[
        int, typer.Option(min=1, help="Tokens of one answer in one step of an engine.")
    ] = 1,
    replication: Annotated[int, typer.Option(min=1, help="Replicas of each partition.")] = 3,
    use: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Part of a core that may be in use.")
    ] = 0.6,
    broker: Annotated[
        float, typer.Option(min=0.1, help="Megabytes that one broker may write in a second.")
    ] = 50,
) -> None:
    """Size a fleet: deployments, and routers, gateways, lanes and brokers of each.

    From the figures of docs/benchmarks.md, measured on its machine A: see docs/sizing.md.
    """
    from kvlane.app.commands.fleet_size import FleetLoad, explain

    load = FleetLoad(
        _rate(requests), workers, _rate(tokens), prompt, step, replication, use, broker * 1e6
    )
    for name, count, arithmetic in explain(load):
        first, *rest = textwrap.wrap(arithmetic, WIDTH - _NAME - _COUNT)
        typer.echo(f"{name:{_NAME}}{count:>{_COUNT - 2}}  {first}")
        for line in rest:
            typer.echo(f"{'':{_NAME + _COUNT}}{line}")
