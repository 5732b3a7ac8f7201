"""The data folder of `kvlane up`: locks, logs, and cleanup after a killed deployment.

    DIR/lock             held by the running `kvlane up`
    DIR/cleanup.lock     held by its watchdogs too: free when all of its processes have ended
    DIR/kind             the kind of broker: jvm (data in DIR/kafka) or docker (in a volume)
    DIR/logs/NAME.log    the output of each process; NAME.log.1: of the deployment before
    DIR/kvlane-*         temporary files of the present deployment

Both locks end with their processes, so none is ever stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO

from kvlane.app.operator_error import OperatorError
from kvlane.streams.brokers.broker import KeptData
from kvlane.streams.brokers.watchdog import NAME, clean_up

CLEANUP_TIMEOUT_S = 40.0
"""Watchdogs take a second or two after `kill -9`, and 30 at most."""
LOCK_FILE, CLEANUP_LOCK_FILE, KIND_FILE, LOGS_FOLDER = "lock", "cleanup.lock", "kind", "logs"
MAX_LOG_BYTES = 64 * 1024 * 1024
"""A log file beyond this size is moved to NAME.log.1 while its process runs."""


class CannotStart(OperatorError):
    """`kvlane up` cannot start; nothing was started or changed."""


def default_folder() -> Path:
    """$XDG_DATA_HOME/kvlane/up, or ~/.local/share/kvlane/up."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base, "kvlane", "up")


class DataFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[str] | None = None
        self._cleanup: IO[str] | None = None

    def open(self) -> None:
        """Lock it, and clean up after a killed `kvlane up`. Raises CannotStart."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.path / LOCK_FILE).open("a+")
            self._cleanup = (self.path / CLEANUP_LOCK_FILE).open("a")
        except OSError as e:
            self.close()
            raise CannotStart(f"cannot use {self.path}: {e}. Choose another with --data") from e
        if not _locked(self._lock, 0.0):
            self._lock.seek(0)
            process = self._lock.read().strip() or "unknown"
            self.close()
            raise CannotStart(
                f"another `kvlane up` (process {process}) uses {self.path}: stop it, or start a "
                "second one with its own --data, --port, KVLANE_HTTP_PORT and KVLANE_INDEXER_PORT"
            )
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        if not _locked(self._cleanup, CLEANUP_TIMEOUT_S):
            self.close()
            raise CannotStart(
                f"processes of an earlier `kvlane up` in {self.path} have not ended after "
                f"{CLEANUP_TIMEOUT_S:g} s: `fuser {self.path / CLEANUP_LOCK_FILE}` lists them"
            )
        for left in self.path.glob(f"{NAME}*"):  # left by a watchdog that was killed, too
            clean_up(left, docker=self.broker_kind == "docker")

    def close(self) -> None:
        for file in (self._cleanup, self._lock):
            if file is not None:
                file.close()
        self._lock = self._cleanup = None

    @property
    def storage(self) -> KeptData:
        assert self._cleanup is not None, "not open"
        return KeptData(self.path, self._cleanup.fileno())

    @property
    def broker_kind(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.path / KIND_FILE).read_text().strip()
        return ""

    def set_broker_kind(self, kind: str) -> None:
        (self.path / KIND_FILE).write_text(f"{kind}\n")

    def new_logs(self) -> Path:
        """The folder for log files; renames those of the deployment before."""
        logs = self.path / LOGS_FOLDER
        logs.mkdir(exist_ok=True)
        for log in logs.glob("*.log"):
            log.replace(log.with_name(f"{log.name}.1"))
        return logs


def rotate_logs(logs: Path) -> None:
    for log in logs.glob("*.log"):
        if log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _locked(file: IO[str], within_s: float) -> bool:
    """Lock a file; False after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True
