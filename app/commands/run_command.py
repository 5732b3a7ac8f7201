"""The command `kvlane run`: one process of a deployment, in the foreground."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import typer

Process = Literal[
    "gateway", "preprocessor", "router", "worker", "collector", "indexer", "standalone"
]


def run(
    process: Annotated[Process, typer.Argument(help="standalone: all of them in one process.")],
) -> None:
    """Run one process of a deployment until Ctrl-C or SIGTERM.

    As `faststream run` with the process's application does, from any folder. Settings come from
    KVLANE_* variables. Exit code 1, with the error on standard error, if the process fails.
    """
    from faststream.__main__ import cli  # type: ignore[attr-defined]

    logging.getLogger("aiokafka").setLevel(logging.NOTSET)  # other commands leave its lines out
    # Without a folder for applications: the current one may have modules of the same names.
    cli(["run", f"kvlane.app.{process}:app", "--app-dir", ""], prog_name="kvlane")
