"""The commands `kvlane workers`: a table, and orders about a worker, by a record on `registry`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlane.app.commands import kafka_client
from kvlane.app.commands.console import JsonOption, escape_control, progress_bar
from kvlane.app.commands.fleet.fleet_commands import WINDOW, SinceOption, show_workers
from kvlane.app.operator_error import OperatorError
from kvlane.streams.clock import Clock, SystemClock

if TYPE_CHECKING:
    from kvlane.app.routing.state.fleet import Fleet, LastHeartbeat
    from kvlane.streams.codecs import AnyRecord
    from kvlane.streams.ports import Log

WRITE_TIMEOUT_S = 30.0
SETTLE_S = 1.0
"""Time from an order to the last run by a router that had not read it: routers follow `registry` by
some ten milliseconds."""
POLL_S = 0.1

app = typer.Typer()

_CordonedWorker = Annotated[str, typer.Argument(metavar="ID", help="The worker's id.")]
_DrainTimeout = Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.1)]


class UnknownWorker(OperatorError):
    """No worker has registered under this id."""

    correction = "`kvlane workers` lists them."


class WorkerBusy(OperatorError):
    """A worker still has runs after the time of the command."""


@app.callback(invoke_without_command=True)
def workers(
    context: typer.Context, *, since: SinceOption = WINDOW, json: JsonOption = None
) -> None:
    """Show the workers; close one to new requests, or empty it, while it runs.

    A worker is `silent` without a heartbeat for KVLANE_WORKER_TIMEOUT_S, `lost` if a router has
    ended its epoch since `--since`. `hits` is the cached part of prompts, errors are medians of
    |predicted - measured| / measured, both since then. `-`: not known.

    The subcommands close a worker to new requests, or empty it, while it runs. An order holds for
    the worker's id, also after a restart, until `kvlane workers uncordon`.

    Examples:

    - `kvlane workers`

    - `kvlane workers --json - | jq '.workers[] | select(.state != "ready") | .id'`
    """
    if context.invoked_subcommand is None:
        show_workers(since, json)


@app.command()
def cordon(worker: _CordonedWorker) -> None:
    """Give a worker no new requests. Its running ones go on.

    Also ends an evacuation: what still runs there stays.

    Example: `kvlane workers cordon worker-1`
    """
    runs = asyncio.run(_cordon(worker))
    name = escape_control(worker)
    typer.echo(f"{name} gets no new requests; {runs} run on. To end this: kvlane workers uncordon")


@app.command()
def uncordon(worker: _CordonedWorker) -> None:
    """Let a worker take requests again; ends every order about it.

    Example: `kvlane workers uncordon worker-1`
    """
    found = asyncio.run(_uncordon(worker))
    name = escape_control(worker)
    typer.echo(f"{name} takes requests again" if found else f"there was no order about {name}")


@app.command()
def drain(worker: _CordonedWorker, *, timeout: _DrainTimeout = 600.0) -> None:
    """Cordon a worker, and wait until its last run has ended.

    Exit code 1 if it still has runs then; it stays cordoned in any case.

    Example: `kvlane workers drain worker-1 --timeout 3600`
    """
    asyncio.run(_empty(worker, timeout, evacuates=False))


@app.command()
def evacuate(worker: _CordonedWorker, *, timeout: _DrainTimeout = 60.0) -> None:
    """Cordon a worker, let other workers continue its answers, and wait until it is idle.

    Readers see one stream with a short pause. A run ends where it is if no other worker can
    continue it: for want of room, by its options (docs/recovery.md), or with an engine that gives
    no token ids. Exit code 1 if the worker still has runs in the end.

    Example: `kvlane workers evacuate worker-1`
    """
    asyncio.run(_empty(worker, timeout, evacuates=True))


async def _cordon(worker: str) -> int:
    async with connected_fleet() as (log, clock, fleet):
        check_known(fleet, worker)
        await write_order(log, clock, worker, evacuates=False)
        return open_runs(fleet, worker)


async def _uncordon(worker: str) -> bool:
    async with connected_fleet() as (log, clock, fleet):
        if worker not in fleet.cordons:
            return False
        await end_order(log, clock, f"cordon/{worker}")
        return True


async def _empty(worker: str, timeout_s: float, *, evacuates: bool) -> None:
    name, stderr = escape_control(worker), Console(stderr=True, highlight=False)
    async with connected_fleet() as (log, clock, fleet):
        check_known(fleet, worker)
        await write_order(log, clock, worker, evacuates=evacuates)
        if others_of(fleet, worker) == 0:
            stays = "its runs end where they are, and " if evacuates else ""
            stderr.print(
                f"no other worker of its model is ready: {stays}new requests wait", style="yellow"
            )
        with _progress(f"{'evacuating' if evacuates else 'draining'} {name}", stderr) as shown:
            await wait_idle(log, clock, fleet, worker, timeout_s, shown)
    typer.echo(f"{name} is idle, and stays cordoned until kvlane workers uncordon")


@asynccontextmanager
async def connected_fleet() -> AsyncIterator[tuple[Log, Clock, Fleet]]:
    """The log of the deployment for orders, and its fleet, which is followed meanwhile."""
    from kvlane.app.settings import settings_for_writing

    clock = SystemClock()
    async with (
        kafka_client.connect_kafka(settings_for_writing(), "kvlane-orders") as log,
        followed_fleet(log, clock) as fleet,
    ):
        yield log, clock, fleet


@asynccontextmanager
async def followed_fleet(log: Log, clock: Clock) -> AsyncIterator[Fleet]:
    """The fleet by the registry and recent heartbeats, up to date while the block runs. Raises
    TimeoutError, BrokerUnavailable."""
    from kvlane.app.local.worker_observer import WorkerObserver
    from kvlane.app.runtime.process import ProcessContext

    observer = WorkerObserver(log, ctx := ProcessContext("kvlane-workers", clock), 1.0)
    try:
        await observer.start()
        yield observer.fleet
        if ctx.error is not None:
            raise ctx.error
    finally:
        await observer.close()
        await ctx.cancel_tasks()


def check_known(fleet: Fleet, worker: str) -> None:
    """Raises UnknownWorker."""
    if worker not in fleet.members:
        raise UnknownWorker(f"no worker {worker!r} is registered")


async def write_order(log: Log, clock: Clock, worker: str, *, evacuates: bool) -> None:
    """Append a `Cordon`. Raises AppendFailed."""
    from kvlane.streams.records import Cordon

    order = Cordon(worker=worker, evacuates=evacuates)
    await append_order(log, clock, f"cordon/{worker}", order)


async def end_order(log: Log, clock: Clock, key: str) -> None:
    """Append the tombstone of an order. Raises AppendFailed."""
    from kvlane.streams.records import Tombstone

    await append_order(log, clock, key, Tombstone(key=key))


async def append_order(log: Log, clock: Clock, key: str, order: AnyRecord) -> None:
    """Append a record to the registry. Raises AppendFailed."""
    from kvlane.streams.record_publisher import RecordPublisher
    from kvlane.streams.topics import REGISTRY

    until = clock.now() + WRITE_TIMEOUT_S
    await RecordPublisher(log, clock).publish(REGISTRY, key, order, 0, until=until)


def open_runs(fleet: Fleet, worker: str) -> int:
    """The runs that the last heartbeat of a worker lists."""
    beat = fleet.heartbeats.get(worker)
    return 0 if beat is None else len(beat.running)


def others_of(fleet: Fleet, worker: str) -> int:
    """The number of other workers that take requests for the same model."""
    from kvlane.app.routing.selection.eligibility import can_take

    model = fleet.members[worker].card.model
    return sum(
        member.card.model == model and can_take(member.card, "aggregated")
        for name, member in fleet.members.items()
        if name != worker and fleet.is_ready(name) and name not in fleet.cordons
    )


async def wait_idle(
    log: Log,
    clock: Clock,
    fleet: Fleet,
    worker: str,
    timeout_s: float,
    shown: Callable[[int], None] = lambda _: None,
) -> None:
    """Wait until a worker with an order has no run, and is lost or has read all assignments.
    `shown`: called with the number of its runs. Raises WorkerBusy."""
    from kvlane.streams.topics import ASSIGNMENTS, partition_of

    began_s = clock.now()
    slot = partition_of(worker.encode(), await log.partitions(ASSIGNMENTS))
    read_to, before = -1, fleet.heartbeats.get(worker)
    while (member := fleet.members.get(worker)) and not fleet.is_lost(worker, member.epoch):
        beat = fleet.heartbeats.get(worker)
        runs = open_runs(fleet, worker)
        shown(runs)
        if read_to < 0 and clock.now() - began_s >= SETTLE_S:
            read_to, before = (await log.end_offsets(ASSIGNMENTS, [slot]))[slot], beat
        elif read_to >= 0 and beat != before and _is_idle(beat, member.epoch, read_to):
            return
        if clock.now() - began_s > timeout_s:
            what = f"still has {runs} runs after {timeout_s:g} s"
            if not runs:
                what = f"has not reported in {timeout_s:g} s that it is idle"
            raise WorkerBusy(
                f"{worker} {what}",
                correction=f"It stays cordoned. Wait again (kvlane workers drain {worker}), move "
                f"its runs (kvlane workers evacuate {worker}), or let it take requests again "
                f"(kvlane workers uncordon {worker}).",
            )
        await clock.sleep(POLL_S)


def _is_idle(beat: LastHeartbeat | None, epoch: int, read_to: int) -> bool:
    if beat is None or beat.epoch != epoch:
        return False
    return not beat.running and beat.slot_offset >= read_to


@contextmanager
def _progress(name: str, console: Console) -> Iterator[Callable[[int], None]]:
    """A bar of the runs that have ended or left."""
    most = 0
    with progress_bar(console, transient=True) as bar:
        task = bar.add_task(name)

        def shown(runs: int) -> None:
            nonlocal most
            most = max(most, runs)
            bar.update(task, total=max(most, 1), completed=most - runs)

        yield shown
