"""Tests of `kvlane up` piece by piece: restarts, its folder, and its refusals."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from kvlane.app import cli
from kvlane.app.local.data_folder import MAX_LOG_BYTES, CannotStart, DataFolder, rotate_logs
from kvlane.app.local.deployment import assign_ports, count_workers, deployment_parts, part_settings
from kvlane.app.local.supervisor import (
    MAX_RESTART_PAUSE_S,
    STABLE_RUN_S,
    BrokerSupervisor,
    ProcessSupervisor,
    RestartBackoff,
)
from kvlane.app.local.up_run import UpOptions, check_ports, choose_broker, run_up
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker import Broker, KeptData
from kvlane.streams.brokers.broker_factory import Kind
from kvlane.streams.brokers.docker import DockerBroker, volume
from kvlane.streams.brokers.watchdog import MARK, NAME
from kvlane.streams.errors import BrokerUnavailable
from tests.harness.memory_world import MemoryWorld, scenario_test

ASKED = UpOptions("auto", 2, 0, None, None, ephemeral=False)


class Children:
    """Processes of which a test says which end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead: dict[str, int] = {}
        self.starts: list[tuple[float, str]] = []
        self.world: MemoryWorld | None = None
        self.dies_at_once = False

    def take_exited(self) -> Mapping[str, int]:
        dead, self.dead = self.dead, {}
        return dead

    def launch(self, name: str) -> None:
        assert self.world is not None
        self.starts.append((self.world.clock.now(), name))
        if self.dies_at_once:
            self.dead[name] = 1

    def output_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def supervised(
    world: MemoryWorld, folder: Path = Path("/nonexistent")
) -> tuple[Children, list[str]]:
    children, lines = Children(folder), list[str]()
    children.world = world
    world.spawn(ProcessSupervisor(children, world.clock, lines.append).watch())
    return children, lines


@scenario_test
async def test_killed_process_is_restarted_and_both_are_reported(world: MemoryWorld) -> None:
    children, lines = supervised(world)
    await world.sleep(1)
    children.dead["worker-1"] = -9
    await world.sleep(2)
    assert [name for _, name in children.starts] == ["worker-1"]
    assert lines == [
        "worker-1 was killed by SIGKILL; started again in 0.5 s",
        "worker-1 is started again",
    ]


