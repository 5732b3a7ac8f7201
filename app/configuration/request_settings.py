"""Settings of every request: time limits, attempts, and records of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field

from kvlane.app.configuration.setting_values import exceeds, listed
from kvlane.streams.topics import RESPONSES, TOPICS_BY_NAME

_LONGEST_LIFETIME_S = (TOPICS_BY_NAME[RESPONSES].retention_ms or 0) / 2000
"""Half the retention of the responses: below it, the part of a response that a reader has is still
in the log when the request changes hands at its end."""


class RequestSettings(BaseModel):
    """Time limits and attempts of a request, and the requests that get a result."""

    deadline_s: float = Field(
        600, gt=0, description="time limit of a request that sets none, in seconds"
    )
    max_lifetime_s: float = Field(
        600, gt=0, description="longest time limit that a request may set, in seconds"
    )
    dedup_window_s: float = Field(
        1200,
        gt=0,
        description="time after the end of a request during which its id is recognised and not run "
        "again; a copy counts by its append, however late it is read; also the longest session "
        "affinity; in seconds",
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
        """The prefixes of topics for replies, one by one."""
        return listed(self.reply_topic_prefixes)

    @property
    def batch_run_limit_s(self) -> float:
        """Time from the append of a batch request's record until it has to end, once begun.

        Bounded by retention: record and shown part must be in the log when the request changes
        hands, and a router that starts reads the ledger back so far.
        """
        return min(2 * self.max_lifetime_s, _LONGEST_LIFETIME_S)


def request_conflicts(settings: RequestSettings) -> Iterator[str]:
    """The time limits of requests that do not fit together."""
    if settings.deadline_s > settings.max_lifetime_s:
        yield exceeds(settings, "deadline_s", "max_lifetime_s")
    if settings.max_lifetime_s > settings.dedup_window_s:
        yield exceeds(settings, "max_lifetime_s", "dedup_window_s")
    if settings.max_lifetime_s >= _LONGEST_LIFETIME_S:
        yield (
            f"KVLANE_MAX_LIFETIME_S={settings.max_lifetime_s:g} is not less than half the "
            f"retention of the responses: it must be below {_LONGEST_LIFETIME_S:g}"
        )
