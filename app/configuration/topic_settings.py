"""Settings of the topics; all processes of a deployment have the same ones."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, Field, SecretStr

from kvlane.app.configuration.setting_values import ReadableFile, exceeds
from kvlane.streams.topics import (
    ASSIGNMENTS,
    DEFAULT_LANES,
    KV_EVENTS,
    PROMPTS,
    RESULTS,
    TOPICS_BY_NAME,
)


class TopicSettings(BaseModel):
    """Names, partitions and replicas of the topics, and the secret of block keys."""

    topic_prefix: str = Field(
        "kvlane.",
        pattern=r"^[A-Za-z0-9._-]*$",
        max_length=64,
        description="prefix of every topic name",
    )
    lanes: int = Field(
        DEFAULT_LANES,
        ge=1,
        le=1024,
        description="partitions of each of requests, ledger and responses, fixed when "
        "`kvlane topics create` makes them; more routers than lanes share no more work",
    )
    assignments_partitions: int = Field(
        TOPICS_BY_NAME[ASSIGNMENTS].partitions,
        ge=1,
        le=1024,
        description="partitions of assignments, fixed when `kvlane topics create` makes them; "
        "worker ids are hashed onto them, and workers that share one read each other's records: "
        "take several times the number of workers",
    )
    kv_events_partitions: int = Field(
        TOPICS_BY_NAME[KV_EVENTS].partitions,
        ge=1,
        le=1024,
        description="partitions of kv-events that `kvlane topics create` makes",
    )
    prompts_partitions: int = Field(
        TOPICS_BY_NAME[PROMPTS].partitions,
        ge=1,
        le=1024,
        description="partitions of prompts that `kvlane topics create` makes; more preprocessors "
        "than partitions share no more work",
    )
    results_partitions: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="partitions of results that `kvlane topics create` makes; empty: as many as "
        "lanes, which is also the cheapest to read again when a collector takes over a lane",
    )
    results_retention_s: float = Field(
        (TOPICS_BY_NAME[RESULTS].retention_ms or 0) / 1000,
        ge=3600,
        description="time for which results are kept, in seconds",
    )
    replication_factor: int | None = Field(
        None,
        ge=1,
        description="replicas of every partition that `kvlane topics create` makes; empty: 3, or "
        "as many as there are brokers if there are fewer",
    )
    min_insync_replicas: int = Field(
        1, ge=1, description="in-sync replicas that must have a record before it is acknowledged"
    )
    hash_secret: SecretStr = Field(
        SecretStr(""),
        description="secret for the hashes of cached blocks, the same in all processes; empty: a "
        "public one, accepted with brokers on loopback only",
    )
    hash_secret_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_HASH_SECRET"
    )


def topic_conflicts(settings: TopicSettings) -> Iterator[str]:
    """The settings of topics that do not fit together."""
    factor = settings.replication_factor
    if factor is not None and settings.min_insync_replicas > factor:
        yield exceeds(settings, "min_insync_replicas", "replication_factor")
