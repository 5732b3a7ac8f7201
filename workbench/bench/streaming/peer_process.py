"""SGLang's router as a child process, in the environment of `workbench/peers/build.sh router`.

python -m workbench.bench.streaming.peer_process PYTHON PORT METRICS_PORT URL...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PEER_PYTHON = Path("build/peers/router/bin/python")


def peer_command(python: str, port: str, metrics_port: str, *urls: str) -> list[str]:
    """The command line; the router logs nothing but errors, and rejects nothing."""
    return [
        python, *_watchdog_mark(), "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics_port,
        "--policy", "cache_aware", "--log-level", "error", "--worker-urls", *urls,
    ]  # fmt: skip


def _watchdog_mark() -> list[str]:
    """The option by which the process guard finds this process."""
    given = sys.orig_argv
    return given[at : at + 2] if (at := given.index("-X") if "-X" in given else -1) >= 0 else []


if __name__ == "__main__":
    command = peer_command(*sys.argv[1:])
    os.execv(command[0], command)  # noqa: S606 - with arguments of our own
