"""The topic table: names, keys, partitions, retention, record types, writers and readers.

The only source for the code and for `kvlane topics create|describe|acls`. Names are without the
prefix (`KVLANE_TOPIC_PREFIX`), which is added where the log is opened. `requests`, `ledger` and
`responses` have the same partitions and keys: partition *n* is *lane* *n*. Writers and readers are
roles: the name of a process; `client`, any program that publishes prompts and reads answers;
`operator`, a person with the command line. Brokers compress the `ledger`, since most batches of
other topics are single records.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Literal, NamedTuple

PROMPTS = "prompts"
BATCH = "batch"
REQUESTS = "requests"
LEDGER = "ledger"
RESPONSES = "responses"
RESULTS = "results"
USAGE = "usage"
ENDED_IDS = "ended-ids"
ASSIGNMENTS = "assignments"
KV_EVENTS = "kv-events"
CAPACITY = "capacity"
REGISTRY = "registry"
ARTIFACTS = "artifacts"
BATCH_JOBS = "batch-jobs"
FILE_PARTS = "file-parts"
SNAPSHOTS = "snapshots"
DEAD_LETTERS = "dead-letters"

FILE_RETENTION_MS = 30 * 24 * 3_600_000
"""Time that files of the Files API and batch jobs are kept. Card and content expire together."""

PER_LANE = -1

DEFAULT_LANES = 8
"""Lanes of a deployment that sets no number (`KVLANE_LANES`): as many routers can share the
work."""

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_WORD, _U32 = Struct("<I"), 0xFFFFFFFF
_MURMUR2_SEED, _MURMUR2_FACTOR = 0x9747B28C, 0x5BD1E995
PROMPT_READABLE_MS = 8 * DAY_MS
"""Age at which a prompt counts as deleted: brokers delete by segment, up to a day after the
retention of `batch`. For so long after its end the id of a prompt is known."""
MAX_RECORD_BYTES = 8 * 1024 * 1024
MAX_UNCOMPRESSED_BYTES = 2 * MAX_RECORD_BYTES
"""Size limit of a batch after decompression, which brokers do not bound."""


class Topic(NamedTuple):
    """One row: shape and rules of a topic. No `retention_ms`: compaction keeps its records. With
    `compacts`, records are deleted by age and replaced by newer ones of their key."""

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
    compacts: bool = False

    def config(self, min_insync: int) -> dict[str, str]:
        """Broker settings of the topic. Only closed segments are deleted, so one is a quarter of
        the retention at most."""
        shared = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(MAX_RECORD_BYTES),
            "min.insync.replicas": str(min_insync),
            # A leader that was not in sync would lose acknowledged records.
            "unclean.leader.election.enable": "false",
        }
        if self.compression is not None:
            shared["compression.type"] = self.compression
        segment_ms, policies = self.retention_ms or DAY_MS, []
        if self.compacts or self.retention_ms is None:
            segment_ms = min(segment_ms, DAY_MS)
            policies.append("compact")
            shared["min.compaction.lag.ms"] = shared["delete.retention.ms"] = str(DAY_MS)
        if self.retention_ms is not None:
            policies.append("delete")
            shared["retention.ms"] = str(self.retention_ms)
            # Retention by time alone: unfinished work stays readable, however much is written.
            shared["retention.bytes"] = "-1"
        return shared | {"cleanup.policy": ",".join(policies), "segment.ms": str(segment_ms // 4)}


TOPICS: tuple[Topic, ...] = (
    Topic(
        PROMPTS, "request id", 16, 24 * HOUR_MS, "JSON",
        ("Prompt",),
        ("client",), ("preprocessor",),
    ),
    Topic(
        # Its own topic, so that no prompt waits behind batch work.
        BATCH, "request id", 16, 7 * 24 * HOUR_MS, "JSON",
        ("Prompt",),
        ("client", "collector", "preprocessor"), ("preprocessor",),
    ),
    Topic(
        REQUESTS, "request id", PER_LANE, HOUR_MS, "msgpack",
        ("Request", "Cancel", "Refused"),
        # Routers append batch requests again that have waited there.
        ("gateway", "preprocessor", "router"), ("router", "operator", "collector"),
    ),
    Topic(
        LEDGER, "request id", PER_LANE, 24 * HOUR_MS, "msgpack",
        ("Assigned", "Started", "PrefillDone", "Finished", "Fencing", "Ended"),
        ("router", "worker"), ("router", "operator", "collector"), "lz4",
    ),
    Topic(
        RESPONSES, "request id", PER_LANE, HOUR_MS, "JSON",
        ("Chunk", "Fence", "End"),
        ("worker", "router"), ("gateway", "client", "router", "operator", "collector"),
    ),
    Topic(
        RESULTS, "request id", PER_LANE, 7 * 24 * HOUR_MS, "JSON",
        ("Result",),
        ("collector",), ("collector", "gateway", "client", "operator"),
    ),
    Topic(
        USAGE, "request id", PER_LANE, 62 * DAY_MS, "JSON",
        ("RequestUsage",),
        ("collector",), ("collector", "gateway", "operator"),
    ),
    Topic(
        ENDED_IDS, "lane", 1, 10 * 24 * HOUR_MS, "msgpack",
        ("EndedIds",),
        ("router",), ("router",),
    ),
    Topic(
        ASSIGNMENTS, "worker id", 16, HOUR_MS, "msgpack",
        ("Assignment", "CancelRun", "Lost"),
        ("router",), ("worker",),
    ),
    Topic(
        KV_EVENTS, "worker id", 8, 24 * HOUR_MS, "msgpack",
        ("Blocks", "Heartbeat", "Lost", "Probe"),
        ("worker", "router"), ("router", "indexer", "operator"),
    ),
    Topic(
        CAPACITY, "router, gateway", 1, HOUR_MS, "msgpack",
        ("RouterCapacity", "LimitClaims"),
        ("router", "gateway"), ("preprocessor", "gateway", "operator"),
    ),
    Topic(
        REGISTRY, "entity", 1, None, "msgpack",
        (
            "WorkerCard", "ModelCard", "SnapshotPointer", "Deployment", "Skip", "Cordon",
            "ModelAlias", "RoutingOrder", "Tombstone",
        ),
        ("worker", "router", "indexer", "operator"),
        ("gateway", "preprocessor", "router", "worker", "indexer", "operator", "collector"),
    ),
    Topic(
        ARTIFACTS, "sha256/part", 4, None, "bytes",
        (),
        ("worker",), ("gateway", "preprocessor", "worker", "collector"),
    ),
    Topic(
        BATCH_JOBS, "kind/id", 8, FILE_RETENTION_MS, "msgpack",
        ("FileCard", "BatchJob", "BatchCancel", "ResponseDeletion", "Tombstone"),
        ("gateway", "collector"), ("gateway", "collector"), compacts=True,
    ),
    Topic(
        FILE_PARTS, "file/run/part", 8, FILE_RETENTION_MS, "bytes",
        (),
        ("gateway", "collector"), ("gateway", "collector"), compacts=True,
    ),
    Topic(
        SNAPSHOTS, "view/part", 8, 48 * HOUR_MS, "bytes",
        (),
        ("indexer",), ("router", "indexer"),
    ),
    Topic(
        DEAD_LETTERS, "as it was", 4, 7 * 24 * HOUR_MS, "bytes",
        (),
        ("preprocessor", "router", "collector"), ("operator",),
    ),
)  # fmt: skip

OF_CLIENTS = frozenset({PROMPTS, BATCH})
"""Topics that clients write, perhaps in transactions; their end is the last stable offset."""

READ_COMMITTED = OF_CLIENTS | {RESULTS, USAGE}
"""Topics that are written by transactions, and read committed by all readers of the project. Of
`results` the end is that of the log: a look for results waits for transactions of other lanes."""

TOPICS_BY_NAME = {topic.name: topic for topic in TOPICS}
TYPES_BY_TOPIC = {topic.name: frozenset(topic.records) for topic in TOPICS}

GROUPS = {
    "preprocessor": PROMPTS,
    "preprocessor-batch": BATCH,
    "router": REQUESTS,
    "collector": REQUESTS,
    "collector-jobs": BATCH_JOBS,
    "indexer": KV_EVENTS,
}
"""Consumer groups and their topics. The name of a group begins with its role; the deployment's
prefix is added. Those of snapshots and jobs only share the work; all other reads use no group."""

TRANSACTIONAL_IDS = {"collector": "collector-"}
"""By role, how the ids of its transactional writers begin, after the deployment's prefix."""


