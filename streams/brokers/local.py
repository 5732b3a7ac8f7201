"""Getting a broker: the one entry for tests, `kvlane up` and `kvlane demo`.

    with obtain("auto", report=print) as broker:
        connect(broker.bootstrap_servers)

Tried in this order: servers that are given; Docker; a local JVM; the log in memory, with a line
that says so. A kind that was asked for by name is used, or fails with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

from streams.brokers.choice import Broker, GivenBroker, Kind, MemoryBroker, Report
from streams.brokers.docker import DockerBroker
from streams.brokers.java import jars, java_tool
from streams.brokers.jvm import JvmBroker
from streams.brokers.jvmnode import Node
from streams.errors import BrokerUnavailable

__all__ = [
    "Broker",
    "JvmBroker",
    "Kind",
    "Node",
    "Report",
    "jars",
    "java_tool",
    "obtain",
]


@overload
def obtain(
    kind: Literal["jvm"],
    *,
    bootstrap_servers: str = "",
    brokers: int = 1,
    port: int = 0,
    full_jit: bool = False,
    report: Report,
) -> JvmBroker: ...
@overload
def obtain(
    kind: Literal["auto"] | Kind,
    *,
    bootstrap_servers: str = "",
    brokers: int = 1,
    port: int = 0,
    full_jit: bool = False,
    report: Report,
) -> Broker: ...
def obtain(
    kind: Literal["auto"] | Kind,
    *,
    bootstrap_servers: str = "",
    brokers: int = 1,
    port: int = 0,
    full_jit: bool = False,
    report: Report,
) -> Broker:
    """A broker that runs and answers; it ends with its `with` block, `stop()` or this process.

    `bootstrap_servers` are the given ones, if any: "env" needs them and "auto" takes them.
    `brokers` above 1 asks for a cluster, which runs in JVMs. `port` is for the first JVM broker, 0
    for a free one. `full_jit` is for measurements. `report` takes what a waiting person wants to
    know, one line at a time.

    Raises BrokerUnavailable when the kind asked for cannot be had; given servers that do not
    answer are an error with "auto" too.
    """
    ways: dict[Kind, Callable[[], Broker]] = {
        "env": lambda: GivenBroker(bootstrap_servers),
        "docker": lambda: _one_container(brokers, full_jit=full_jit, report=report),
        "jvm": lambda: JvmBroker(brokers=brokers, port=port, full_jit=full_jit, report=report),
        "memory": MemoryBroker,
    }
    if kind != "auto":
        return ways[kind]().start()
    if bootstrap_servers:
        return ways["env"]().start()
    local: tuple[Kind, ...] = ("docker", "jvm")
    for candidate in local:
        try:
            return ways[candidate]().start()
        except BrokerUnavailable as reason:
            report(f"not {candidate}: {reason}")
    report("no Kafka can be had here: the log is kept in memory, in this process alone")
    return ways["memory"]().start()


def _one_container(brokers: int, *, full_jit: bool, report: Report) -> DockerBroker:
    if brokers > 1:
        raise BrokerUnavailable("a cluster runs in local JVMs only")
    return DockerBroker(full_jit=full_jit, report=report)
