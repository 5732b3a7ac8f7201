"""Tests of `kvlane demo` and `kvlane up`, on memory and on a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.local.processes import free_port
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.topic_cleanup import delete_topics

pytestmark = pytest.mark.slow

KVLANE = [sys.executable, "-m", "kvlane.app"]
WHOLE_S = 150.0


def environment(**variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVLANE_")}
    return inherited | {"COLUMNS": "160"} | variables


def command(*arguments: str, code: int = 0) -> str:
    """The output of a command within this process, which has to end with this exit code."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def kvlane(*arguments: str, **variables: str) -> str:
    """The output of a demo, which has to end with exit code 0."""
    done = subprocess.run(
        [*KVLANE, *arguments],
        env=environment(**variables), capture_output=True, text=True, timeout=WHOLE_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_story(shown: str, killed: str = r"worker-\d, then worker-\d") -> None:
    """Both policies were shown, a worker died in mid stream, and every text is right.

    `killed`: the workers of the answer whose worker died.
    """
    assert re.search(r"round robin +\d+\.\d% +\d+ ms", shown)
    assert re.search(r"KV-aware +\d+\.\d% +\d+ ms", shown)
    assert re.search(r"→ worker-\d +cost", shown)
    assert re.search(r"from the indexer: worker-1 \d+, worker-2 \d+", shown)
    assert "kill -9 worker-" in shown
    assert re.search(rf"the answer is complete: {killed}, longest", shown)
    assert ("each call arrived once and whole" in shown) is ("(prefill)" not in shown)
    right = re.search(r"(\d+) of (\d+) texts are exactly as expected", shown)
    assert right is not None
    assert right[1] == right[2]
    assert int(right[2]) >= 600  # the trace twice, and what was asked by hand


def running_with(value: str) -> list[int]:
    """The processes that have a word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if value.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs while the test looks."""
    process = subprocess.Popen(
        [*KVLANE, *arguments],
        env=environment(PYTHONUNBUFFERED="1", **variables), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # What runs in the background of a shell ignores Ctrl-C, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread, idle
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        print(process.communicate()[0])  # noqa: T201 - what it said last, for a test that fails


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for shown in process.stdout:
        if line in shown:
            return
    raise AssertionError(f"it ended without {line!r}")


@pytest.fixture
def on_kafka(kafka: Broker, topic_prefix: str) -> Iterator[dict[str, str]]:
    """Variables that put a demo on the shared broker: few topics, a prefix and ports of its own."""
    yield {
        "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": topic_prefix,
        "KVLANE_LANES": "4",
        "KVLANE_HTTP_PORT": str(free_port()),
        "KVLANE_INDEXER_PORT": str(free_port()),
    }
    asyncio.run(delete_topics(kafka.bootstrap_servers, topic_prefix))


def test_disaggregated_demo_loses_nothing_and_hands_requests_over() -> None:
    shown = kvlane("demo", "Hello", "--broker", "memory", "--disaggregated")
    check_story(shown, r"worker-1 \(prefill\), then worker-[234] \(decode\), then worker-[234]")
    assert "4 workers (1 prefill, 3 decode) are up" in shown
    assert "kill -9 worker-1" not in shown
    handed_over = re.search(r"(\d+) of (\d+) requests were handed over", shown)
    assert handed_over is not None
    assert 100 < int(handed_over[1]) < int(handed_over[2])
    assert "drift" not in shown


def test_ctrl_c_ends_the_demo_in_memory_at_once() -> None:
    with running("demo", "--broker", "memory") as process:
        read_until(process, "production trace")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_demo_on_kafka_loses_nothing_and_leaves_no_process(
    on_kafka: dict[str, str], topic_prefix: str
) -> None:
    shown = kvlane("demo", "What is a lane?", **on_kafka)
    check_story(shown)
    assert "What is a lane?" in shown
    assert running_with(topic_prefix) == []


def test_up_serves_publish_follow_and_cancel_with_prefill_and_decode_workers(
    on_kafka: dict[str, str], topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in on_kafka.items():
        monkeypatch.setenv(name, value)
    endless = tmp_path / "endless.jsonl"
    endless.write_text(
        '{"id":"long","body":{"messages":[{"role":"user","content":"again"}],'
        '"max_tokens":5000,"ignore_eos":true}}'
    )
    with running("up", "--workers", "2", "--prefill-workers", "1", **on_kafka) as deployment:
        read_until(deployment, "and 2 workers (1 prefill, 1 decode) are starting")
        read_until(deployment, "/metrics  worker-1 (prefill)")
        read_until(deployment, "/metrics  worker-2 (decode)")
        read_until(deployment, "Ctrl-C stops everything")
        answer = command("publish", "--id", "both", "--follow", "héllo")
        assert answer == command("publish", "--follow", "héllo")
        assert answer.endswith(".\n")
        explained = command("explain", "both")
        assert re.search(r"prefill.*worker-1", explained), explained
        assert re.search(r"decode.*worker-2", explained), explained
        command("publish", "-f", str(endless))
        command("cancel", "long")
        command("follow", "long", code=1)
        assert "as it should be" in command("topics", "describe")
        assert json.loads(command("topics", "describe", "--json", "-"))["topics"]
        deployment.send_signal(signal.SIGTERM)
        assert deployment.wait(60) == 0
    assert running_with(topic_prefix) == []
