"""`kvlane bench`: latency, throughput and growth of processes on Kafka, and of the index."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workbench.bench.commands.benchmark_command import Benchmark, Full, Json, benchmark, measure

app = typer.Typer()


@benchmark(app)
def router_latency() -> Benchmark:
    """Latency, CPU time by part and capacity of the router and of a bare echo, on Kafka.

    From a request to its readable assignment. Open loop, 2000-token prompts, 64 workers,
    alternating rounds. Quick: 100 and 500 requests/s, and the capacity; --full: 1000, 1.5 x the
    capacity and two routers, too: ten minutes. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a
    broker.
    """
    from workbench.bench.routing.router_latency import FULL, QUICK, bench_router_latency

    return Benchmark(bench_router_latency, QUICK, FULL)


@benchmark(app)
def observers() -> Benchmark:
    """CPU of the router while the console and `kvlane top` look at it: 64 workers, 500 requests/s.

    Rounds alone and with both, in turns, on Kafka; then the growth of the memory of both, once what
    they keep by number is full. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.routing.observers import FULL, QUICK, bench_observers

    return Benchmark(bench_observers, QUICK, FULL)


@benchmark(app)
def tokens() -> Benchmark:
    """CPU time and added latency of a token from worker to client, on Kafka.

    100 streams, 5000 tokens/s, 1 and 8 tokens per step, compared with a bare server that sends the
    same events. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.streaming.token_latency import FULL, QUICK, bench_tokens

    return Benchmark(bench_tokens, QUICK, FULL)


@benchmark(app)
def parser() -> Benchmark:
    """CPU time of a token with the parsers of calls and reasoning, beside one without, on Kafka.

    From worker to client as in `tokens`: the arguments of a call, and plain text in turns. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.streaming.token_latency import FULL, QUICK, bench_parser

    return Benchmark(bench_parser, QUICK, FULL)


@benchmark(app)
def gateway() -> Benchmark:
    """Requests/s over HTTP, and the event loop delay from prompts of 100 to 100000 tokens.

    Compared with a bare FastAPI server that renders and tokenizes the same bodies. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.streaming.gateway_load import FULL, QUICK, bench_gateway

    return Benchmark(bench_gateway, QUICK, FULL)


@app.command()
def engines(
    *,
    servers: Annotated[int, typer.Option(help="Number of vLLM servers.", min=1)] = 3,
    rate: Annotated[float, typer.Option(help="Requests a second.", min=0.01)] = 4.0,
    side: Annotated[
        list[str] | None, typer.Option(help="Only this policy or SGLang's router; may be repeated.")
    ] = None,
    traffic: Annotated[
        list[str] | None, typer.Option(help="Only this kind of traffic; may be repeated.")
    ] = None,
    full: Full = False,
    json: Json = None,
) -> None:
    """Policies and SGLang's router on the same vLLM servers: latency, hits, balance, predictions.

    The trace that ships with kvlane, short prompts, and bursts. A tiny model on this CPU; needs
    deploy/vllm-cpu/install.sh, and for the peer the package sglang-router beside it. With
    KVLANE_MODEL_PATH and KVLANE_ENGINE_ARGS that model, on a GPU too. Quick: two rounds of 12 s,
    nine minutes in all; --full: four of 60 s. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a
    broker.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.streaming.engine_comparison import FULL, KINDS, QUICK, SIDES, bench_engines

    sides, kinds = _only(side, SIDES), _only(traffic, KINDS)
    run = partial(
        bench_engines, Settings(), FULL if full else QUICK, servers, rate, sides=sides, kinds=kinds
    )
    measure("engines", run, json)


def _only(chosen: list[str] | None, names: Collection[str]) -> Collection[str]:
    """The chosen names, by default all. Raises typer.BadParameter."""
    if unknown := [name for name in chosen or () if name not in names]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(names)}")
    return chosen or names


