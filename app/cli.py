"""`kvlane`: the command line. Commands call functions elsewhere; this file only wires them.

Errors that kvlane raises on purpose become one line and exit code 1; `--debug` shows where they
came from. Everything is imported late, so that `--help` is quick.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from app.commands import (
    audit,
    bench,
    capture,
    dead_letters,
    machine,
    requests,
    simulate,
    topics,
)  # fmt: skip


class _Commands(TyperGroup):
    """Turns errors that are meant for people into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not _is_for_people(error):
                raise
            stderr = Console(stderr=True, soft_wrap=True, highlight=False)
            stderr.print("[red]error:[/]", escape(str(error) or type(error).__name__))
            if advice := _advice(error):
                stderr.print(advice, style="dim")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="LLM workers behind Apache Kafka: prompts in, streams out, nothing lost when a process "
    "dies. Start with `kvlane demo`.",
    epilog="Settings come from KVLANE_* variables: `kvlane settings` shows them all.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlane {version('kvlane')}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    _show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Show the version."),
    ] = False,
) -> None:
    """Set up what all commands share; `debug` is read by `_Commands`."""
    if not debug:  # what its client says about an outage is said again in our error
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


app.command()(machine.demo)
app.command()(machine.up)
app.command()(requests.publish)
app.command()(requests.follow)
app.command()(requests.cancel)
app.command()(audit.explain)
app.command()(audit.replay)
app.command()(capture.capture)
app.command()(simulate.simulate)
app.add_typer(topics.app, name="topics")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(bench.app, name="bench")


@app.command()
def asyncapi() -> None:
    """Print what clients need to know of `prompts` and `responses`, as AsyncAPI in YAML.

    With the topic prefix and the servers of this environment. The form of the records is in
    `deploy/asyncapi.yaml`, too: `make asyncapi` writes it.
    """
    from app.settings import Settings
    from streams.asyncapi import document

    settings = Settings()
    servers = settings.bootstrap_servers or "localhost:9092"
    typer.echo(document(servers.split(","), settings.topic_prefix), nl=False)


@app.command()
def settings() -> None:
    """Show every setting: its variable, value, default and meaning. Secrets are masked."""
    from app.settings import settings_command

    settings_command()


def main() -> None:
    """The entry point of the `kvlane` script."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _is_for_people(error: Exception) -> bool:
    from app.audit.moments import BadMoment
    from app.bench.ground import BenchFailed
    from app.captured import BadCapture
    from app.demo.parts import DemoFailed
    from app.letters import BadLetter
    from app.publishing import BadPrompt
    from app.settings import SettingsError
    from app.trace import BadTrace
    from streams.errors import StreamError

    expected = (
        StreamError, SettingsError, DemoFailed, BenchFailed, BadCapture, BadLetter, BadMoment,
        BadPrompt, BadTrace, TimeoutError,
    )  # fmt: skip
    return isinstance(error, expected)


def _advice(error: Exception) -> str:
    """What the error's own documentation tells to do."""
    from streams.errors import StreamError

    return (type(error).__doc__ or "").strip() if isinstance(error, StreamError) else ""


if __name__ == "__main__":
    main()
