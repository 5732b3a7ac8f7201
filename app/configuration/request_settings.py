"""Settings of requests: time limits, attempts, records of results, and batch work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field

from kvlane.app.configuration.setting_values import exceeds, listed
from kvlane.streams.prompt import MAX_DEADLINE_S
from kvlane.streams.topics import BATCH, ENDED_IDS, PROMPT_READABLE_MS, RESPONSES, TOPICS_BY_NAME

_LONGEST_LIFETIME_S = (TOPICS_BY_NAME[RESPONSES].retention_ms or 0) / 2000
"""Half the retention of the responses: below it, the part of a response that a reader has is in the
log when the request changes hands at its end."""

_LONGEST_WINDOW_S = ((TOPICS_BY_NAME[ENDED_IDS].retention_ms or 0) - PROMPT_READABLE_MS) / 1000
"""An id that ended so long before a copy of its prompt was appended is in the topic for as long as
that can be read."""


class RequestSettings(BaseModel):
    deadline_s: float = Field(
        600, gt=0, description="time limit of a request that sets none, in seconds"
    )
    max_lifetime_s: float = Field(
        600, gt=0, description="longest time limit that a request may set, in seconds"
    )
    dedup_window_s: float = Field(
        1200,
        gt=0,
        le=_LONGEST_WINDOW_S,
        description="time after the end of a request during which its id is recognised and not run "
        "again; a copy counts by its append, however late it is read; also the longest session "
        "affinity; two days at most; in seconds",
    )
    max_attempts: int = Field(
        3, ge=1, description="failed attempts after which a request ends with an error"
    )
    results: Literal["requested", "all", "batch"] = Field(
        "requested",
        description="requests that get a record on results: requested: those whose prompt asks for "
        "it or belongs to a batch job, and stored responses; all: also the others over HTTP; "
        "batch: those of batch jobs only. Read by preprocessors and gateways",
    )
    reply_topic_prefixes: str = Field(
        "",
        description="prefixes of the topics that prompts may name for a copy of their result, "
        "separated by commas, such as replies.,shop.answers.; empty: none",
    )

    @property
    def reply_prefixes(self) -> tuple[str, ...]:
        return listed(self.reply_topic_prefixes)

    @property
    def batch_run_limit_s(self) -> float:
        """Time from the append of a batch request's record until it has to end, once begun. Bounded
        by retention: record and shown part must be in the log when the request changes hands."""
        return min(2 * self.max_lifetime_s, _LONGEST_LIFETIME_S)


def request_conflicts(settings: RequestSettings) -> Iterator[str]:
    if settings.deadline_s > settings.max_lifetime_s:
        yield exceeds(settings, "deadline_s", "max_lifetime_s")
    if settings.max_lifetime_s > settings.dedup_window_s:
        yield exceeds(settings, "max_lifetime_s", "dedup_window_s")
    if settings.max_lifetime_s >= _LONGEST_LIFETIME_S:
        yield (
            f"KVLANE_MAX_LIFETIME_S={settings.max_lifetime_s:g} is not less than half the "
            f"retention of the responses: it must be below {_LONGEST_LIFETIME_S:g}"
        )


class BatchSettings(BaseModel):
    batch_partitions: int = Field(
        TOPICS_BY_NAME[BATCH].partitions,
        ge=1,
        le=1024,
        description="partitions of batch that `kvlane topics create` makes",
    )
    batch_retention_s: float = Field(
        (TOPICS_BY_NAME[BATCH].retention_ms or 0) / 1000,
        ge=3600,
        description="time for which batch prompts are kept, in seconds",
    )
    batch_max_lifetime_s: float = Field(
        7 * 24 * 3600,
        gt=0,
        le=MAX_DEADLINE_S,
        description="time limit of a batch prompt that sets none, and the longest, in seconds from "
        "its append to `batch`",
    )
    batch_max_slowdown: float = Field(
        0.05,
        ge=0,
        description="share by which batch requests may lengthen the decode steps of interactive "
        "requests on the same worker: 0.05 allows steps 5 % longer, 1 twice as long; above it "
        "batch requests wait or are preempted. Read by routers",
    )
    batch_max_blocked_share: float = Field(
        0.005,
        ge=0,
        le=1,
        description="share of interactive prompts that may find each worker without batch requests "
        "at another prompt; as many workers are kept free of them as that takes, none with 1",
    )
    max_queued_batch_requests: int = Field(
        128,
        ge=0,
        description="requests of class batch that a router queues, besides interactive ones; "
        "further batch prompts wait in their topic",
    )
    batch_max_lines: int = Field(
        50_000, ge=1, le=1_000_000, description="requests that the input file of a batch may have"
    )
    http_max_file_bytes: int = Field(
        200 * 1024 * 1024,
        ge=1024,
        description="largest file that is uploaded to the Files API, in bytes",
    )


def batch_conflicts(settings: BatchSettings) -> Iterator[str]:
    if settings.batch_max_lifetime_s > settings.batch_retention_s:
        yield exceeds(settings, "batch_max_lifetime_s", "batch_retention_s")
