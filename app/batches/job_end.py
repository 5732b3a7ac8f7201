"""End of a batch job before all its requests are run: by a cancel or the end of its window."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvlane.app.batches.batch_view import BatchView
from kvlane.streams.batch_records import BatchEnding, BatchJob
from kvlane.streams.clock import Clock

UNRUN: Mapping[BatchEnding, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}
"""Code and message of a request that was not run."""


class EndsEarly(Exception):
    """The job ends before its input is validated."""

    def __init__(self, ending: BatchEnding) -> None:
        super().__init__(ending)
        self.ending = ending


class JobEnd:
    """The early end of a job, and the grace period since one run of the job noticed it."""

    def __init__(self, clock: Clock, view: BatchView, grace_s: float) -> None:
        self._clock = clock
        self._view = view
        self._grace_s = grace_s
        self._late_at = math.inf

    def ending(self, job: BatchJob) -> BatchEnding | None:
        """The end that is to come; None: all requests are to be run."""
        ending = job.ending
        if ending is None and self._view.cancelled_s(job.id) is not None:
            ending = "cancelled"
        elif ending is None and self._clock.wall_ms() // 1000 >= job.expires_s:
            ending = "expired"
        if ending and self._late_at == math.inf:
            self._late_at = self._clock.now() + self._grace_s
        return ending

    def is_late(self, job: BatchJob) -> bool:
        """True after the grace period for prompts under way."""
        return self.ending(job) is not None and self._clock.now() > self._late_at

    def check_early(self, job: BatchJob) -> None:
        """Raises EndsEarly for a job that is to end and whose input is not validated in time."""
        if job.status != "validating" or (ending := self.ending(job)) is None:
            return
        if ending == "cancelled" or self.is_late(job):
            raise EndsEarly(ending)
