"""The topic table: names, keys, partitions, retention, record types, writers and readers.

This table is the only source for the code and for `kvlane topics create|describe|acls`. Names here
are short; the deployment's prefix (`KVLANE_TOPIC_PREFIX`, default `kvlane.`) is added where the log
is opened.

`requests`, `ledger` and `responses` have the same number of partitions and the same key: a request
is in one *lane*, the same partition of all three, so the owner of a lane can answer every request
in it. `assignments` and `kv-events` are keyed by the worker that they are for or from.

Brokers compress the `ledger`, regardless of its writers: it is kept for a day, and every router
reads all of it. A decision among 64 workers is 4.4 kB, in lz4 1.3 kB; in zstd 1.0, but every reader
would need 13 us per batch instead of 4. In total a request takes a quarter of the bytes there, with
no measurable CPU cost in brokers and routers (noise: 2 ms a request, of each, on a busy machine).
Other topics are not compressed, since most batches are single records: for tokens and block keys,
the content of `requests`, `assignments` and `kv-events`, lz4 saves nothing (zstd a third and
nothing, at 50 us a prompt), and for a Chunk with one token zstd saves 53 of 232 bytes, at 13 us to
write and 11 to read.

Writers and readers are roles. A process has the role of its name (`router`, `worker` …); `client`
is any program that publishes prompts and reads answers, `operator` a person with the command line.
A client that publishes tokenised requests needs the rights of a gateway.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from aiokafka.partitioner import murmur2

PROMPTS = "prompts"
REQUESTS = "requests"
LEDGER = "ledger"
RESPONSES = "responses"
ASSIGNMENTS = "assignments"
KV_EVENTS = "kv-events"
CAPACITY = "capacity"
REGISTRY = "registry"
ARTIFACTS = "artifacts"
SNAPSHOTS = "snapshots"
DEAD_LETTERS = "dead-letters"

PER_LANE = -1
"""Stands for "as many as there are lanes" in the table."""

DEFAULT_LANES = 8
"""Lanes of a deployment that sets no number (`KVLANE_LANES`): as many routers can share the work.

