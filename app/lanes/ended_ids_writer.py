"""The writer of `ended-ids`: ids of prompts that have ended, a record a minute for each owned lane.

Repeated records do no harm. After a crash the next owner writes the missing ones, from its view.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.owner import LaneOwner
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Partition
from kvlane.streams.topics import ENDED_IDS, LEDGER

log = logging.getLogger(__name__)

SAVE_INTERVAL_S = 60.0
APPEND_TIMEOUT_S = 10.0


class EndedIdsWriter:
    def __init__(self, context: RouterContext, owners: Mapping[int, LaneOwner]) -> None:
        self._context = context
        self._owners = owners

    async def run(self) -> None:
        clock = self._context.ctx.clock
        while True:
            for lane in [lane for lane, owner in self._owners.items() if owner.serving]:
                await self._save(lane)
            await clock.sleep(SAVE_INTERVAL_S)

    async def _save(self, lane: int) -> None:
        s = self._context
        ended, position = s.ledger.ended_prompts, s.ledger.position(Partition(LEDGER, lane))
        if position is None:
            return
        try:
            if position < (saved := ended.saved_until(lane) or 0):
                end = (await s.log.end_offsets(LEDGER, [lane]))[lane]
                if end < saved:
                    log.warning("lane %d: its ledger was made anew, or lost its end", lane)
                    ended.restart(lane)
            if (record := ended.unsaved(lane, position)) is None:
                return
            until = s.ctx.clock.now() + APPEND_TIMEOUT_S
            await s.publisher.publish(ENDED_IDS, str(lane), record, 0, until=until)
        except (AppendFailed, BrokerUnavailable) as e:  # the next record has these ids as well
            log.warning("lane %d: ids of ended prompts are not written yet: %s", lane, e)