class AclRule(NamedTuple):
    """An ACL rule of a role. `name` is a topic, a group or a transactional id, "" all of them.
    `is_prefix`: it is about all names that begin so. `is_foreign`: outside of the deployment."""

    role: str
    operation: Literal["All", "Describe", "Read", "Write"]
    resource: Literal["topic", "group", "transactional-id"]
    name: str
    is_prefix: bool = False
    is_foreign: bool = False


_OF_REPLIES: tuple[Literal["Read", "Write"], ...] = ("Read", "Write")


def required_acls(reply_prefixes: Sequence[str] = ()) -> list[AclRule]:
    """The complete ACL rules of a deployment, by role. `reply_prefixes`: of topics of replies."""
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
        found += [AclRule(role, "Read", "group", g) for g in GROUPS if g.partition("-")[0] == role]
        if (ids := TRANSACTIONAL_IDS.get(role)) is not None:
            found += [
                AclRule(role, "Describe", "transactional-id", ids, is_prefix=True),
                AclRule(role, "Write", "transactional-id", ids, is_prefix=True),
                # Read: the next owner of a lane looks for the replies that were sent.
                *(
                    AclRule(role, operation, "topic", name, is_prefix=True, is_foreign=True)
                    for name in reply_prefixes
                    for operation in _OF_REPLIES
                ),
            ]
    return found


def murmur2(key: bytes) -> int:
    """The 32-bit hash by which the Java client chooses the partition of a key."""
    size = len(key)
    state = _MURMUR2_SEED ^ size
    for word in _WORD.iter_unpack(key[: size & ~3]):
        mixed = word[0] * _MURMUR2_FACTOR & _U32
        state = (state * _MURMUR2_FACTOR ^ (mixed ^ mixed >> 24) * _MURMUR2_FACTOR) & _U32
    if rest := key[size & ~3 :]:
        state = (state ^ int.from_bytes(rest, "little")) * _MURMUR2_FACTOR & _U32
    state = (state ^ state >> 13) * _MURMUR2_FACTOR & _U32
    return state ^ state >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: murmur2 with the sign bit cleared, as the Java client does it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def lane_of(request_id: str, lanes: int) -> int:
    return partition_of(request_id.encode(), lanes)
