"""The command `kvlane size`: the parts of a deployment for a load, with the arithmetic.

The figures are of docs/benchmarks.md, machine A. A router applies the ledger records of all
requests and the heartbeats of all workers: above some load the fleet is divided into deployments.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer

from kvlane.app.commands.console import JsonOption, show_result
from kvlane.app.operator_error import OperatorError
from kvlane.streams.topics import DEFAULT_LANES, PER_LANE, TOPICS

ROUTER_REQUESTS_S = 870
"""Requests a second that one router carries alone (`kvlane bench router-latency`)."""
RECORD_US = 120 + 24
"""CPU time of every router for the records of each request."""
IDLE_CORES, IDLE_WORKERS = 0.0225, 64
"""CPU time a second of an idle router, and its number of workers; it counts as heartbeats."""
GATEWAY_REQUESTS_S = 971
"""Requests a second of one gateway, prompts of 100 tokens (`kvlane bench gateway`)."""
TOKEN_US = {1: 38.8, 8: 9.25}
"""By tokens of an engine step, CPU time of a token in gateway and writer."""
CHUNK_BYTES, DECISION_BYTES, TOKEN_BYTES = 232, 4600, 4
"""Bytes of a Chunk with one token, of a decision before compression, of a prompt's token."""
MAX_LANES = 1024
LANES_PER_ROUTER = 2
MAX_DEPLOYMENTS = 10_000


class SizeError(OperatorError, ValueError):
    """A load that no number of deployments carries. Give a higher --use, or fewer workers."""


class FleetLoad(NamedTuple):
    """Requests and tokens a second, workers, and the options of a calculation.

    `step_tokens`: tokens of one answer in one engine step. `use`: usable part of a core.
    `broker_bytes_s`: that one broker may write.
    """

    requests_s: float
    workers: int
    tokens_s: float
    prompt_tokens: int = 2000
    step_tokens: int = 1
    replication: int = 3
    use: float = 0.6
    broker_bytes_s: float = 50e6


class FleetSize(NamedTuple):
    deployments: int
    routers: int
    gateways: int
    lanes: int
    partitions: int
    brokers: int
    written_bytes_s: float
    """By all brokers of one deployment, replicas included."""
    router_cores: float
    gateway_cores: float
    """Of all gateways of a deployment."""


def router_cores(load: FleetLoad, deployments: int, routers: int) -> float:
    requests, workers = load.requests_s / deployments, load.workers / deployments
    shared = RECORD_US * 1e-6
    own = 1 / ROUTER_REQUESTS_S - shared
    return workers * IDLE_CORES / IDLE_WORKERS + requests * shared + requests / routers * own


def routers_needed(load: FleetLoad, deployments: int) -> int | None:
    """The fewest routers of each deployment; None if no number is enough."""
    free = load.use - router_cores(load, deployments, routers=10**9)
    if free <= 0:
        return None
    own = (1 / ROUTER_REQUESTS_S - RECORD_US * 1e-6) * load.requests_s / deployments
    routers = max(2, math.ceil(own / free))  # two: one may fail
    return routers if routers * LANES_PER_ROUTER <= MAX_LANES else None


def size_of(load: FleetLoad) -> FleetSize:
    """The size with the fewest routers in all, of these the fewest deployments. Raises
    SizeError."""
    found = [
        (deployments * routers, deployments, routers)
        for deployments in range(1, min(load.workers, MAX_DEPLOYMENTS) + 1)
        if (routers := routers_needed(load, deployments)) is not None
    ]
    if not found:
        raise SizeError(f"no number of deployments carries {load}")
    _, deployments, routers = min(found)
    requests, tokens = load.requests_s / deployments, load.tokens_s / deployments
    lanes = max(DEFAULT_LANES, 2 ** math.ceil(math.log2(routers * LANES_PER_ROUTER)))
    cores = requests / GATEWAY_REQUESTS_S + tokens * token_us(load) * 1e-6
    rows = sum(lanes if topic.partitions == PER_LANE else topic.partitions for topic in TOPICS)
    written = load.replication * bytes_s(load) / deployments
    return FleetSize(
        deployments,
        routers,
        max(2, math.ceil(cores / load.use)),
        lanes,
        rows * load.replication,
        max(load.replication, math.ceil(written / load.broker_bytes_s)),
        written,
        router_cores(load, deployments, routers),
        cores,
    )


