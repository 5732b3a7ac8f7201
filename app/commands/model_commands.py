"""The commands `kvlane models`: a table, and aliases of models, by records on `registry`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvlane.app.commands.console import JsonOption, escape_control
from kvlane.app.commands.fleet.fleet_commands import WINDOW, SinceOption, show_models
from kvlane.app.commands.worker_commands import append_order, connected_fleet, end_order
from kvlane.app.operator_error import OperatorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlane.app.routing.state.fleet import Fleet
    from kvlane.streams.records import ModelAlias

MAX_NAME_CHARS = 200
MAX_TARGETS = 100
MAX_WEIGHT = 1_000_000

app = typer.Typer()


class BadAlias(OperatorError):
    """An alias that cannot be as the command asks."""

    correction = (
        "Its form: NAME=MODEL:WEIGHT,MODEL:WEIGHT, as chat=llama-a:90,llama-b:10. "
        "`kvlane models` lists models and aliases."
    )


@app.callback(invoke_without_command=True)
def models(context: typer.Context, *, since: SinceOption = WINDOW, json: JsonOption = None) -> None:
    """Show the models; let several of them serve under one name.

    The subcommands let one or more models serve under another name, in shares, while they run:
    for a new version beside the old one, a canary, and a rollback.

    Examples:

    - `kvlane models`

    - `kvlane models --json - | jq '.models[] | {name, ready, open}'`
    """
    if context.invoked_subcommand is None:
        show_models(since, json)


@app.command()
def alias(
    definition: Annotated[
        str, typer.Argument(metavar="NAME=MODEL:WEIGHT,...", help="The name, and its models.")
    ],
) -> None:
    """Give one or more models a name, which they share by their weights; replaces its former ones.

    The requests of a session stay with one model, else those of a user, and a change of a weight
    moves no others than it must. The share of a model without a worker goes to the others. One
    of weight 0 serves only while none with a weight can; a single model needs no weight.
    The name may be that of a model, also of one of these, so clients need no other name.

    Examples:

    - `kvlane models alias chat=llama-a`

    - `kvlane models alias chat=llama-a:90,llama-b:10`

    - `kvlane models alias chat=llama-b:100,llama-a:0`

    - `kvlane models alias llama-a=llama-a:90,llama-b:10`
    """
    found = parse_alias(definition)
    absent = asyncio.run(_alias(found))
    name, targets = escape_control(found.name), found.targets
    total = sum(target.weight for target in targets)
    shares = (
        f"{escape_control(target.model)} {target.weight / total:.1%}"
        if target.weight
        else f"{escape_control(target.model)} while no other one can"
        for target in targets
    )
    typer.echo(f"{name} is served by {', '.join(shares)}")
    for model in absent:
        typer.echo(f"{escape_control(model)} has no worker that takes requests now", err=True)


@app.command()
def unalias(name: Annotated[str, typer.Argument(metavar="NAME", help="The alias.")]) -> None:
    """Remove an alias. Requests that have begun go on; new ones for the name go to the model of
    this name, and are refused if there is none.

    Example: `kvlane models unalias chat`
    """
    found, is_model = asyncio.run(_unalias(name))
    shown = escape_control(name)
    more = f": requests for it go to the model {shown}" if is_model else ""
    typer.echo(f"the alias {shown} is removed{more}" if found else f"there is no alias {shown}")


async def _alias(alias: ModelAlias) -> list[str]:
    async with connected_fleet() as (log, clock, fleet):
        check_alias(fleet, alias)
        await append_order(log, clock, f"alias/{alias.name}", alias)
        return _absent(fleet, alias)


async def _unalias(name: str) -> tuple[bool, bool]:
    """Whether an alias had this name, and whether a model has it."""
    async with connected_fleet() as (log, clock, fleet):
        if found := name in fleet.aliases:
            await end_order(log, clock, f"alias/{name}")
        return found, name in _known_models(fleet)


def _absent(fleet: Fleet, alias: ModelAlias) -> list[str]:
    """The targets without a worker that is ready and takes requests."""
    served = {
        member.card.model
        for worker, member in fleet.members.items()
        if fleet.is_ready(worker) and worker not in fleet.cordons and member.card.role != "prefill"
    }
    return [target.model for target in alias.targets if target.model not in served]


def parse_alias(definition: str) -> ModelAlias:
    """The alias of a text NAME=MODEL:WEIGHT,…; a colon without a number after it belongs to the
    name of a model. Raises BadAlias."""
    from kvlane.streams.records import AliasTarget, ModelAlias

    name, equals, listed = definition.partition("=")
    models = listed.split(",")
    if not equals or not name or not all(models):
        raise BadAlias(f"{definition!r} does not name an alias and its models")
    targets = []
    for each in models:
        model, colon, number = each.rpartition(":")
        if not (colon and number.removeprefix("-").isdecimal()):
            if len(models) > 1:
                raise BadAlias(f"{each!r} has no weight: each of several models needs one")
            model, number = each, "1"
        weight = int(number)
        if not 0 <= weight <= MAX_WEIGHT:
            raise BadAlias(f"the weight of {model!r} is {weight}: give 0 to {MAX_WEIGHT}")
        targets.append(AliasTarget(model=model, weight=weight))
    if not any(target.weight for target in targets):
        raise BadAlias(f"no model of {name!r} has a weight above 0")
    alias = ModelAlias(name=name, targets=tuple(targets))
    _check_names(alias, [target.model for target in targets])
    return alias


def _check_names(alias: ModelAlias, models: Sequence[str]) -> None:
    if len(models) > MAX_TARGETS:
        raise BadAlias(
            f"{alias.name!r} has {len(models)} models: at most {MAX_TARGETS} are allowed"
        )
    if too_long := next((n for n in (alias.name, *models) if len(n) > MAX_NAME_CHARS), None):
        raise BadAlias(f"{too_long[:20]!r}… has more than {MAX_NAME_CHARS} characters")
    if not alias.name.isprintable():
        raise BadAlias(f"{alias.name!r} has characters that cannot be printed")
    if twice := next((model for model in models if models.count(model) > 1), None):
        raise BadAlias(f"{twice!r} is given twice")


def check_alias(fleet: Fleet, alias: ModelAlias) -> None:
    """Compare an alias with the models of a fleet. Raises BadAlias."""
    known = _known_models(fleet)
    models = [target.model for target in alias.targets]
    for model in models:
        if model not in known and model in fleet.aliases:
            raise BadAlias(f"{model!r} is an alias: an alias has models only")
        if model not in known:
            raise BadAlias(f"no model {model!r} is known: start a worker of it first")
    kinds = {fleet.models[model].kind if model in fleet.models else "tokens" for model in models}
    if len(kinds) > 1:
        raise BadAlias(f"the models take requests of different kinds: {', '.join(sorted(kinds))}")


def _known_models(fleet: Fleet) -> set[str]:
    return {*fleet.models, *(member.card.model for _, member in fleet.live_members())}
