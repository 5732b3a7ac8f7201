"""The commands `kvlane batch`: batches of requests, by the HTTP API of a gateway.

They use OpenAI's client, so that any server with the Batch API can be named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlane.app.audit.time_range import format_time
from kvlane.app.commands.console import (
    JsonOption,
    escape_text,
    make_console,
    plain_table,
    progress_bar,
    show_result,
)
from kvlane.app.operator_error import OperatorError, install_hint
from kvlane.streams.record_types.batch_records import ENDED

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

STATUS_POLL_S = 1.0

app = typer.Typer(
    no_args_is_help=True,
    help="Submit, list, show and cancel batches of requests.\n\n"
    "Example: `kvlane batch submit lines.jsonl --wait`",
)

_Url = Annotated[
    str, typer.Option(help="The gateway; default: this machine, port KVLANE_HTTP_PORT.")
]
_ApiKey = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", help="The API key, if it needs one.")
]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the batch.")]


class BatchCommandFailed(OperatorError):
    """The gateway refuses the command, or cannot be reached; the message has its reason."""


@app.command()
def submit(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="JSONL: one request a line, as in "
            '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{...}}.',
        ),
    ],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, with a bar.")] = False,
    endpoint: Annotated[str, typer.Option(help="URL of all its lines.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="Time for all of it: 24h, 90m, 7d.")] = "24h",
    url: _Url = "",
    api_key: _ApiKey = "",
) -> None:
    """Upload a file and run its lines as a batch. The id goes to standard output.

    With --wait the exit code is 1 unless the batch is completed.

    Example: `kvlane batch submit lines.jsonl --wait`
    """
    from kvlane.app.settings import settings_for_writing

    settings_for_writing()
    with _client(url, api_key) as client:
        with file.open("rb") as content:
            uploaded = client.files.create(file=(file.name, content), purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window=window,  # type: ignore[arg-type]
        )
        typer.echo(batch.id)
        if wait and _wait(client, batch).status != "completed":
            raise typer.Exit(1)


@app.command("list")
def list_batches(
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many, the newest first.")] = 20,
    url: _Url = "",
    api_key: _ApiKey = "",
    json: JsonOption = None,
) -> None:
    """Show the newest batches.

    Example: `kvlane batch list --json - | jq -r '.batches[] | select(.status == "failed") | .id'`
    """
    table = plain_table("id", "status", "lines", "completed", "failed", "created (UTC)")
    with _client(url, api_key) as client:
        batches = client.batches.list(limit=limit).data
    for batch in batches:
        counts = batch.request_counts
        numbers = (counts.total, counts.completed, counts.failed) if counts else (0, 0, 0)
        created = format_time(batch.created_at * 1000)[:19]
        table.add_row(batch.id, batch.status, *map(str, numbers), created)
    rows = [batch.model_dump(mode="json", exclude_unset=True) for batch in batches]
    show_result(json, {"batches": rows}, lambda: make_console().print(table))


@app.command()
def show(batch_id: _Id, *, url: _Url = "", api_key: _ApiKey = "") -> None:
    """Show a batch, as JSON.

    Example: `kvlane batch show batch_0198`
    """
    with _client(url, api_key) as client:
        typer.echo(client.batches.retrieve(batch_id).model_dump_json(indent=2, exclude_unset=True))


@app.command()
def cancel(batch_id: _Id, *, url: _Url = "", api_key: _ApiKey = "") -> None:
    """Cancel a batch. Its files keep the finished lines.

    Example: `kvlane batch cancel batch_0198`
    """
    from kvlane.app.settings import settings_for_writing

    settings_for_writing()
    with _client(url, api_key) as client:
        typer.echo(f"{batch_id} is {client.batches.cancel(batch_id).status}")


@app.command()
def results(
    batch_id: _Id,
    *,
    errors: Annotated[bool, typer.Option("--errors", help="The error file instead.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file; default: standard output.")
    ] = None,
    url: _Url = "",
    api_key: _ApiKey = "",
) -> None:
    """Print the lines of a batch that has ended, or write them to a file.

    Example: `kvlane batch results batch_0198 --output answers.jsonl`
    """
    kind = "error" if errors else "output"
    with _client(url, api_key) as client:
        batch = client.batches.retrieve(batch_id)
        file_id = batch.error_file_id if errors else batch.output_file_id
        if file_id is None:
            raise BatchCommandFailed(f"{batch_id} is {batch.status} and has no {kind} file")
        with client.files.with_streaming_response.content(file_id) as content:
            if output is not None:
                content.stream_to_file(output)
                return
            stdout = typer.get_binary_stream("stdout")
            for piece in content.iter_bytes():
                stdout.write(piece)


def _wait(client: OpenAI, batch: Batch) -> Batch:
    """Wait for the end of a batch, with a progress bar on standard error."""
    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task(batch.status, total=None)
        while batch.status not in ENDED:
            time.sleep(STATUS_POLL_S)
            batch = client.batches.retrieve(batch.id)
            if (counts := batch.request_counts) is not None and counts.total:
                done = counts.completed + counts.failed
                bar.update(task, total=counts.total, completed=done, description=batch.status)
    for error in (batch.errors.data or []) if batch.errors else []:
        place = f"line {error.line}: " if error.line else ""
        console.print(f"{place}{escape_text(error.message or '')}", highlight=False)
    return batch


@contextmanager
def _client(url: str, api_key: str) -> Iterator[OpenAI]:
    """OpenAI's client. Its errors become BatchCommandFailed."""
    if find_spec("openai") is None:
        raise BatchCommandFailed(
            "OpenAI's client is not installed", correction=install_hint("demo")
        )
    import openai

    base_url = (url or _local_url()).rstrip("/").removesuffix("/v1") + "/v1"
    try:
        with openai.OpenAI(base_url=base_url, api_key=api_key or "none") as client:
            yield client
    except openai.APIStatusError as e:
        body = e.body if isinstance(e.body, dict) else {}
        message = body.get("message") or e.message
        raise BatchCommandFailed(f"the gateway answers {e.status_code}: {message}") from e
    except openai.APIConnectionError as e:
        raise BatchCommandFailed(f"{base_url} cannot be reached: {e.__cause__ or e}") from e


def _local_url() -> str:
    from kvlane.app.settings import Settings

    settings = Settings()
    scheme = "http" if settings.http_tls_cert is None else "https"
    return f"{scheme}://127.0.0.1:{settings.http_port}"
