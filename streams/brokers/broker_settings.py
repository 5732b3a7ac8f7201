"""Settings of the brokers that kvlane starts itself, for tests, demos and one machine.

Not for production: a small broker that starts, detects lost members and deletes old data quickly.
Every value that differs from Kafka's default has its reason next to it.
"""

from __future__ import annotations

SMALL_BROKER: dict[str, str] = {
    # Topics are made by kvlane, with the partitions and retention of its table, or not at all.
    "auto.create.topics.enable": "false",
    # 128 MiB of heap by default, more than half of what the whole broker gets here.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.cleaner.io.buffer.size": "65536",
    # 50 partitions each by default, every one with its files.
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "log.index.size.max.bytes": "1048576",
    "log.segment.bytes": "67108864",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    # Compaction and retention run often and from the start (defaults: 15 s, 5 min, 30 s).
    "log.cleaner.backoff.ms": "1000",
    "log.retention.check.interval.ms": "5000",
    "log.initial.task.delay.ms": "500",
    # After kill -9 a broker can come back only when its old session has ended (default 9 s).
    # Below a second, a busy machine with two cores fences brokers that are merely slow.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # A group waits 3 s for more members by default, and takes 6 s at least to notice a death.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
}


def replication_settings(brokers: int) -> dict[str, str]:
    """Copies on every broker, and one of them may be missing, as in production. For the broker's
    own topics too, and as the default of all others."""
    copies, in_sync = str(brokers), str(max(1, brokers - 1))
    settings = {
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
    }
    if brokers == 1:
        return settings
    return settings | {
        # How long a slow follower holds acknowledgements back (default 30 s).
        "replica.lag.time.max.ms": "3000",
        # Leaders go back to a restarted broker (default: looked at every 300 s).
        "leader.imbalance.check.interval.seconds": "5",
        # A new controller after 4 s instead of 5 when the active one is killed.
        "controller.quorum.fetch.timeout.ms": "1000",
        "controller.quorum.election.timeout.ms": "500",
        "controller.quorum.election.backoff.max.ms": "500",
    }


def to_properties(settings: dict[str, str]) -> str:
    """The settings as the text of a Java properties file."""
    return "".join(f"{name}={value}\n" for name, value in settings.items())


LOG4J_PROPERTIES = """\
status=warn
appender.file.type=File
appender.file.name=FILE
appender.file.fileName=${sys:kafka.logs.dir}/server.log
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=info
rootLogger.appenderRef.file.ref=FILE
"""
"""log4j2 configuration of a broker: everything into one file beside its data."""
