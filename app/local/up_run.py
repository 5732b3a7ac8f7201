"""The run of `kvlane up`: a broker and one of each process on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from kvlane.app.local.data_folder import CannotStart, DataFolder, rotate_logs
from kvlane.app.local.deployment import (
    PORT_FIELDS,
    STATUS_PORT_FIELD,
    DeploymentPart,
    ProcessDeployment,
    assign_ports,
    count_workers,
    deployment_parts,
    part_url,
)
from kvlane.app.local.processes import READY_POLL_S, HttpAnswer, http_get
from kvlane.app.local.supervisor import BrokerSupervisor, ProcessSupervisor
from kvlane.app.local.worker_observer import WorkerObserver
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings, variable_name
from kvlane.streams.brokers.broker import LOOPBACK, ReportLine
from kvlane.streams.brokers.broker_factory import Broker, BrokerChoice, KeptData, obtain_broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka import provision

PORT_RELEASE_S = 3.0
"""Time for a port to become free: the processes of a killed deployment end within it."""
LATE_REPORT_S = 30.0
"""A start that takes longer reports the missing processes, at this interval."""
LOG_ROTATION_S = 10.0


class UpOptions(NamedTuple):
    """Options of the command line; `port` and `data` are None unless given."""

    kind: BrokerChoice
    workers: int
    prefill_workers: int
    port: int | None
    data: Path | None
    ephemeral: bool

    @property
    def needs_own_broker(self) -> bool:
        return self.port is not None or self.data is not None or self.ephemeral


def run_up(settings: Settings, options: UpOptions, default_data: Path, report: ReportLine) -> None:
    """Raises CannotStart, BrokerUnavailable, TopicMismatch, SettingsError."""
    settings.require_authentication()
    if options.prefill_workers and settings.engine != "simulated":
        raise CannotStart(
            "--prefill-workers needs the engine simulated, and KVLANE_ENGINE is "
            f"{settings.engine}: start each worker by itself, with its KVLANE_WORKER_ROLE "
            "and the address of its engine"
        )
    settings, kind = choose_broker(settings, options, report)
    is_own = kind != "env"
    with ExitStack() as cleanup:
        folder: DataFolder | None = None
        kept: KeptData | None = None
        if is_own and not options.ephemeral:
            folder = DataFolder(options.data or default_data)
            cleanup.callback(folder.close)
            folder.open()
            kept = folder.storage
            if kind == "auto" and folder.broker_kind in ("jvm", "docker"):
                kind = folder.broker_kind  # type: ignore[assignment]
        check_ports(settings, (options.port or 0) if is_own else 0)
        servers, port = settings.bootstrap_servers, options.port or 0
        broker = obtain_broker(kind, bootstrap_servers=servers, port=port, kept=kept, report=report)
        cleanup.callback(broker.stop)
        if broker.kind == "memory":
            raise CannotStart("a log in memory is for one process only: use `kvlane demo`")
        if folder is not None:
            folder.set_broker_kind(broker.kind)
        report(f"broker: {broker.description}")
        parts = deployment_parts(options.workers, options.prefill_workers)
        asyncio.run(_Deployment(settings, parts, broker, folder, report).run())


def choose_broker(
    settings: Settings, options: UpOptions, report: ReportLine
) -> tuple[Settings, BrokerChoice]:
    """The settings and the kind of broker; explicit options win. Raises CannotStart."""
    kind = settings.broker if options.kind == "auto" else options.kind
    if kind == "env" and options.needs_own_broker:
        raise CannotStart(
            "--port, --data and --ephemeral are for a broker that is started here, but --broker "
            "env (or KVLANE_BROKER) uses the given servers: omit one of them"
        )
    if kind == "auto" and settings.bootstrap_servers and not options.needs_own_broker:
        kind = "env"
    if kind != "env" and settings.bootstrap_servers:
        report(
            f"ignoring KVLANE_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: the options start a "
            "broker here"
        )
        settings = settings.model_copy(update={"bootstrap_servers": ""})
    return settings, kind


def check_ports(settings: Settings, broker_port: int, within_s: float = PORT_RELEASE_S) -> None:
    """Raises CannotStart when a port is in use."""
    given = [f for f in (*PORT_FIELDS.values(), STATUS_PORT_FIELD) if getattr(settings, f)]
    wanted = [(settings.http_host, getattr(settings, f), variable_name(f)) for f in given]
    if broker_port:
        wanted.append((LOOPBACK, broker_port, "--port"))
    deadline = time.monotonic() + within_s
    while taken := [w for w in wanted if not _is_free(w[0], w[1])]:
        if time.monotonic() >= deadline:
            named = ", ".join(f"{port} ({name})" for _, port, name in taken)
            raise CannotStart(
                f"ports in use: {named}. Another `kvlane up` may be running; end the process that "
                f"listens (`ss -ltnp`), or change {' and '.join(name for *_, name in taken)}"
            )
        time.sleep(0.1)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True


class _Deployment:
    def __init__(
        self,
        settings: Settings,
        parts: Sequence[DeploymentPart],
        broker: Broker,
        folder: DataFolder | None,
        say: ReportLine,
    ) -> None:
        self._settings = settings.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})
        self._broker = broker
        self._folder = folder
        self._report = say
        self._parts = assign_ports(settings, parts)
        self._workers = [part.name for part in self._parts if part.kind == "worker"]
        self._clock = SystemClock()
        self._ctx = ProcessContext("up", self._clock)
        self._began = self._clock.now()

    async def run(self) -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(asyncio.to_thread, self._broker.stop)
            running = asyncio.create_task(self._run(cleanup))
            waits = (asyncio.ensure_future(ended.wait()), asyncio.ensure_future(self._failure()))
            try:
                await asyncio.wait({running, *waits}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Else the supervisor would restart stopped processes.
                await self._ctx.cancel_tasks()
            if ended.is_set():
                self._report("stopping")
            for task in (running, *waits):
                task.cancel()
            for outcome in await asyncio.gather(running, *waits, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _failure(self) -> None:
        raise await self._ctx.wait_for_failure()

    async def _run(self, cleanup: AsyncExitStack) -> None:
        s = self._settings
        log = open_log(s, "up")
        workers = WorkerObserver(log, self._ctx, s.heartbeat_interval_s)
        try:
            await log.start()
            await provision.create_topics(log, **s.topic_options())
            await workers.start()
            if self._broker.kind == "env" and (alive := await workers.find_alive(self._workers)):
                raise CannotStart(
                    f"{' and '.join(alive)} already run on topics {s.topic_prefix}* of "
                    f"{s.bootstrap_servers}, perhaps by another `kvlane up`. "
                    "Use that deployment, or set another KVLANE_TOPIC_PREFIX"
                )
            parts = self._started(cleanup)
            await parts.start()
            self._ctx.spawn("processes", ProcessSupervisor(parts, self._clock, self._print).watch())
            self._ctx.spawn(
                "broker", BrokerSupervisor(self._broker, self._clock, self._print).watch()
            )
            urls = {part.name: part_url(s, part) for part in self._parts}
            await self._wait_ready(workers, urls)
        finally:
            await workers.close()
            await log.close()
        self._report(self._where(urls))
        await self._bound_logs()

    def _started(self, cleanup: AsyncExitStack) -> ProcessDeployment:
        folder, s = self._folder, self._settings
        guard = (
            ProcessGuard()
            if folder is None
            else ProcessGuard(parent=folder.path, inherited=[folder.storage.lock])
        )
        cleanup.push_async_callback(asyncio.to_thread, guard.close)
        servers = {"bootstrap_servers": s.bootstrap_servers}
        self._logs = guard.directory if folder is None else folder.new_logs()
        parts = ProcessDeployment(self._parts, servers, guard, self._clock, logs=self._logs)
        cleanup.push_async_callback(parts.stop)
        return parts

    async def _wait_ready(self, workers: WorkerObserver, urls: Mapping[str, str]) -> None:
        since = workers.next_epoch()
        self._report(
            "a gateway, a preprocessor, a router, a collector, an indexer and "
            f"{count_workers(self._parts)} are starting; their log files are in {self._logs}"
        )
        late_at = self._clock.now() + LATE_REPORT_S
        while missing := await self._failed_checks(workers.find_ready(since), urls):
            if self._clock.now() > late_at:
                self._report(f"not ready yet: {'; '.join(missing)}")
                late_at = self._clock.now() + LATE_REPORT_S
            await self._clock.sleep(READY_POLL_S)

    async def _failed_checks(self, ready: Collection[str], urls: Mapping[str, str]) -> list[str]:
        """The failed checks, as texts. `ready`: workers; `urls`: addresses by process name."""
        missing = [f"{n} has not registered" for n in self._workers if n not in ready]
        answers = await asyncio.gather(
            *(asyncio.to_thread(http_get, f"{url}/readyz") for url in urls.values())
        )
        for name, answer in zip(urls, answers, strict=True):
            if answer.status != HTTPStatus.OK:
                missing.append(f"{name} {_words(answer)}")
        if not missing:
            models = await asyncio.to_thread(http_get, f"{urls['gateway-1']}/v1/models")
            if models.status == HTTPStatus.OK and not models.body.get("data"):
                missing.append("gateway-1 lists no model")
        return missing

    def _where(self, urls: dict[str, str]) -> str:
        s, gateway = self._settings, urls["gateway-1"]
        data = "deleted at exit" if self._folder is None else str(self._folder.path)
        if self._broker.kind == "env":
            data = "on that Kafka"
        default_prefix = Settings.model_fields["topic_prefix"].default
        own_prefix = [f"export KVLANE_TOPIC_PREFIX={s.topic_prefix}"] * (
            s.topic_prefix != default_prefix
        )
        lines = [
            f"ready after {self._clock.now() - self._began:.1f} s",
            "",
            f"  gateway   {gateway}/v1, model {s.model}",
            f"  indexer   {urls['indexer-1']}",
            f"  Kafka     {s.bootstrap_servers}, topics {s.topic_prefix}*",
            f"  data      {data}",
            "  metrics",
            *(
                f"    {urls[part.name]}/metrics  {part.name}" + f" ({part.role})" * bool(part.role)
                for part in self._parts
            ),
            "",
            f"export KVLANE_BOOTSTRAP_SERVERS={s.bootstrap_servers}",
            *own_prefix,
            f"export OPENAI_BASE_URL={gateway}/v1",
            f"export OPENAI_API_KEY={'none' if s.api_keys_file is None else 'YOUR_KEY'}",
            "kvlane publish --follow 'Hello'",
            "",
            "Ctrl-C stops everything" + ("." if self._folder is None else "; data are kept."),
        ]
        return "\n".join(lines)

    def _print(self, line: str) -> None:
        self._report(f"{time.strftime('%H:%M:%S')}  {line}")

    async def _bound_logs(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(rotate_logs, self._logs)
            await self._clock.sleep(LOG_ROTATION_S)


def _words(answer: HttpAnswer) -> str:
    if not answer.status:
        return "does not listen yet"
    body = answer.body if isinstance(answer.body, dict) else {}
    wrong = [name for name, value in body.items() if value is False and name != "ready"]
    return f"is not ready ({', '.join(wrong) or answer.status})"