Each batch and each response is divided among them. On two cores, 8 instead of 32: a token takes 93
instead of 118 us of gateway and worker (1 a step), and 32 instead of 41 us of the broker; a router
at 800 requests/s answers in 10 to 16 instead of 151 ms (p50). Little is gained below: an idle
router takes 8.8 % of a core with 4, 9.5 % with 8, 10.5 % with 16 (64 workers, without fetch
sessions).
"""

_HOUR_MS = 3_600_000
MAX_RECORD_BYTES = 8 * 1024 * 1024
MAX_UNCOMPRESSED_BYTES = 2 * MAX_RECORD_BYTES
"""Size limit of a batch after decompression, which brokers do not bound. The client holds one such
batch at a time per partition, and 16 MiB decompress in 10 to 20 ms."""


class Topic(NamedTuple):
    """One row: shape and rules of a topic. No `retention_ms`: compaction keeps its records."""

    name: str
    key: str
    partitions: int
    retention_ms: int | None
    format: Literal["JSON", "msgpack", "bytes"]
    records: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    compression: Literal["lz4"] | None = None
    """Compression by the broker; None: as the producer sent it."""

    def config(self, min_insync: int) -> dict[str, str]:
        """Broker settings of the topic.

        All topics take the broker's append time: ages and deadlines must not depend on a writer's
        clock. A segment is at most a quarter of the retention, since only whole closed segments
        are deleted or compacted.
        """
        shared = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(MAX_RECORD_BYTES),
            "min.insync.replicas": str(min_insync),
            # A leader that was not in sync would lose what was acknowledged.
            "unclean.leader.election.enable": "false",
        }
        if self.compression is not None:
            shared["compression.type"] = self.compression
        if self.retention_ms is None:
            day_ms = 24 * _HOUR_MS
            return shared | {
                "cleanup.policy": "compact",
                "min.compaction.lag.ms": str(day_ms),
                "delete.retention.ms": str(day_ms),
                "segment.ms": str(day_ms // 4),
            }
        return shared | {
            "cleanup.policy": "delete",
            "retention.ms": str(self.retention_ms),
            # Retention by time alone: unfinished work stays readable, however much is written.
            "retention.bytes": "-1",
            "segment.ms": str(self.retention_ms // 4),
        }


TOPICS: tuple[Topic, ...] = (
    Topic(
        PROMPTS, "request id", 16, 24 * _HOUR_MS, "JSON",
        ("Prompt",),
        ("client",), ("preprocessor",),
    ),
    Topic(
        REQUESTS, "request id", PER_LANE, _HOUR_MS, "msgpack",
        ("Request", "Cancel", "Refused"),
        ("gateway", "preprocessor"), ("router", "operator"),
    ),
    Topic(
        LEDGER, "request id", PER_LANE, 24 * _HOUR_MS, "msgpack",
        ("Assigned", "Started", "PrefillDone", "Finished", "Fencing", "Ended"),
        ("router", "worker"), ("router", "operator"), "lz4",
    ),
    Topic(
        RESPONSES, "request id", PER_LANE, _HOUR_MS, "JSON",
        ("Chunk", "Fence", "End"),
        ("worker", "router"), ("gateway", "client", "router", "operator"),
    ),
    Topic(
        ASSIGNMENTS, "worker id", 16, _HOUR_MS, "msgpack",
        ("Assignment", "CancelRun", "Lost"),
        ("router",), ("worker",),
    ),
    Topic(
        KV_EVENTS, "worker id", 8, 24 * _HOUR_MS, "msgpack",
        ("Blocks", "Heartbeat", "Lost", "Probe"),
        ("worker", "router"), ("router", "indexer", "operator"),
    ),
    Topic(
        CAPACITY, "router", 1, _HOUR_MS, "msgpack",
        ("RouterCapacity",),
        ("router",), ("preprocessor", "operator"),
    ),
    Topic(
        REGISTRY, "entity", 1, None, "msgpack",
        ("WorkerCard", "ModelCard", "SnapshotPointer", "Deployment", "Skip", "Tombstone"),
        ("worker", "router", "indexer", "operator"),
        ("gateway", "preprocessor", "router", "worker", "indexer", "operator"),
    ),
    Topic(
        ARTIFACTS, "sha256/part", 4, None, "bytes",
        (),
        ("worker",), ("gateway", "preprocessor", "worker"),
    ),
    Topic(
        SNAPSHOTS, "view/part", 8, 48 * _HOUR_MS, "bytes",
        (),
        ("indexer",), ("router", "indexer"),
    ),
    Topic(
        DEAD_LETTERS, "as it was", 4, 7 * 24 * _HOUR_MS, "bytes",
        (),
        ("preprocessor", "router"), ("operator",),
    ),
)  # fmt: skip

TOPICS_BY_NAME = {topic.name: topic for topic in TOPICS}

GROUPS = {PROMPTS: "preprocessor", REQUESTS: "router", KV_EVENTS: "indexer"}
"""The consumer group of a topic, named after the role; the deployment's prefix is added. The group
of the indexers only shares the writing of snapshots; all other reads use no group."""


class AclRule(NamedTuple):
    """An ACL rule of a role. `name` is a topic or a group, "" all of them."""

    role: str
    operation: Literal["All", "Describe", "Read", "Write"]
    resource: Literal["topic", "group"]
    name: str


def required_acls() -> list[AclRule]:
    """The complete ACL rules of a deployment, by role.

    Each process compares all topics with the deployment at start, clients do not.
    """
    roles = sorted({role for t in TOPICS for role in (*t.writers, *t.readers)})
    found = []
    for role in roles:
        if role == "operator":
            found += [AclRule(role, "All", "topic", ""), AclRule(role, "All", "group", "")]
            continue
        if role != "client":
            found.append(AclRule(role, "Describe", "topic", ""))
        found += [AclRule(role, "Write", "topic", t.name) for t in TOPICS if role in t.writers]
        found += [AclRule(role, "Read", "topic", t.name) for t in TOPICS if role in t.readers]
        found += [AclRule(role, "Read", "group", g) for g in GROUPS.values() if g == role]
    return found


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: murmur2 with the sign bit cleared, as the Java client does it."""
    return int(murmur2(key) & 0x7FFFFFFF) % partitions


def lane_of(request_id: str, lanes: int) -> int:
    """The lane of a request: its partition in requests, ledger and responses."""
    return partition_of(request_id.encode(), lanes)
