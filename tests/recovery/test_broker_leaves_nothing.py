"""Tests of the end of a broker's owner: no process, container, port or data is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.broker_factory import obtain_broker
from kvlane.streams.brokers.docker import find_image
from kvlane.streams.brokers.jvm import JvmBroker, prepare
from kvlane.streams.brokers.jvm_artifacts import jars
from kvlane.streams.brokers.watchdog import LABEL, MARK, marked_processes
from kvlane.streams.errors import BrokerUnavailable
from tests.brokers import BrokerUsage

pytestmark = pytest.mark.kafka

DEADLINE_S = 120.0

OWNER = """
import json, signal, sys
from kvlane.streams.brokers.broker_factory import obtain_broker
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
with obtain_broker(sys.argv[1], brokers=int(sys.argv[2]), report=lambda _: None) as broker:
    print(json.dumps({
        "servers": broker.bootstrap_servers.split(","),
        "pids": [node.pid for node in getattr(broker, "nodes", ())],
        "directory": str(broker._guard.directory),
    }), flush=True)
    sys.stdin.read()
"""
FORKING_OWNER = OWNER.replace(
    "    sys.stdin.read()",
    """    import os, time
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(120)
        os._exit(0)
    sys.stdin.read()""",
)


@contextlib.contextmanager
def owner(program: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def started(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    answer: dict[str, Any] = json.loads(line)
    return answer


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def listening(server: str) -> bool:
    host, _, port = server.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def running(pid: int) -> bool:
    """Not gone, and not merely unburied: whoever is init may not have waited for it yet."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def watchdogs(directory: str) -> list[int]:
    """Processes that have the directory as an argument of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if directory.encode() in arguments:
                    found.append(int(entry.name))
    return found


def assert_nothing_left(broker: dict[str, Any]) -> None:
    directory = broker["directory"]
    eventually(lambda: not any(running(pid) for pid in broker["pids"]), "a JVM runs on")
    eventually(lambda: not marked_processes(f"{MARK}{directory}"), "a marked process runs on")
    eventually(lambda: not any(map(listening, broker["servers"])), "a port is still open")
    eventually(lambda: not Path(directory).exists(), "the data is still there")
    eventually(lambda: not watchdogs(directory), "the watchdog runs on")


@pytest.mark.parametrize(
    ("brokers", "ending"),
    [(1, signal.SIGINT), (1, signal.SIGTERM), (1, signal.SIGKILL), (3, signal.SIGKILL)],
)
def test_owner_is_ended_by_a_signal(brokers: int, ending: signal.Signals) -> None:
    with owner(OWNER, "jvm", str(brokers)) as process:
        broker = started(process)
        assert len(broker["pids"]) == brokers
        assert all(map(listening, broker["servers"]))
        assert watchdogs(broker["directory"])
        process.send_signal(ending)
        process.wait(DEADLINE_S)
    assert_nothing_left(broker)


def test_owner_is_killed_with_a_paused_broker() -> None:
    with owner(OWNER, "jvm", "1") as process:
        broker = started(process)
        os.kill(broker["pids"][0], signal.SIGSTOP)
        process.kill()
    assert_nothing_left(broker)


def test_owner_is_killed_while_its_broker_starts() -> None:
    with owner(OWNER, "jvm", "1") as process:
        brokers: list[tuple[int, str]] = []

        def spawned() -> bool:
            brokers[:] = children_with_mark(process.pid)
            return bool(brokers)

        eventually(spawned, "no broker was started")
        process.kill()
    [(pid, directory)] = brokers
    assert_nothing_left({"pids": [pid], "servers": [], "directory": directory})


def children_with_mark(parent: int) -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                found += [
                    (int(entry.name), argument.removeprefix(MARK))
                    for argument in arguments
                    if int(status[1]) == parent and argument.startswith(MARK)
                ]
    return found


def test_owner_is_killed_and_a_fork_of_it_survives() -> None:
    with owner(FORKING_OWNER, "jvm", "1") as process:
        broker = started(process)
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        try:
            process.kill()
            assert_nothing_left(broker)
            assert running(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_watchdog_was_killed_before_an_orderly_end() -> None:
    with obtain_broker("jvm", report=lambda _: None) as broker:
        assert broker.directory is not None
        left: dict[str, Any] = {
            "pids": [node.pid for node in broker.nodes],
            "servers": broker.bootstrap_servers.split(","),
            "directory": str(broker.directory),
        }
        for watchdog in watchdogs(left["directory"]):
            os.kill(watchdog, signal.SIGKILL)
    assert_nothing_left(left)


@pytest.mark.docker
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_owner_of_a_container_is_ended_by_a_signal(
    ending: signal.Signals, broker_ledger: BrokerUsage
) -> None:
    try:
        find_image(lambda _: None)
    except BrokerUnavailable as reason:
        broker_ledger.missing["docker"] = str(reason)
        pytest.skip(str(reason))
    with owner(OWNER, "docker", "1") as process:
        broker = started(process)
        name = Path(broker["directory"]).name
        assert containers(name)
        process.send_signal(ending)
        process.wait(DEADLINE_S)
    eventually(lambda: not containers(name), "the container is still there")
    assert_nothing_left(broker)


def containers(guard: str) -> list[str]:
    from testcontainers.core.docker_client import DockerClient

    with contextlib.closing(DockerClient().client) as daemon:
        found = daemon.containers.list(all=True, filters={"label": f"{LABEL}={guard}"})
        return [container.id for container in found]


def test_ended_broker_is_reported_with_its_log() -> None:
    with obtain_broker("jvm", report=lambda _: None) as broker:
        broker.check_running()
        broker.node(1).kill()
        with pytest.raises(BrokerUnavailable, match=r"ended with status -9:\n.*\S"):
            broker.check_running()


def test_taken_port_is_named() -> None:
    [port] = free_ports(1)
    broker = JvmBroker(port=port, report=lambda _: None)
    taken = pytest.raises(BrokerUnavailable, match=f"port {port} .* is taken")
    with socket.create_server((LOOPBACK, port)), taken:
        broker.start()


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in Maven's place, and an empty cache in that of the user's."""

    def replace(script: str) -> Path:
        monkeypatch.setenv("KVLANE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        stand_in = tmp_path / "mvn"
        stand_in.write_text(f"#!/bin/sh\n{script}\n")
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    return replace


def test_failing_maven_is_quoted(maven: Callable[[str], Path]) -> None:
    maven("echo '[ERROR] Could not transfer artifact'; exit 1")
    with pytest.raises(BrokerUnavailable, match="Could not transfer artifact"):
        jars()


def test_owner_is_killed_while_maven_fetches(maven: Callable[[str], Path]) -> None:
    where = maven('sleep 100 & echo $! > "$(dirname "$0")/child"; wait')
    with owner("from kvlane.streams.brokers.jvm_artifacts import jars\njars(print)") as process:
        cache = where / "cache"
        eventually((where / "child").exists, "Maven was not started")
        process.kill()
    child = int((where / "child").read_text())
    eventually(lambda: not running(child), "what Maven started runs on")
    eventually(lambda: not any(cache.glob("kvlane-*")), "Maven's output is still there")


@pytest.mark.slow
def test_two_processes_prepare_the_first_start_at_once(maven: Callable[[str], Path]) -> None:
    fetched = prepare(lambda _: None).parent / jars().name
    where = maven(
        "for argument; do case $argument in -DoutputDirectory=*) out=${argument#*=};; esac; done\n"
        f'echo run >> "$(dirname "$0")/runs"; cp -r "{fetched}" "$out"'
    )
    with owner(OWNER, "jvm", "1") as first, owner(OWNER, "jvm", "1") as second:
        brokers = [started(first), started(second)]
        assert all(listening(server) for broker in brokers for server in broker["servers"])
    assert (where / "runs").read_text() == "run\n"
    assert not list((where / "cache").glob("kvlane-*"))
    for broker in brokers:
        assert_nothing_left(broker)
