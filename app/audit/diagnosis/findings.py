"""Findings of `kvlane doctor`: their names, which scripts may rely on, and what to do about each.

Names are never changed, only added. A section is one of docs/runbook.md, where each name stands in
the table of "A finding of `kvlane doctor`".
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Severity = Literal["ok", "skipped", "warning", "fault"]
TABLE = "a-finding-of-kvlane-doctor"


class Finding(msgspec.Struct, frozen=True):
    """A condition of an object, with what to do; or that a check found none, or was skipped.

    `check`: that found it; `name`: of the condition, of `check` where there is none.
    """

    severity: Severity
    check: str
    name: str
    object: str = ""
    message: str = ""
    action: str = ""
    section: str = ""


class FindingKind(NamedTuple):
    """The constant part of the findings of a name."""

    severity: Severity
    action: str
    section: str = TABLE


KINDS: dict[str, FindingKind] = {
    # brokers
    "broker-unreachable": FindingKind(
        "fault", "Check KVLANE_BOOTSTRAP_SERVERS, the network, and whether Kafka runs.",
        "kvlanebrokerunresponsive",
    ),
    "broker-connection": FindingKind("fault", "", "kvlanebrokerunresponsive"),
    "broker-refuses": FindingKind(
        "fault", "Check the credentials (KVLANE_SASL_*, KVLANE_SSL_*).", "kvlanebrokerunresponsive"
    ),
    "broker-version": FindingKind("warning", "Upgrade the brokers to Kafka 4."),
    "partition-without-leader": FindingKind(
        "fault", "Start the brokers that have its replicas.", "kvlanebrokerunresponsive"
    ),
    "replica-behind": FindingKind(
        "warning", "Check the brokers, their disks and their network.", "kvlanebrokerunresponsive"
    ),
    "right-missing": FindingKind("fault", "Grant it: `kvlane topics acls` prints the commands."),
    # topics
    "topic-missing": FindingKind("fault", "`kvlane topics create` creates it."),
    "topic-partitions": FindingKind(
        "fault", "Delete and recreate the topics, or use another KVLANE_TOPIC_PREFIX."
    ),
    "topic-replicas": FindingKind(
        "warning", "Reassign its partitions to more brokers (kafka-reassign-partitions.sh)."
    ),
    "topic-unwritable": FindingKind(
        "fault", "Lower min.insync.replicas of the topic, or add replicas."
    ),
    "acknowledged-once": FindingKind(
        "warning", "Set it to 2 with kafka-configs.sh, and KVLANE_MIN_INSYNC_REPLICAS=2."
    ),
    "topic-loses-records": FindingKind(
        "fault", "Set it with kafka-configs.sh, since records may be lost before they are read.",
        "kvlanestreamgap",
    ),
    "topic-setting": FindingKind("warning", "Set it with kafka-configs.sh."),
    "deployment-missing": FindingKind("fault", "`kvlane topics create` writes it."),
    "lanes-differ": FindingKind("fault", "Set KVLANE_LANES to the deployment's in all processes."),
    # clocks, records
    "broker-clock": FindingKind("warning", "Synchronize the clocks (NTP) of brokers and machines."),
    "newer-record": FindingKind(
        "fault", "Use the kvlane of the processes that wrote it.", "kvlanerecordsmalformed"
    ),
    "malformed-records": FindingKind(
        "warning", "Find the program that writes them: logs name the offsets.",
        "kvlanerecordsmalformed",
    ),
    # workers
    "worker-silent": FindingKind(
        "fault", "Check whether its process runs; its log has the reason.",
        "an-alarm-of-kvlane-status",
    ),
    "worker-lost": FindingKind(
        "warning", "Its runs have moved; check whether its process came back.",
        "an-alarm-of-kvlane-status",
    ),
    "worker-unhealthy": FindingKind("fault", "Look at the log of its engine.", "kvlanenoworkers"),
    "worker-cordoned": FindingKind("warning", "`kvlane workers uncordon` ends the order."),
    "worker-epoch-stale": FindingKind(
        "fault", "Stop the older process, or give each worker its own KVLANE_WORKER_ID."
    ),
    "model-without-worker": FindingKind(
        "fault", "Start a worker of the model.", "kvlanenoworkers"
    ),
    "workers-differ": FindingKind(
        "fault", "Stop the workers that differ, or give them another KVLANE_MODEL."
    ),
    "versions-differ": FindingKind("warning", "Finish the upgrade."),
    "hash-secret-differs": FindingKind(
        "fault", "Give all processes the same KVLANE_HASH_SECRET.", "kvlanewronghashsecret"
    ),
    # cache
    "cache-events-missing": FindingKind(
        "warning", "Check that the engine publishes cache events (KVLANE_ATTACH_EVENTS_ENDPOINT).",
        "kvlanecachedrift",
    ),
    "cache-events-lost": FindingKind(
        "warning", "Restart the worker if it stays.", "kvlanecachedrift"
    ),
    "cache-drift": FindingKind(
        "warning", "Compare the blocks with `kvlane explain` of its requests.", "kvlanecachedrift"
    ),
    # routers, queues
    "no-router": FindingKind("fault", "Start a router: `kvlane run router`.", "a-request-waits"),
    "lane-without-router": FindingKind(
        "fault", "Check `/readyz` of the routers; their group may rebalance.", "a-request-waits"
    ),
    "routing-order-unused": FindingKind(
        "fault", "Upgrade the router, or end the order: `kvlane routing reset`."
    ),
    "routing-differs": FindingKind(
        "warning", "Give all routers the same settings, or an order: `kvlane routing set`."
    ),
    "records-unread": FindingKind("fault", "Start more of its readers.", "kvlaneviewbehind"),
    "dead-letters": FindingKind("warning", "`kvlane dead-letters list` has the reasons."),
    # processes and files
    "process-unreachable": FindingKind("fault", "Check the address, and whether it runs."),
    "process-dead": FindingKind("fault", "Restart it; its log has the reason."),
    "process-not-ready": FindingKind("fault", "Wait for its start; then look at its log."),
    "process-slow": FindingKind("warning", "Look at its CPU time.", "kvlaneviewbehind"),
    "process-clock": FindingKind("warning", "Synchronize the clock (NTP) of its machine."),
    "counter-rises": FindingKind("warning", "Find the cause in its log.", "kvlanestreamgap"),
    "views-differ": FindingKind(
        "fault", "Restart the process whose view differs from the log.", "kvlanecachedrift"
    ),
    "key-file": FindingKind("fault", "Give the gateways a file that `kvlane keys create` wrote."),
    "no-valid-key": FindingKind("fault", "`kvlane keys create` makes a key."),
    "file-writable": FindingKind("fault", "`chmod 600` it, or 640 for a group."),
    "file-readable": FindingKind("warning", "`chmod 600` it, or 640 for a group."),
}  # fmt: skip


def finding(check: str, name: str, about: str, message: str, action: str = "") -> Finding:
    """A finding of this name; `action` replaces that of its kind."""
    kind = KINDS[name]
    return Finding(
        kind.severity, check, name, about, message, action or kind.action,
        f"docs/runbook.md#{kind.section}",
    )  # fmt: skip
