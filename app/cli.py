"""The command line `kvlane`, imported late, so that `--help` is quick.

Errors that kvlane raises on purpose become one line and exit code 1, or 3 where 1 is a result;
`--debug` shows the traceback.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from kvlane.app.commands import (
    audit_commands,
    batch_commands,
    dead_letter_commands,
    key_commands,
    local_commands,
    model_commands,
    request_commands,
    routing_commands,
    topic_commands,
    usage_command,
    worker_commands,
)
from kvlane.app.commands.console import JsonOption, escape_lines, show_result
from kvlane.app.commands.fleet import doctor_command, fleet_commands
from kvlane.app.commands.rehearsal import rehearse_command
from kvlane.app.commands.simulation import simulate_command, size_command

_ERROR_CODES = {"status": 3, "doctor": 3}
"""Exit codes of errors, of commands whose exit code 1 is a result."""


class _Commands(TyperGroup):
    """Prints expected errors as one line and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not _is_for_people(error):
                raise
            stderr = Console(stderr=True, soft_wrap=True, highlight=False)
            stderr.print("[red]error:[/]", escape(escape_lines(str(error) or type(error).__name__)))
            if correction := getattr(error, "correction", ""):  # a TimeoutError has none
                stderr.print(escape(correction), style="dim")
            raise typer.Exit(_ERROR_CODES.get(ctx.invoked_subcommand, 1)) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="LLM workers behind Apache Kafka: prompts in, streams out, nothing lost when a process "
    "dies. Start with `kvlane demo`.",
    epilog="Settings come from KVLANE_* variables: `kvlane settings` shows them all.",
)


COMMIT_FILE = Path(__file__).with_name("data") / "commit.txt"
"""The commit, which `git archive` writes: wheels and sources of a release have it."""


def _version(wanted: bool) -> None:
    if wanted:
        commit = COMMIT_FILE.read_text("utf-8").strip()
        of_release = "" if commit.startswith("$") else f" (commit {commit[:12]})"
        typer.echo(f"kvlane {version('kvlane')}{of_release}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    """Set up logging for all commands; `debug` is read by `_Commands`."""
    if not debug:  # kvlane's own error repeats the client's log line about an outage
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


app.command()(local_commands.demo)
app.command()(local_commands.up)
app.command()(local_commands.run)
app.command()(request_commands.publish)
app.command()(request_commands.follow)
app.command()(request_commands.cancel)
app.command()(fleet_commands.status)
app.command()(fleet_commands.top)
app.command()(doctor_command.doctor)
app.command()(fleet_commands.requests)
app.command()(fleet_commands.queue)
app.command()(usage_command.usage)
app.command()(audit_commands.explain)
app.command()(audit_commands.replay)
app.command(context_settings={"ignore_unknown_options": True})(audit_commands.verify_decisions)
app.command()(audit_commands.capture)
app.command()(routing_commands.shadow)
app.command()(rehearse_command.rehearse)
app.command()(simulate_command.simulate)
app.command()(size_command.size)
app.add_typer(batch_commands.app, name="batch")
app.add_typer(topic_commands.app, name="topics")
app.add_typer(worker_commands.app, name="workers")
app.add_typer(model_commands.app, name="models")
app.add_typer(routing_commands.app, name="routing")
app.add_typer(key_commands.app, name="keys")
app.add_typer(dead_letter_commands.app, name="dead-letters")
local_commands.add_bench(app)


@app.command()
def asyncapi() -> None:
    """Print the AsyncAPI document of the topics of clients, in YAML.

    With the topic prefix and the servers of this environment. `make asyncapi` writes the same
    document, with default values, to `deploy/asyncapi.yaml`.

    Example: `kvlane asyncapi > asyncapi.yaml`
    """
    from kvlane.app.preprocessor import Preprocessor
    from kvlane.app.runtime.process import ProcessContext, open_log
    from kvlane.app.settings import Settings
    from kvlane.streams.asyncapi import document

    settings = Settings()
    log = open_log(settings, "asyncapi")
    process = Preprocessor(log, settings, ProcessContext("asyncapi"))  # never started
    typer.echo(document(process.broker), nl=False)


@app.command()
def settings(
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print names, defaults and meanings as Markdown.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Show every setting: its variable, value, default and meaning. Secrets are masked.

    Example: `kvlane settings --json - | jq '.settings[] | select(.is_set)'`
    """
    from kvlane.app.commands import settings_table
    from kvlane.app.settings import Settings

    if markdown:
        typer.echo(settings_table.settings_markdown(), nl=False)
        return
    rows = settings_table.settings_rows(Settings())
    found = {"settings": [row._asdict() for row in rows]}
    show_result(json, found, lambda: settings_table.print_settings(rows))


def _is_for_people(error: Exception) -> bool:
    from kvlane.streams.errors import CorrectableError

    return isinstance(error, CorrectableError | TimeoutError)
