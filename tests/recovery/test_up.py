"""Tests of `kvlane up` on a broker of its own: killed, started twice, started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.local.processes import free_port
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.jvm_artifacts import java
from kvlane.streams.brokers.watchdog import MARK
from kvlane.streams.errors import BrokerUnavailable
from tests.brokers import requested_kind

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

KVLANE = [sys.executable, "-m", "kvlane.app"]
READY_S = 90.0
REFUSED_S = 45.0
"""Most of it is the interpreter's start on a busy machine."""
AGAIN_S = 60.0
SILENT_S = 6.0
"""The request time-out of 4 s, a second until the probe looks, and one for a busy machine."""
AT_ONCE_S = 3.0
"""Less than the request time-out."""
CHAT = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


class Up:
    """One `kvlane up` in a folder, with ports of its own; what it prints is collected."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_ports(1)[0])
        self.gateway, self.indexer = str(free_port()), str(free_port())
        self.lines: list[str] = []

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVLANE_")}
        own = {
            "KVLANE_LANES": "2",
            "KVLANE_ENGINE_SPEEDUP": "10",
            "KVLANE_HTTP_PORT": self.gateway,
            "KVLANE_INDEXER_PORT": self.indexer,
            "KVLANE_DRAIN_GRACE_S": "1",
            "COLUMNS": "80",
        }
        return inherited | own | variables

    def start(self) -> None:
        self.lines = []
        self.process = subprocess.Popen(
            [*KVLANE, "up", "--port", self.port, "--data", str(self.folder), "--workers", "1"],
            env=self.environment(), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # What runs in the background of a shell ignores Ctrl-C, and its children with it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self.process, self.lines))
        self._reader.start()
        self.wait_for("^Ctrl-C stops everything", READY_S)

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            lines.extend(line.rstrip("\n") for line in stdout)

    def wait_for(self, pattern: str, within_s: float, since: int = 0) -> str:
        """The first line from `since` on that matches."""
        deadline = time.monotonic() + within_s
        while True:
            for line in self.lines[since:]:
                if re.search(pattern, line):
                    return line
            assert time.monotonic() < deadline, f"no {pattern!r}:\n" + "\n".join(self.lines)
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.05)

    def second(self, *arguments: str, **variables: str) -> str:
        """What another `kvlane up` prints that is started beside it, and has to refuse."""
        done = subprocess.run(
            [*KVLANE, "up", *arguments], env=self.environment(**variables), check=False,
            capture_output=True, text=True, timeout=REFUSED_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        assert "ready after" not in done.stdout
        return " ".join(done.stderr.split())

    def pids(self) -> dict[str, int]:
        """Process ids by kind of process; of those that carry the mark of the folder."""
        mark = f"{MARK}{self.folder}/".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(argument.startswith(mark) for argument in arguments):
                words = [*arguments, b"run", b"broker"]  # `kvlane run KIND`; a broker has no `run`
                found[words[words.index(b"run") + 1].decode()] = int(entry.name)
        return found

    def send(self, within_s: float = AGAIN_S) -> tuple[str, str]:
        """The id and the text of a chat; asked again until the deployment answers."""
        deadline = time.monotonic() + within_s
        while True:
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.gateway}/v1/chat/completions",
                json.dumps(CHAT).encode(),
                {"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    got: dict[str, Any] = json.load(answer)
                    text: str = got["choices"][0]["message"]["content"]
                    return answer.headers["x-kvlane-id"], text
            except OSError:
                assert time.monotonic() < deadline, "\n".join(self.lines)
                time.sleep(0.2)

    def status(self, path: str, body: object = None) -> int:
        """The status of one HTTP request to the gateway."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.gateway}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as e:
            e.close()
            return e.code

    def told_before(self, request_id: str) -> str:
        """The text of an earlier stream, from the log."""
        url = f"http://127.0.0.1:{self.gateway}/v1/streams/{request_id}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            events = [line[6:] for line in answer.read().decode().split("\n") if "data: {" in line]
        deltas = [choice["delta"] for e in events for choice in json.loads(e)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A deployment that is ready; each test leaves it ready."""
    if requested_kind() == "memory":
        pytest.skip("KVLANE_BROKER=memory")
    try:
        java()
    except BrokerUnavailable as reason:
        pytest.skip(str(reason))
    deployment = Up(tmp_path_factory.mktemp("up") / "data")
    deployment.start()
    yield deployment
    if deployment.process.poll() is None:
        deployment.end(signal.SIGKILL)


def test_ready_comes_with_addresses_that_answer_in_lines_of_their_own(up: Up) -> None:
    assert f"export KVLANE_BOOTSTRAP_SERVERS=127.0.0.1:{up.port}" in up.lines
    assert f"export OPENAI_BASE_URL=http://127.0.0.1:{up.gateway}/v1" in up.lines
    assert "export OPENAI_API_KEY=none" in up.lines
    assert not [line for line in up.lines if line.startswith("not docker")]
    metrics = [line.split()[0] for line in up.lines if "/metrics " in line]
    assert len(metrics) == 6
    for url in metrics:
        for path in ("metrics", "readyz"):
            with urllib.request.urlopen(url.replace("metrics", path), timeout=20) as answer:
                assert answer.status == 200


def test_second_up_with_the_same_data_is_refused_without_effects(up: Up) -> None:
    before = up.pids()
    refusal = up.second("--port", up.port, "--data", str(up.folder))
    assert f"another `kvlane up` (process {up.process.pid}) uses {up.folder}" in refusal
    assert up.pids() == before
    assert up.send()[1]


def test_second_up_with_other_data_names_the_taken_ports(up: Up, tmp_path: Path) -> None:
    refusal = up.second("--port", up.port, "--data", str(tmp_path))
    for port, name in (
        (up.port, "--port"),
        (up.gateway, "KVLANE_HTTP_PORT"),
        (up.indexer, "KVLANE_INDEXER_PORT"),
    ):
        assert f"{port} ({name})" in refusal


def test_second_up_on_the_broker_of_the_first_is_refused_without_effects(up: Up) -> None:
    before = up.pids()
    refusal = up.second(
        KVLANE_BOOTSTRAP_SERVERS=f"127.0.0.1:{up.port}",
        KVLANE_HTTP_PORT=str(free_port()),
        KVLANE_INDEXER_PORT=str(free_port()),
    )
    assert f"worker-1 already run on topics kvlane.* of 127.0.0.1:{up.port}" in refusal
    assert up.pids() == before
    assert up.send()[1]


def test_killed_worker_is_restarted(up: Up) -> None:
    before, since = up.pids(), len(up.lines)
    os.kill(before["worker"], signal.SIGKILL)
    up.wait_for("worker-1 was killed by SIGKILL; started again in 0.5 s", 10, since)
    up.wait_for("worker-1 is started again", 10, since)
    assert up.send()[1]
    after = up.pids()
    assert after.pop("worker") != before.pop("worker")
    assert after == before


def test_killed_broker_is_restarted_on_its_data(up: Up) -> None:
    request_id, text = up.send()
    before, since = up.pids(), len(up.lines)
    os.kill(before["broker"], signal.SIGKILL)
    up.wait_for("the broker is gone, and is started again on its data", 20, since)
    up.wait_for(r"the broker is back after \d+", AGAIN_S, since)
    assert up.send()[1]
    assert up.told_before(request_id) == text
    after = up.pids()
    assert after.pop("broker") != before.pop("broker")
    assert after == before


def test_hanging_broker_is_reported_by_readyz_and_requests_and_its_return_by_the_logs(
    up: Up,
) -> None:
    broker = up.pids()["broker"]
    os.kill(broker, signal.SIGSTOP)
    try:
        stopped_at = time.monotonic()
        while up.status("/readyz") == 200:
            assert time.monotonic() - stopped_at < SILENT_S
            time.sleep(0.1)
        sent_at = time.monotonic()
        assert up.status("/v1/chat/completions", CHAT) == 503
        assert time.monotonic() - sent_at < AT_ONCE_S
    finally:
        os.kill(broker, signal.SIGCONT)
    assert up.send()[1]
    for name in ("gateway-1", "router-1", "worker-1", "preprocessor-1", "indexer-1"):
        log = up.folder / "logs" / f"{name}.log"
        deadline = time.monotonic() + 20
        while "Kafka answers again after" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_restart_continues_with_the_data(up: Up, how: signal.Signals) -> None:
    request_id, text = up.send()
    old = set(up.pids().values())
    assert up.end(how) == (0 if how is signal.SIGINT else -signal.SIGKILL)
    up.start()
    assert up.told_before(request_id) == text
    assert not old & set(up.pids().values())
    assert len(list(up.folder.glob("kvlane-*"))) == 2  # scratch of the broker and of processes
