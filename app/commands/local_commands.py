"""The commands that run processes on this machine: `kvlane demo`, `up`, `run` and `bench`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from kvlane.app.operator_error import OperatorError, install_hint

Process = Literal[
    "gateway", "preprocessor", "router", "worker", "collector", "indexer", "standalone"
]


def run(
    process: Annotated[Process, typer.Argument(help="standalone: all of them in one process.")],
) -> None:
    """Run one process of a deployment until Ctrl-C or SIGTERM.

    As `faststream run` with the process's application does, from any folder. Settings come from
    KVLANE_* variables. Exit code 1, with the error on standard error, if the process fails.

    Example: `KVLANE_WORKER_ID=worker-1 kvlane run worker`
    """
    from faststream.__main__ import cli  # type: ignore[attr-defined]

    logging.getLogger("aiokafka").setLevel(logging.NOTSET)  # other commands leave its lines out
    # Without a folder for applications: the current one may have modules of the same names.
    cli(["run", f"kvlane.app.{process}:app", "--app-dir", ""], prog_name="kvlane")


ROOT = Path(__file__).resolve().parents[2]


class NoCheckout(OperatorError):
    """The benchmarks are not installed with the package."""

    correction = "Clone it, then run `make setup` and `.venv/bin/kvlane bench` there."


def add_bench(app: typer.Typer) -> None:
    """Add the commands of the folder `workbench/` beside this package's sources, if it is there."""
    if (ROOT / "workbench" / "__init__.py").is_file():
        sys.path.append(str(ROOT))
        commands = import_module("workbench.bench.commands.bench_commands")
        app.add_typer(commands.app, name="bench")
    else:
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(context_settings=anything)(bench)


def bench() -> None:
    """Measure and stress kvlane on this machine, in a checkout of its repository."""
    raise NoCheckout("the benchmarks are in the repository of kvlane, not in the package")


BrokerOption = Annotated[
    Literal["auto", "env", "docker", "jvm", "memory"],
    typer.Option(
        help="auto: KVLANE_BOOTSTRAP_SERVERS if set, else Docker, else a local JVM, else memory."
    ),
]


def demo(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts to send; without any, you type them.")
    ] = None,
    *,
    broker: BrokerOption = "auto",
    engine: Annotated[
        Literal["simulated", "vllm"],
        typer.Option(help="vllm: two vLLM workers on this CPU or GPU, with a tiny model."),
    ] = "simulated",
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="One worker only computes prompts and hands them to the others, which decode.",
        ),
    ] = False,
) -> None:
    """Run the demo: chats, prompts, a production trace under two policies, a killed worker.

    Starts a broker and every process on this machine, chats through OpenAI's package, publishes
    prompts to Kafka, replays 300 requests of a production trace with KV-aware and round-robin
    routing, kills a worker in mid stream, compares every text with the expected one, and cleans up.
    About a minute. Exit code 1 if any text differs.

    With `--engine vllm` the workers run vLLM, and the expected cache hits are compared with those
    of vLLM; three minutes. With `--disaggregated`, answers to prompts that were handed over are
    compared with those of one worker. `make demo ENGINE=vllm` installs vLLM for a CPU first.

    Examples:

    - `kvlane demo "What is a log?" "And a lane?"`

    - `kvlane demo --disaggregated`
    """
    from kvlane.app.settings import settings_for_writing

    settings = settings_for_writing()
    try:
        from kvlane.app.demo.demo_run import run_demo as run
        from kvlane.app.demo.demo_run import run_vllm_demo
    except ModuleNotFoundError as e:
        raise typer.BadParameter(f"the demo needs {e.name}: {install_hint('demo')}") from e

    console = Console()
    if engine == "vllm":
        if not run_vllm_demo(settings, console, broker, prefill_workers=int(disaggregated)):
            raise typer.Exit(1)
        return
    if not prompts and sys.stdin.isatty():
        prompts = _prompt_lines(console)
    if not run(settings, prompts or [], console, broker, prefill_workers=int(disaggregated)):
        raise typer.Exit(1)


def up(
    *,
    workers: Annotated[int, typer.Option(help="How many workers.", min=1, max=64)] = 2,
    prefill_workers: Annotated[
        int,
        typer.Option(
            help="How many of the workers only compute prompts; the others decode.", min=0
        ),
    ] = 0,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of a broker started by this command; 0: a free one.", min=0, max=65535
        ),
    ] = None,
    broker: Annotated[
        Literal["auto", "env", "docker", "jvm"],
        typer.Option(
            help="auto: KVLANE_BOOTSTRAP_SERVERS if set, else a local JVM, else Docker; "
            "with --ephemeral Docker first."
        ),
    ] = "auto",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the broker's data and log files (~/.local/share/kvlane/up).",
            file_okay=False,
        ),
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Keep no data: they are deleted with the broker.")
    ] = False,
) -> None:
    """Run a small deployment until Ctrl-C: a broker, one of each process, and workers.

    Processes that die are restarted, the broker too. A later start continues with the same data.

    With KVLANE_BOOTSTRAP_SERVERS set, and no `--port`, `--data` or `--ephemeral`, it uses that
    Kafka and starts only the rest. Ports: KVLANE_HTTP_PORT (8000), KVLANE_INDEXER_PORT (8090).

    Examples:

    - `kvlane up --port 9092 --workers 3`

    - `KVLANE_HTTP_PORT=8001 KVLANE_INDEXER_PORT=8091 kvlane up --data ./second`
    """

    from kvlane.app.local.data_folder import default_folder
    from kvlane.app.local.up_run import UpOptions
    from kvlane.app.local.up_run import run_up as run
    from kvlane.app.settings import settings_for_writing

    if data is not None and ephemeral:
        raise typer.BadParameter("give --data or --ephemeral, not both")
    if prefill_workers >= workers:
        raise typer.BadParameter(
            f"--prefill-workers {prefill_workers} of --workers {workers} leaves no worker to "
            "decode: give fewer, or more --workers"
        )
    options = UpOptions(broker, workers, prefill_workers, port, data, ephemeral)
    run(settings_for_writing(), options, default_folder(), typer.echo)


def _prompt_lines(console: Console) -> list[str]:
    console.print("Type prompts; an empty line starts (at once: with examples):", style="dim")
    prompts = []
    while line := console.input("[bold]you[/]  ").strip():
        prompts.append(line)
    return prompts
