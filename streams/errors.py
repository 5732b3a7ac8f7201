"""The errors that leave `streams`. Their names say what happened, without a suffix.

    StreamError
    ├── BrokerUnavailable     nothing answers, or not within the deadline: ask again
    ├── Denied                the broker answers, and refuses: a person must change something
    ├── TopicsDiffer          a topic is missing or has other partitions than this deployment says
    ├── RecordError
    │   ├── UnknownType       a record type this version does not know
    │   ├── Malformed         bytes that are not what their header says
    │   └── RecordTooLarge    above max.message.bytes
    ├── AppendFailed          no acknowledgement: the record may or may not be in the log
    ├── PositionLost          a reader's position lies outside of the log
    ├── OwnershipLost         a commit for a partition that this member no longer owns
    └── LogClosed             use after close()

Errors of the Kafka client are translated where they enter (`streams/kafka/`, and
`streams/provision.py` for administration), with the cause kept; nothing else catches a client's own
exception. What an outage broke off is repeated in one place, `streams/patience.py`.
"""

from __future__ import annotations


class StreamError(Exception):
    """Root of everything `streams` raises on purpose."""


class BrokerUnavailable(StreamError):
    """No broker answers. Check KVLANE_BOOTSTRAP_SERVERS, the network, and whether Kafka runs.

    Asking again is right: an outage ends, and then everything goes on where it was.
    """


class Denied(StreamError):
    """The broker refuses us. Check the credentials (KVLANE_SASL_*, KVLANE_SSL_*) and the ACLs.

    Asking again changes nothing, so nobody does: the process ends, and the message says what was
    refused. Which rights a process needs is in the topic table (`streams/topics.py`).
    """


class TopicsDiffer(StreamError):
    """A topic is missing or shaped differently. `kvlane topics describe` shows what differs."""


class RecordError(StreamError):
    """A record that cannot be read or written as it is."""


class UnknownType(RecordError):
    """A record type of a newer version. Upgrade this reader: readers go before writers."""

    def __init__(self, type_name: str) -> None:
        super().__init__(
            f"unknown record type {type_name!r}: upgrade this process before the writers"
        )
        self.type_name = type_name


class Malformed(RecordError):
    """Bytes that are not what their header says. They never will be: do not retry."""


class RecordTooLarge(RecordError):
    """The record exceeds max.message.bytes (8 MiB). Shorten the prompt; nothing was appended."""


class AppendFailed(StreamError):
    """No acknowledgement came. The record may be in the log: repeat only what may stand twice."""


class PositionLost(StreamError):
    """The position lies outside of the log: records were deleted before they were read."""

    def __init__(self, topic: str, partition: int, wanted: int, start: int) -> None:
        super().__init__(f"{topic}[{partition}]: wanted offset {wanted}, the log starts at {start}")
        self.topic, self.partition, self.wanted, self.start = topic, partition, wanted, start


class OwnershipLost(StreamError):
    """The group moved on without this member; its records are redelivered to the new owner."""


class LogClosed(StreamError):
    """The connection to the log was closed by its owner."""
