"""Settings of batch prompts and of batch jobs."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, Field

from kvlane.app.configuration.setting_values import exceeds
from kvlane.streams.prompt import MAX_DEADLINE_S
from kvlane.streams.topics import BATCH, TOPICS_BY_NAME


class BatchSettings(BaseModel):
    """Retention, time limits and sizes of batch work."""

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
    """The time limits of batch prompts that do not fit together."""
    if settings.batch_max_lifetime_s > settings.batch_retention_s:
        yield exceeds(settings, "batch_max_lifetime_s", "batch_retention_s")
