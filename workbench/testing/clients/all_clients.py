"""All clients of a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from workbench.testing.clients.http_clients import HttpClients
from workbench.testing.clients.job_clients import JobClient, JobClients
from workbench.testing.clients.kafka_clients import ExpectedRequest, KafkaClients
from workbench.testing.clients.limit_clients import LimitClients
from workbench.testing.clients.received_answer import AnswerReader
from workbench.testing.clients.stream_readers import StreamReaders
from workbench.testing.simulated_world import SimulatedWorld


class Clients:
    """The clients of one seed; all that they do is drawn before they start."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._kafka = KafkaClients(world)
        self._http = HttpClients(world)
        self._readers = StreamReaders(world, self._kafka)
        self._jobs = JobClients(world)
        self.limited = LimitClients(world)
        """Those of the tenant with limits."""

    @property
    def requests(self) -> Mapping[str, ExpectedRequest]:
        """The requests that were published on Kafka, by id."""
        return self._kafka.requests

    @property
    def readers(self) -> Sequence[AnswerReader]:
        """The clients that read answers."""
        return [*self._http.clients, *self._readers.readers]

    @property
    def http_readers(self) -> Sequence[AnswerReader]:
        """Those over HTTP."""
        return self._http.clients

    @property
    def jobs(self) -> Sequence[JobClient]:
        """The clients of batch jobs."""
        return self._jobs.clients

    def start(self) -> asyncio.Task[None]:
        """Start all; the task ends when everything is published."""
        publishing = self._kafka.start()
        self._http.start()
        self._readers.start()
        self._jobs.start()
        self.limited.start()
        return publishing
