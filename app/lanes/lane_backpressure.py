"""Backpressure of one lane: it is not read while its topics take no appends, or too few.

Counts the jobs of the lane that do not wait for a worker, and the bytes of their prompts. Other
lanes are read on. The bound on waiting requests is elsewhere (`WaitingRequests`).
"""

from __future__ import annotations

import logging

from kvlane.app.lanes.context import RouterContext
from kvlane.streams.reading.group_consumer import PartitionClaim

log = logging.getLogger(__name__)

MAX_APPENDING_JOBS = 150
MAX_APPENDING_BYTES = 64 * 1024 * 1024
"""Jobs of a lane, and bytes of their prompts, that do not wait for a worker but append to its
topics. With more of them the lane is paused until half of the jobs are done. Its Cancels wait
too."""
STUCK_WARNING_S = 2.0
"""A pause longer than this is logged; bursts are shorter."""


class LaneBackpressure:
    """The prompts that the jobs of a lane have in hand, and the pause of the lane for them."""

    def __init__(self, context: RouterContext, claim: PartitionClaim) -> None:
        self.prompt_bytes = 0
        """Of the prompts that jobs have in hand."""
        self._context = context
        self._claim = claim
        self._sizes: dict[str, int] = {}
        self._paused_at = 0.0
        self._is_stuck = False  # and that was logged

    def add_prompt(self, request_id: str, size: int) -> None:
        """A job has taken a prompt of this many bytes in hand."""
        self._sizes[request_id] = size
        self.prompt_bytes += size

    def drop_prompt(self, request_id: str) -> None:
        self.prompt_bytes -= self._sizes.pop(request_id, 0)

    def pause_if_clogged(self, appending_jobs: int) -> None:
        """Stop reading the lane at the bound. `appending_jobs`: those that wait for no worker."""
        if self._is_clogged(appending_jobs, 1.0) and not self._claim.is_paused:
            self._context.pause(self._claim)
            self._paused_at = self._context.ctx.clock.now()

    def resume_if_relieved(self, appending_jobs: int) -> None:
        if not self._claim.is_paused:
            return
        lane = self._claim.partition
        paused_s = self._context.ctx.clock.now() - self._paused_at
        if not self._is_clogged(appending_jobs, 0.5):
            self._context.resume(self._claim)
            if self._is_stuck:
                log.info(
                    "lane %d resumed after %.0f s: its topics take appends again", lane, paused_s
                )
            self._is_stuck = False
        elif paused_s > STUCK_WARNING_S and not self._is_stuck:
            self._is_stuck = True
            log.warning(
                "lane %d is paused: %d of its records wait for appends to its topics",
                lane,
                appending_jobs,
            )

    def _is_clogged(self, appending_jobs: int, share: float) -> bool:
        if appending_jobs >= share * MAX_APPENDING_JOBS:
            return True
        lane = self._claim.partition
        queue = self._context.queue
        queued_bytes = sum(
            waiting.queued_bytes_of_lane(lane) for waiting in (queue.waiting, queue.batch.waiting)
        )
        return self.prompt_bytes - queued_bytes >= share * MAX_APPENDING_BYTES