@scenario_test
async def test_process_that_fails_at_start_is_restarted_with_growing_delays(
    world: MemoryWorld,
) -> None:
    children, lines = supervised(world)
    children.dies_at_once = True
    children.dead["worker-1"] = 1
    await world.sleep(600)
    pauses = [b - a for (a, _), (b, _) in zip(children.starts, children.starts[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert MAX_RESTART_PAUSE_S <= pauses[-1] <= MAX_RESTART_PAUSE_S + 1
    assert 20 < len(children.starts) < 40
    assert "worker-1 ended with code 1, 3 times in a row; started again in 2 s" in lines


def test_long_run_resets_the_restart_delay() -> None:
    backoff = RestartBackoff()
    pauses = []
    for now in (0.0, 1.0, 2.0):
        pauses.append(backoff.exited(now))
        backoff.started(now)
    assert pauses == [0.5, 1.0, 2.0]
    assert backoff.exited(2.0 + STABLE_RUN_S) == 0.5


def test_last_output_of_an_ended_process_is_shown(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("starts\nfails: no folder\nwhat to do: name one\n")
    children, lines = Children(tmp_path), list[str]()
    children.dead["worker-1"] = 1

    class Clock:
        def now(self) -> float:
            return 0.0

    ProcessSupervisor(children, Clock(), lines.append).check_once()  # type: ignore[arg-type]
    assert lines[1:] == ["  fails: no folder", "  what to do: name one"]


class Patient(Broker):
    """A broker that does not answer before its third restart."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.restarts = 0

    def start(self) -> Self:
        return self

    def stop(self) -> None:
        pass

    def check_running(self) -> None:
        if self.restarts < 3:
            raise BrokerUnavailable("broker 1 ended with status -9:\nlong\nlog")

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts < 3:
            raise BrokerUnavailable("port 9092 is taken")


async def watched(broker: Patient) -> list[str]:
    """The lines of a supervisor until the broker answers."""
    lines = list[str]()

    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

        async def sleep(self, seconds: float) -> None:
            self.time += seconds
            if broker.restarts >= 3:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await BrokerSupervisor(broker, Clock(), lines.append).watch()  # type: ignore[arg-type]
    return lines


async def test_dead_broker_is_restarted_until_it_answers() -> None:
    assert await watched(Patient("jvm")) == [
        "the broker is gone, and is started again on its data: broker 1 ended with status -9",
        "the broker does not start: port 9092 is taken; trying again",
        "the broker does not start: port 9092 is taken; trying again",
        "the broker is back after 3.5 s",
    ]


async def test_dead_broker_of_others_is_awaited() -> None:
    assert await watched(Patient("env")) == [
        "the broker is gone, and is waited for; nothing is ended: broker 1 ended with status -9",
        "the broker is back after 3.0 s",
    ]


def test_folder_in_use_is_refused_with_the_process(tmp_path: Path) -> None:
    first, second = DataFolder(tmp_path), DataFolder(tmp_path)
    first.open()
    with pytest.raises(CannotStart, match=f"process {os.getpid()}.* uses {tmp_path}"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotStart, match="--data"):
        DataFolder(tmp_path / "file" / "data").open()


def test_processes_left_by_a_killed_up_are_ended_before_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / f"{NAME}0123"
    left.mkdir()
    with subprocess.Popen(
        [sys.executable, "-X", f"{MARK}{left}", "-c", "import time; time.sleep(60)"],
        start_new_session=True,
    ) as process:
        folder = DataFolder(tmp_path)
        folder.open()
        folder.close()
        assert process.wait(10) == -9
    assert not left.exists()


def test_log_files_of_the_previous_run_are_kept_once(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    for life in ("first", "second"):
        (folder.new_logs() / "router-1.log").write_text(life)
    logs = folder.new_logs()
    assert [p.name for p in logs.iterdir()] == ["router-1.log.1"]
    assert (logs / "router-1.log.1").read_text() == "second"


def test_log_file_is_bounded_while_its_process_appends(tmp_path: Path) -> None:
    log = tmp_path / "router-1.log"
    with log.open("ab") as writer:
        writer.truncate(MAX_LOG_BYTES + 1)
        rotate_logs(tmp_path)
        writer.write(b"more")
    assert log.read_bytes() == b"more"
    assert (tmp_path / "router-1.log.1").stat().st_size == MAX_LOG_BYTES + 1


GIVEN = "10.0.0.1:9092"


def decided(wish: UpOptions, **settings: Any) -> tuple[str, str, list[str]]:
    lines: list[str] = []
    found, kind = choose_broker(Settings(**settings), wish, lines.append)
    return kind, found.bootstrap_servers, lines


def test_given_servers_are_used() -> None:
    assert decided(ASKED, bootstrap_servers=GIVEN) == ("env", GIVEN, [])


@pytest.mark.parametrize(
    "more", [{"port": 9092}, {"port": 0}, {"data": Path("x")}, {"ephemeral": True}]
)
def test_command_line_precedes_the_variable(more: dict[str, Any]) -> None:
    kind, servers, [line] = decided(ASKED._replace(**more), bootstrap_servers=GIVEN)
    assert (kind, servers) == ("auto", "")
    assert f"ignoring KVLANE_BOOTSTRAP_SERVERS={GIVEN}" in line


def test_port_for_given_servers_is_refused() -> None:
    with pytest.raises(CannotStart, match="--port"):
        decided(ASKED._replace(kind="env", port=9092), bootstrap_servers=GIVEN)


def test_taken_ports_are_named_with_their_variables() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(indexer_port=port, http_port=0)
        with pytest.raises(CannotStart, match=rf"{port} \(KVLANE_INDEXER_PORT\)"):
            check_ports(settings, 0, 0.0)
        with pytest.raises(CannotStart, match=rf"{port} \(--port\)"):
            check_ports(Settings(indexer_port=0, http_port=0), port, 0.0)


def test_every_process_listens_on_a_port_of_its_own() -> None:
    settings = Settings(http_port=8000, indexer_port=0, status_port=9100)
    parts = assign_ports(settings, deployment_parts(2))
    own = {part.name: dict(part.settings) for part in parts}
    assert len({*chain(*(settings.values() for settings in own.values()))}) == len(parts)
    assert own["gateway-1"] == {"http_port": 8000}
    assert own["router-1"] == {"status_port": 9100}
    assert [*own["worker-1"]] == [*own["preprocessor-1"]] == ["status_port"]
    assert [*own["indexer-1"]] == ["indexer_port"]


def test_prefill_workers_are_the_first_ones_and_the_others_decode() -> None:
    parts = deployment_parts(3, prefill_workers=1)
    roles = [(part.name, part.role) for part in parts if part.kind == "worker"]
    assert roles == [("worker-1", "prefill"), ("worker-2", "decode"), ("worker-3", "decode")]
    assert {part.role for part in parts if part.kind != "worker"} == {None}
    assert count_workers(parts) == "3 workers (1 prefill, 2 decode)"
    assert {part.role for part in deployment_parts(3)} == {None}
    assert count_workers(deployment_parts(1)) == "1 worker"


def test_roles_are_refused_for_engines_that_need_an_address_each(tmp_path: Path) -> None:
    options = ASKED._replace(prefill_workers=1)
    with pytest.raises(CannotStart, match="KVLANE_ENGINE is echo"):
        run_up(Settings(engine="echo"), options, tmp_path, print)


def test_role_of_a_worker_is_a_setting_of_its_process_alone() -> None:
    prefill, decode, *others = map(part_settings, deployment_parts(2, prefill_workers=1))
    assert (prefill["worker_role"], decode["worker_role"]) == ("prefill", "decode")
    assert not any("worker_role" in settings for settings in others)


def test_container_gets_the_port_and_a_volume_that_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Container:
        def __init__(self, image: str, **_: Any) -> None:
            self.ports: dict[str, Any] = {}
            self.volumes: dict[str, tuple[str, str]] = {}
            self.env: dict[str, str] = {}
            made.append(self)

        def with_env(self, name: str, value: str) -> None:
            self.env[name] = value

        def with_volume_mapping(self, source: str, target: str, mode: str) -> None:
            self.volumes[source] = target, mode

        def with_command(self, command: list[str]) -> None:
            pass

        def with_exposed_ports(self, port: int) -> None:
            self.ports[str(port)] = None

        def get_docker_client(self) -> Any:
            from testcontainers.core.config import ConnectionMode

            class Daemon:
                def get_connection_mode(self) -> ConnectionMode:
                    return ConnectionMode.docker_host

                def host(self) -> str:
                    return "localhost"

            return Daemon()

        def start(self) -> None:
            raise OSError("no daemon in this test")

    monkeypatch.setattr("testcontainers.core.container.DockerContainer", Container)
    monkeypatch.setattr("kvlane.streams.brokers.docker.find_image", lambda _: "image")
    with (tmp_path / "lock").open("w") as lock:
        kept = KeptData(tmp_path, lock.fileno())
        with pytest.raises(BrokerUnavailable, match="no daemon in this test"):
            DockerBroker(port=9092, kept=kept, report=lambda _: None).start()
    [container] = made
    assert container.ports == {"9092": ("127.0.0.1", 9092)}
    assert container.volumes == {volume(tmp_path): ("/var/lib/kafka/data", "rw")}
    assert container.env["KAFKA_LOG_DIRS"] == "/var/lib/kafka/data"


def test_log_in_memory_is_no_choice_of_up() -> None:
    refused = CliRunner().invoke(cli.app, ("up", "--broker", "memory"))
    assert refused.exit_code == 2
    assert "'memory' is not one of 'auto', 'env', 'docker', 'jvm'" in " ".join(
        refused.output.replace("\u2502", " ").split()
    )
