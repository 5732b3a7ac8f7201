"""Which topics there are, what lies on them, who writes and who reads them.

This table is the one source for the code and for `kvlane topics create|describe|acls`. Names here
are short; the deployment's prefix (`KVLANE_TOPIC_PREFIX`, default `kvlane.`) is added where the log
is opened.

`requests`, `ledger` and `responses` have the same number of partitions and the same key: a request
lives in one *lane*, the same partition of all three, so whoever owns a lane can answer for every
request in it. `assignments` and `kv-events` are keyed by the worker that they are for or from.

Brokers compress the `ledger`, whatever its writers do: it is kept for a day, and every router reads
all of it. A decision among 64 workers is 4.4 kB, and 1.3 in lz4; with zstd 1.0, but every reader
would take 13 us for each batch instead of 4. In all a request takes a quarter of the bytes there,
and neither broker nor router any CPU that could be told from noise (2 ms a request, of each, on
a busy machine). Nothing else is compressed, since most batches are single records: of tokens and
block keys, which `requests`, `assignments` and `kv-events` consist of, lz4 saves nothing (zstd a
third and nothing, for 50 us a prompt), and of a Chunk with one token zstd saves 53 of 232 bytes,
for 13 us to write and 11 to read.

Writers and readers are roles. A process has the role of its name (`router`, `worker` …); `client`
is any program that publishes prompts and reads answers, `operator` a person with the command line.
A client that publishes requests that are tokenised already needs the rights of a gateway.
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
REGISTRY = "registry"
ARTIFACTS = "artifacts"
SNAPSHOTS = "snapshots"
DEAD_LETTERS = "dead-letters"

LANES = -1
"""Stands for "as many as there are lanes" in the table."""

_HOUR_MS = 3_600_000
MAX_RECORD_BYTES = 8 * 1024 * 1024


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
    """What brokers store its batches in; None: as they come."""

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
            "segment.ms": str(self.retention_ms // 4),
        }


TOPICS: tuple[Topic, ...] = (
    Topic(
        PROMPTS, "request id", 16, 24 * _HOUR_MS, "JSON",
        ("Prompt",),
        ("client",), ("preprocessor",),
    ),
    Topic(
        REQUESTS, "request id", LANES, _HOUR_MS, "msgpack",
        ("Request", "Cancel", "Refused"),
        ("gateway", "preprocessor"), ("router", "operator"),
    ),
    Topic(
        LEDGER, "request id", LANES, 24 * _HOUR_MS, "msgpack",
        ("Assigned", "Started", "PrefillDone", "Finished", "Fencing", "Ended"),
        ("router", "worker"), ("router", "operator"), "lz4",
    ),
    Topic(
        RESPONSES, "request id", LANES, _HOUR_MS, "JSON",
        ("Chunk", "Fence", "End"),
        ("worker", "router"), ("gateway", "client", "router", "operator"),
    ),
    Topic(
        ASSIGNMENTS, "worker id", 64, _HOUR_MS, "msgpack",
        ("Assignment", "CancelRun", "Lost"),
        ("router",), ("worker",),
    ),
    Topic(
        KV_EVENTS, "worker id", 32, 24 * _HOUR_MS, "msgpack",
        ("Blocks", "Heartbeat", "Lost", "Probe"),
        ("worker", "router"), ("router", "indexer", "operator"),
    ),
    Topic(
        REGISTRY, "entity", 1, None, "msgpack",
        ("WorkerCard", "ModelCard", "SnapshotPointer", "Deployment", "Tombstone"),
        ("worker", "router", "indexer", "operator"),
        ("gateway", "preprocessor", "router", "worker", "indexer", "operator"),
    ),
    Topic(
        ARTIFACTS, "sha256/part", 4, None, "bytes",
        (),
        ("worker",), ("gateway", "preprocessor", "worker"),
    ),
    Topic(
        SNAPSHOTS, "fold/part", 8, 48 * _HOUR_MS, "bytes",
        (),
        ("indexer",), ("router", "indexer"),
    ),
    Topic(
        DEAD_LETTERS, "as it was", 4, 7 * 24 * _HOUR_MS, "bytes",
        (),
        ("preprocessor", "router"), ("operator",),
    ),
)  # fmt: skip

BY_NAME = {topic.name: topic for topic in TOPICS}

GROUPS = {PROMPTS: "preprocessor", REQUESTS: "router", KV_EVENTS: "indexer"}
"""The consumer group, with the deployment's prefix, that shares a topic; it bears the name of the
role. Indexers share the duty of writing snapshots so; what they read, like everything else, is read
without a group."""


class Right(NamedTuple):
    """What one role may do. `name` is that of a topic or group, "" stands for all of them."""

    role: str
    operation: Literal["All", "Describe", "Read", "Write"]
    resource: Literal["topic", "group"]
    name: str


def rights() -> list[Right]:
    """Every right that a deployment needs, role by role; no more than these.

    Each process compares all topics with the deployment when it starts, clients do not.
    """
    roles = sorted({role for t in TOPICS for role in (*t.writers, *t.readers)})
    found = []
    for role in roles:
        if role == "operator":
            found += [Right(role, "All", "topic", ""), Right(role, "All", "group", "")]
            continue
        if role != "client":
            found.append(Right(role, "Describe", "topic", ""))
        found += [Right(role, "Write", "topic", t.name) for t in TOPICS if role in t.writers]
        found += [Right(role, "Read", "topic", t.name) for t in TOPICS if role in t.readers]
        found += [Right(role, "Read", "group", g) for g in GROUPS.values() if g == role]
    return found


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: murmur2 with the sign bit cleared, as the Java client does it."""
    return int(murmur2(key) & 0x7FFFFFFF) % partitions


def lane_of(request_id: str, lanes: int) -> int:
    """The lane of a request: its partition in requests, ledger and responses."""
    return partition_of(request_id.encode(), lanes)
