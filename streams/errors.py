"""The public errors of `streams`. Their names have no suffix.

    StreamError
    ├── BrokerUnavailable     no answer within the deadline: retry
    │   └── NoLocalBroker     a broker of kvlane's own does not start or run
    ├── AccessDenied          the broker refuses: an operator must change something
    ├── TopicMismatch         a topic is missing or has another number of partitions than expected
    ├── RecordError
    │   ├── Malformed         bytes that do not match the type in their header
    │   │   └── UnknownType   a record type that this version lacks
    │   ├── NewerRecord       a record that its writer has reserved for newer readers
    │   └── RecordTooLarge    above max.message.bytes
    ├── AppendFailed          no acknowledgement: the record may or may not be in the log
    ├── PositionLost          a reader's position is outside the log
    ├── BeyondEnd             an answer has ended before the position to read it from
    ├── NotFound              the log is complete, and has no record of the request
    ├── NothingToSkip         a position that holds no record which readers stop at
    ├── OwnershipLost         a commit for a partition that this member no longer owns
    └── LogClosed             use after close()

Errors of the Kafka client are translated where they enter (`streams/kafka/`, and
`streams/kafka/provision.py` for administration), with the cause attached; no other code catches a
client's exceptions. Calls that an outage interrupted are repeated by `retry_while_unavailable`
(`streams/clock.py`).
"""

from __future__ import annotations

MAX_NAME_CHARS = 100
"""Characters of a foreign name that a message includes."""


class CorrectableError(Exception):
    """An error that an operator can correct by its `correction`: one or two sentences."""

    correction: str = ""

    def __init__(self, message: str = "", *, correction: str = "") -> None:
        super().__init__(message)
        if correction:
            self.correction = correction


class StreamError(CorrectableError):
    """Base of all errors that `streams` raises."""


class BrokerUnavailable(StreamError):
    """No broker answers within the deadline; the call can be repeated."""

    correction = "Check KVLANE_BOOTSTRAP_SERVERS, the network, and whether Kafka runs."


class NoLocalBroker(BrokerUnavailable):
    correction = (
        "To use a Kafka that runs already, set KVLANE_BOOTSTRAP_SERVERS=host:port. "
        "`kvlane demo --broker memory` needs no Kafka."
    )


class AccessDenied(StreamError):
    """The broker refuses access; the message names the refused operation. A retry does not help."""

    correction = (
        "Check the credentials (KVLANE_SASL_*, KVLANE_SSL_*) and the rights: `kvlane topics acls` "
        "prints the commands that grant each process its rights."
    )


class TopicMismatch(StreamError):
    correction = (
        "`kvlane topics describe` shows the differences; `kvlane topics create` creates missing "
        "topics, and changes no other."
    )


class RecordError(StreamError):
    """A record that cannot be read or written as it is."""


class Malformed(RecordError):
    """Bytes that contradict their header. Do not retry."""


class UnknownType(Malformed):
    """A record type that this version lacks, skipped like any malformed record."""

    def __init__(self, type_name: str) -> None:
        super().__init__(f"unknown record type {type_name[:MAX_NAME_CHARS]!r}")
        self.type_name = type_name


class NewerRecord(RecordError):
    """A record for readers of a newer version: upgrade, or skip it (`kvlane topics skip`)."""

    def __init__(self, required: int, version: int, place: str = "") -> None:
        at = f"the record at {place}" if place else "a record"
        remedy = f"`kvlane topics skip {place}`" if place else "`kvlane topics skip`"
        super().__init__(
            f"{at} requires readers of record version {required}, this process reads version "
            f"{version}: upgrade it, or skip the record with {remedy}"
        )
        self.required, self.version = required, version


class RecordTooLarge(RecordError):
    """The record exceeds max.message.bytes (8 MiB). Nothing was appended."""

    correction = "Shorten the prompt: a record has at most 8 MiB."


class AppendFailed(StreamError):
    """No acknowledgement came: repeat the append only if duplicates are harmless."""

    correction = (
        "The record may be in Kafka. Publish a prompt again with the same id: it runs once."
    )


class PositionLost(StreamError):
    """The position is outside the log: records were deleted before they were read."""

    def __init__(self, topic: str, partition: int, wanted: int, start: int) -> None:
        super().__init__(f"{topic}[{partition}]: wanted offset {wanted}, the log starts at {start}")
        self.topic, self.partition, self.wanted, self.start = topic, partition, wanted, start


class BeyondEnd(StreamError):
    """An answer has ended before the position from which it was to be read."""

    correction = "Check the id and the position: it is the one after the last received piece."


class NotFound(StreamError):
    """No record of a request exists, and the log has lost none."""

    correction = "Check the id."


class NothingToSkip(StreamError):
    """Only a record that stops readers can be skipped: one that is marked for newer readers."""


class OwnershipLost(StreamError):
    """The group has rebalanced without this member."""


class LogClosed(StreamError):
    """The connection to the log was closed by its owner."""
