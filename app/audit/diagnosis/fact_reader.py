"""Reader of the facts about a deployment: all readings at the same time, each with a deadline.

Writes nothing, joins no group, and changes nothing at the brokers.
"""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from kvlane.app.access.key_file import KeyFileError, read_key_file
from kvlane.app.audit.diagnosis.facts import (
    Facts,
    FileState,
    FleetSample,
    ProcessAnswer,
    Unread,
    UnreadRecords,
    WorkerEvents,
)
from kvlane.app.audit.diagnosis.process_reader import read_processes
from kvlane.app.audit.fleet.fleet_reader import FleetReader, reading_fleet
from kvlane.app.audit.fleet.fleet_status import TopicSampler, unread_records
from kvlane.app.audit.time_range import MAX_LIFETIME_MS, InvalidTime
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings, SettingsError, variable_name
from kvlane.streams.clock import Clock
from kvlane.streams.errors import BrokerUnavailable, CorrectableError
from kvlane.streams.kafka.broker_state import missing_rights, read_broker_state
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import describe_topics, read_deployment
from kvlane.streams.topics import REQUESTS, AclRule, required_acls

READ_S = 8.0
"""Deadline of the whole: each reading ends then, with or without its answer."""
MAX_REQUEST_TIMEOUT_MS = 1500
"""Time for an answer of a broker, so that the reason of a failure is found before `READ_S`."""
WRONG_PORT = "WrongPort"
"""`Unread.error` of a port with which no connection is possible by these settings."""
_COLLECTOR_GROUP = "collector"
_SECRET_FILES = (
    "api_keys_file", "hash_secret_file", "stream_secret_file", "sasl_password_file",
    "sasl_oauth_token_file", "ssl_keyfile", "ssl_keypassword_file",
)  # fmt: skip

T = TypeVar("T")


class FactReader:
    """Reads the facts of a deployment, once. `pending`: names of the readings that go on."""

    def __init__(self, settings: Settings, clock: Clock, since: str) -> None:
        """`since`: as of `reading_fleet`."""
        timeout_ms = min(settings.request_timeout_ms, MAX_REQUEST_TIMEOUT_MS)
        self._settings = settings.model_copy(update={"request_timeout_ms": timeout_ms})
        self._clock = clock
        self._since = since
        self._until_s = clock.now() + READ_S
        self.pending: set[str] = set()

    async def read(self, roles: Sequence[str], urls: Sequence[str] = (), key: str = "") -> Facts:
        """The facts; a reading that fails is an `Unread`. `roles`: those whose rights are tested;
        `key`: an API key that may read metrics. Raises InvalidTime."""
        settings, log = self._settings, open_log(self._settings, "kvlane-doctor")
        probing = asyncio.create_task(self._within("processes", read_processes(urls, key)))
        facts = Facts(
            settings.bootstrap_servers, settings.lanes, self._fingerprint(), roles,
            files=list(secret_files(settings)),
        )  # fmt: skip
        try:
            failed = await self._within("connection", log.start())
            if isinstance(failed, Unread):
                facts = replace(facts, brokers=failed)
            else:
                facts = replace(facts, **await self._of_log(log, roles))
            answers = await probing
            if isinstance(answers, Unread):
                answers = [ProcessAnswer(url, unmeasured=answers.reason) for url in urls]
            return replace(facts, processes=answers)
        finally:
            probing.cancel()
            await log.close()

    async def _of_log(self, log: KafkaLog, roles: Sequence[str]) -> dict[str, Any]:
        brokers, topics, denied, deployment, fleet = await asyncio.gather(
            self._within("brokers", read_broker_state(log)),
            self._within("topics", describe_topics(log, **self._settings.topic_options())),
            self._within("rights", self._denied(log, roles)),
            self._within("deployment", read_deployment(log)),
            self._within("fleet", self._fleet(log)),
        )
        sample, backlog = (fleet, fleet) if isinstance(fleet, Unread) else fleet
        return {
            "brokers": brokers, "topics": topics, "denied": denied, "deployment": deployment,
            "fleet": sample, "backlog": backlog,
        }  # fmt: skip

    async def _within(self, name: str, reading: Awaitable[T]) -> T | Unread:
        self.pending.add(name)
        try:
            async with asyncio.timeout(max(0.0, self._until_s - self._clock.now())):
                return await reading
        except TimeoutError:
            return Unread(f"not read within {READ_S:g} s: give a shorter --since if there is much")
        except InvalidTime:
            raise
        except CorrectableError as e:
            is_known = isinstance(e, BrokerUnavailable) and e.correction not in (
                "", BrokerUnavailable.correction,
            )  # fmt: skip
            return Unread(str(e), WRONG_PORT if is_known else type(e).__name__, e.correction)
        finally:
            self.pending.discard(name)

    async def _denied(self, log: KafkaLog, roles: Sequence[str]) -> list[AclRule] | Unread:
        rules = required_acls(self._settings.reply_prefixes)
        if not (existing := await log.refresh_topics()):
            return Unread("no topic exists, or these credentials may see none")
        return await missing_rights(log, [r for r in rules if r.role in roles], existing)

    async def _fleet(self, log: KafkaLog) -> tuple[FleetSample, UnreadRecords | Unread]:
        events = WorkerEvents()
        reading = reading_fleet(log, self._clock, self._since, on_applied=events.add)
        async with reading as reader:
            backlog = await self._within("backlog", self._backlog(log, reader))
            sample = FleetSample(
                reader.view, events, reader.now_ms(), self._settings.worker_timeout_s,
                dict(reader.ahead_ms), reader.follower.malformed,
            )  # fmt: skip
        return sample, backlog

    async def _backlog(self, log: KafkaLog, reader: FleetReader) -> UnreadRecords:
        sampler = TopicSampler(log, self._clock)
        await sampler.begin()
        topics = await sampler.sample(reader)
        dead_letters = await sampler.dead_letters(reader.since_ms)
        committed = await log.committed_offsets(REQUESTS, _COLLECTOR_GROUP)
        uncollected: int | None = None
        if committed:
            ends = await log.end_offsets(REQUESTS, range(await log.partitions(REQUESTS)))
            before_ms = reader.now_ms() - MAX_LIFETIME_MS
            _, uncollected = await unread_records(log, REQUESTS, committed, ends, before_ms)
        return UnreadRecords(topics, uncollected, dead_letters)

    def _fingerprint(self) -> str | Unread:
        try:
            return self._settings.block_key_secret().fingerprint
        except SettingsError:
            return Unread("KVLANE_HASH_SECRET is not set here")


def secret_files(settings: Settings) -> Iterator[FileState]:
    """The files with secrets that these settings name."""
    for name in _SECRET_FILES:
        path = getattr(settings, name)
        if path is None:
            continue
        setting, keys = variable_name(name), None
        try:
            if name == "api_keys_file":
                now_s = time.time()
                keys = sum(key.status(now_s) == "valid" for key in read_key_file(path).keys)
            mode = stat.S_IMODE(path.stat().st_mode)
        except (OSError, KeyFileError) as e:
            yield FileState(str(path), setting, problem=str(e))
        else:
            yield FileState(str(path), setting, mode, keys=keys)