def token_us(load: FleetLoad) -> float:
    """CPU time of a token: of the largest measured step that is not above the load's."""
    return TOKEN_US[max(tokens for tokens in TOKEN_US if tokens <= load.step_tokens)]


def bytes_s(load: FleetLoad) -> float:
    """Bytes appended in a second: prompts twice (request, assignment), decisions, Chunks."""
    request = 2 * load.prompt_tokens * TOKEN_BYTES + DECISION_BYTES
    return load.requests_s * request + load.tokens_s / load.step_tokens * CHUNK_BYTES


def explain(load: FleetLoad) -> Iterator[tuple[str, str, str]]:
    """Rows of a table: a part of each deployment, its number, the arithmetic. Raises SizeError."""
    size = size_of(load)
    count, lanes, replicas = size.deployments, size.lanes, load.replication
    requests, tokens, workers = (n / count for n in (load.requests_s, load.tokens_s, load.workers))
    arithmetic = {
        "deployments": (
            f"fewest routers in all ({count * size.routers}); each: {requests:.0f} requests/s, "
            f"{workers:.0f} workers, {tokens:.0f} tokens/s"
        ),
        "routers": (
            f"{workers:.0f} x {IDLE_CORES}/{IDLE_WORKERS} (heartbeats) + {requests:.0f} x "
            f"{RECORD_US} µs (records of all requests) + {requests / size.routers:.0f} x "
            f"(1/{ROUTER_REQUESTS_S} s - {RECORD_US} µs) (its own) = {size.router_cores:.2f} "
            f"cores, of {load.use:g}"
        ),
        "lanes": (
            f"a power of two, at least {LANES_PER_ROUTER} for each router and {DEFAULT_LANES}"
        ),
        "gateways": (
            f"({requests:.0f} / {GATEWAY_REQUESTS_S} + {tokens:.0f} x {token_us(load):g} µs) / "
            f"{load.use:g} = {size.gateway_cores:.2f} / {load.use:g} cores"
        ),
        "brokers": (
            f"{replicas} replicas x {size.written_bytes_s / replicas / 1e6:.1f} MB/s "
            f"({requests:.0f} requests x (2 x {load.prompt_tokens} tokens x {TOKEN_BYTES} B + "
            f"{DECISION_BYTES} B) + {tokens / load.step_tokens:.0f} Chunks x {CHUNK_BYTES} B), "
            f"at most {load.broker_bytes_s / 1e6:g} MB/s each; at least {replicas}"
        ),
        "partitions": f"of all topics with {lanes} lanes, x {replicas} replicas",
    }
    return ((name, str(getattr(size, name)), text) for name, text in arithmetic.items())


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
    json: JsonOption = None,
) -> None:
    """Size a fleet: deployments, and routers, gateways, lanes and brokers of each.

    From the figures of docs/benchmarks.md, measured on its machine A: see docs/sizing.md.

    Example: `kvlane size --requests 500/s --workers 64 --tokens 50000/s`
    """

    load = FleetLoad(
        _rate(requests), workers, _rate(tokens), prompt, step, replication, use, broker * 1e6
    )
    rows = list(explain(load))

    def show() -> None:
        for name, count, arithmetic in rows:
            first, *rest = textwrap.wrap(arithmetic, WIDTH - _NAME - _COUNT)
            typer.echo(f"{name:{_NAME}}{count:>{_COUNT - 2}}  {first}")
            for line in rest:
                typer.echo(f"{'':{_NAME + _COUNT}}{line}")

    found = {name: {"number": int(count), "reason": reason} for name, count, reason in rows}
    show_result(json, found, show)