@benchmark(app)
def peer_router() -> Benchmark:
    """Requests and tokens from client to model server and back, compared with SGLang's router.

    Mock servers, the same for both; bodies are forwarded unchanged. Needs `workbench/peers/build.sh
    router`. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.streaming.peer_router import FULL, QUICK, bench_peer_router

    return Benchmark(bench_peer_router, QUICK, FULL)


@benchmark(app)
def first_token() -> Benchmark:
    """Time from a client's request to its first token, beside a bare chain of Kafka clients.

    HTTP to HTTP, with an engine that answers at once in the worker and with an attached server: one
    request at a time, 50 and 200 a second, in turns. Uses KVLANE_BOOTSTRAP_SERVERS if set, else
    starts a broker.
    """
    from workbench.bench.streaming.first_token import FULL, QUICK, bench_first_token

    return Benchmark(bench_first_token, QUICK, FULL)


@benchmark(app)
def growth() -> Benchmark:
    """Costs at a tenth and at ten times the usual workers, blocks, requests, lanes and streams.

    And the memory of a stream and of a waiting request. Uses KVLANE_BOOTSTRAP_SERVERS if set, else
    starts brokers.
    """
    from workbench.bench.growth import FULL, QUICK, bench_growth

    return Benchmark(bench_growth, QUICK, FULL)


@benchmark(app, exits=True)
def attach() -> Benchmark:
    """Time to first text of clients that attach to streams of one lane, 20 per second, on Kafka.

    Quick: 100 000 Chunks in the lane, for 5 s; --full: 400 000, for 25 s. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if one waits more than 5 s.
    """
    from workbench.bench.streaming.attach_latency import FULL, QUICK, bench_attach

    return Benchmark(bench_attach, QUICK, FULL)


@app.command()
def rebuild(
    *,
    blocks: Annotated[int, typer.Option(help="Number of blocks.", min=64_000)] = 2_300_000,
    full: Full = False,
    json: Json = None,
) -> None:
    """Cold start of a router until it is ready, with many blocks and no live worker, on Kafka.

    From snapshots and the tail, and from the log alone, compared with a start with empty topics.
    Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.routing.cold_start import ColdStartScale, bench_cold_start

    scale = ColdStartScale(blocks, rounds=5 if full else 2)
    measure("rebuild", partial(bench_cold_start, Settings(), scale), json)


@app.command()
def index(
    *,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare with Dynamo's index, which cargo builds.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Run the long form, or the quick one.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests to replay; by default copies of those in app/data."),
    ] = None,
    json: Json = None,
) -> None:
    """The index: matches, updates, tokens to scores, a trace, memory, records.

    With --peers compared with the Rust crate of Dynamo in the same process, on the same data, with
    answers compared. Throughput is CPU time; latencies are measured inside the compiled code.
    """
    from workbench.bench.index.index_bench import FULL, QUICK, bench_index

    scale = FULL if full else QUICK
    measure("index", partial(bench_index, scale, peers=peers, trace=trace), json)


@benchmark(app)
def decision() -> Benchmark:
    """CPU time of a routing decision, and of planning all queued requests again.

    Fleets of 8, 64 and 512 workers; --full: 1 to 1024. Every decision is compared with the one
    recomputed from its record, and with a plain implementation of the formulas.
    """
    from workbench.bench.routing.decision_latency import FULL, QUICK, bench_decisions

    return Benchmark(bench_decisions, QUICK, FULL)


@benchmark(app)
def vllm() -> Benchmark:
    """A worker around the real vLLM, and vLLM alone: tokens/s, and the cost of KV events.

    Eight streams of a tiny model on this CPU; needs deploy/vllm-cpu/install.sh. With
    KVLANE_MODEL_PATH and KVLANE_ENGINE_ARGS 8 and 64 streams of that model, on a GPU too. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from workbench.bench.streaming.vllm_overhead import FULL, QUICK, bench_vllm

    return Benchmark(bench_vllm, QUICK, FULL)
