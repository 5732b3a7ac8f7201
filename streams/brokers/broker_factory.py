"""The entry point for obtaining a broker, for tests, `kvlane up` and `kvlane demo`.

The order: given servers; Docker; a local JVM, which comes before Docker with data to keep; the log
in memory. A kind that is named is used, or fails with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlane.streams.brokers.broker import (
    Broker,
    BrokerChoice,
    ExternalBroker,
    KeptData,
    Kind,
    NoBroker,
    PortTaken,
    ReportLine,
)
from kvlane.streams.brokers.docker import DockerBroker
from kvlane.streams.brokers.jvm import JvmBroker, JvmNode
from kvlane.streams.brokers.jvm_artifacts import jars, java_tool
from kvlane.streams.errors import NoLocalBroker

__all__ = [
    "Broker",
    "BrokerChoice",
    "JvmBroker",
    "JvmNode",
    "KeptData",
    "Kind",
    "ReportLine",
    "jars",
    "java_tool",
    "obtain_broker",
]


def obtain_broker(
    kind: BrokerChoice,
    *,
    bootstrap_servers: str = "",
    brokers: int = 1,
    port: int = 0,
    full_jit: bool = False,
    kept: KeptData | None = None,
    report: ReportLine,
) -> Broker:
    """A running broker; it ends with its `with` block, `stop()` or this process.

    `bootstrap_servers`: given ones; "env" needs them. `brokers` above 1: a cluster in JVMs. `port`:
    of the first broker, 0: a free one. `report` gets lines of progress. Raises NoLocalBroker when
    the kind cannot be had, BrokerUnavailable when given servers do not answer.
    """
    ways: dict[Kind, Callable[[], Broker]] = {
        "env": lambda: ExternalBroker(bootstrap_servers),
        "docker": lambda: _one_container(brokers, port, kept, full_jit=full_jit, report=report),
        "jvm": lambda: JvmBroker(
            brokers=brokers, port=port, full_jit=full_jit, kept=kept, report=report
        ),
        "memory": NoBroker,
    }
    if kind != "auto":
        return ways[kind]().start()
    if bootstrap_servers:
        return ways["env"]().start()
    local: tuple[Kind, ...] = ("docker", "jvm") if kept is None else ("jvm", "docker")
    reasons = []
    for candidate in local:
        try:
            return ways[candidate]().start()
        except PortTaken:
            raise
        except NoLocalBroker as reason:
            reasons.append(f"not {candidate}: {reason}")
    for line in reasons:
        report(line)
    report("no Kafka can be had here: the log is kept in memory, in this process alone")
    return ways["memory"]().start()


def _one_container(
    brokers: int, port: int, kept: KeptData | None, *, full_jit: bool, report: ReportLine
) -> DockerBroker:
    if brokers > 1:
        raise NoLocalBroker("a cluster runs in local JVMs only")
    return DockerBroker(port=port, full_jit=full_jit, kept=kept, report=report)
