"""Rules of results: which prompts get a record on `results`, and where a copy of it may go.

A prompt names the topic for a reply in its headers, as FastStream (`reply_to`, `correlation_id`) or
Spring Kafka's ReplyingKafkaTemplate (`kafka_replyTopic`, `kafka_replyPartition`,
`kafka_correlationId`) write them; the reply has the correlation id. Only topics that the operator
allows are written to, never those of the deployment. Pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.streams.prompt import Prompt
from kvlane.streams.request import ReplyAddress, ResultOptions

ResultScope = Literal["requested", "all", "batch"]

MAX_CORRELATION_BYTES = 1024
_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_STYLES = (("reply_to", "correlation_id"), ("kafka_replyTopic", "kafka_correlationId"))
"""Headers with the topic and with the correlation id, by library."""
_REPLY_PARTITION = "kafka_replyPartition"
_PARTITION = struct.Struct(">i")

ReadHeaders = Sequence[tuple[str, bytes | None]]


class ResultRules(NamedTuple):
    """`scope`: the setting `KVLANE_RESULTS`. `reply_prefixes`: of topics for replies.
    `own_prefix`: of the topics of the deployment."""

    scope: ResultScope = "requested"
    reply_prefixes: tuple[str, ...] = ()
    own_prefix: str = "kvlane."

    def options(self, prompt: Prompt, headers: ReadHeaders = ()) -> ResultOptions | None:
        """The options of the result of a prompt; None if it gets no result. Raises InvalidPrompt
        that names the header or the field."""
        if prompt.kind == "cancel":
            return None
        reply = self._reply(headers)
        is_asked = prompt.result or reply is not None
        if self.scope == "batch" and is_asked and not prompt.batch_id:
            field = "result" if prompt.result else "headers"
            raise InvalidPrompt(field, "only batch jobs get results here (KVLANE_RESULTS=batch)")
        if self.scope != "all" and not (is_asked or prompt.batch_id):
            return None
        return ResultOptions(
            kind=prompt.kind,
            metadata=msgspec.json.encode(prompt.metadata),
            batch_id=prompt.batch_id,
            custom_id=prompt.custom_id,
            reply=reply,
        )

    def _reply(self, headers: ReadHeaders) -> ReplyAddress | None:
        given = dict(headers)
        for topic_header, correlation_header in _STYLES:
            if topic := given.get(topic_header):
                correlation = given.get(correlation_header)
                return ReplyAddress(
                    topic=self._topic(topic_header, topic),
                    headers=_correlation(correlation_header, correlation),
                    partition=_partition(given) if topic_header == "kafka_replyTopic" else None,
                )
        return None

    def _topic(self, header: str, value: bytes) -> str:
        name, field = value.decode(errors="replace"), f"headers.{header}"
        if not _TOPIC_NAME.fullmatch(name):
            raise InvalidPrompt(field, "is no name of a topic")
        if not self.reply_prefixes:
            raise InvalidPrompt(field, "no replies are allowed (KVLANE_REPLY_TOPIC_PREFIXES)")
        if not name.startswith(self.reply_prefixes) or name.startswith(self.own_prefix):
            raise InvalidPrompt(
                field, "the topic is not among those allowed (KVLANE_REPLY_TOPIC_PREFIXES)"
            )
        return name


def _correlation(header: str, value: bytes | None) -> tuple[tuple[str, bytes], ...]:
    if value is None:
        return ()
    if len(value) > MAX_CORRELATION_BYTES:
        raise InvalidPrompt(f"headers.{header}", f"has more than {MAX_CORRELATION_BYTES} bytes")
    return ((header, value),)


def _partition(headers: Mapping[str, bytes | None]) -> int | None:
    value = headers.get(_REPLY_PARTITION)
    if value is None:
        return None
    if len(value) != _PARTITION.size or (number := _PARTITION.unpack(value)[0]) < 0:
        raise InvalidPrompt(f"headers.{_REPLY_PARTITION}", "is no number of a partition")
    return int(number)
