"""Collectors on the log in memory, and the results that they write."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from kvlane.app.collector import Collector
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.prompt import Prompt, encode_prompt
from kvlane.streams.records import Chunk, Fence, Result
from kvlane.streams.request import Request, ResultOptions
from kvlane.streams.topics import PROMPTS, REQUESTS, RESPONSES, RESULTS, lane_of, partition_of
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld


class ResultsHarness:
    """Collectors by name. `settings`: changes of the defaults."""

    def __init__(self, world: MemoryWorld, **settings: Any) -> None:
        self.world = world
        self.settings = memory_settings(**settings)
        self.running: dict[str, tuple[MemoryLog, ProcessContext, Collector]] = {}

    async def start(self, name: str = "c1") -> Collector:
        """A collector that has taken over its lanes, or was killed before that."""
        ctx = ProcessContext(name, self.world.clock, random.Random(name))
        log = await self.world.connect(name)
        collector = Collector(log, self.settings, ctx)
        self.running[name] = log, ctx, collector
        starting = ctx.spawn("start", collector.start())
        await asyncio.wait({starting})
        return collector

    async def kill(self, name: str = "c1") -> None:
        """Kill a collector, as kill -9 does."""
        log, ctx, _ = self.running.pop(name)
        log.kill()
        await ctx.cancel_tasks()

    async def stop(self, name: str = "c1") -> None:
        log, ctx, collector = self.running.pop(name)
        await collector.stop()
        await ctx.cancel_tasks()
        await log.close()

    def publish(self, request_id: str, **fields: Any) -> None:
        """A prompt that asks for a result."""
        prompt = Prompt(id=request_id, **({"result": True} | fields))
        partition = partition_of(request_id.encode(), self.world.broker.partitions[PROMPTS])
        self.world.append_raw(PROMPTS, partition, encode_prompt(prompt))

    def ask(
        self,
        request_id: str,
        *,
        is_renewed: bool = False,
        shown: Chunk | None = None,
        **fields: Any,
    ) -> int:
        """A request with a result, as a preprocessor writes it; returns its offset."""
        options = ResultOptions(**({"kind": "completion"} | fields))
        request = Request(
            id=request_id, model="demo", token_ids=b"\1\0\0\0", result=options,
            is_renewed=is_renewed, shown=shown,
        )  # fmt: skip
        return self.world.append(REQUESTS, self.lane(request_id), request, key=request_id)

    def answer(
        self,
        request_id: str,
        *texts: str,
        attempt: int = 0,
        seq: int = 0,
        index: int = 0,
        end: str | None = "stop",
    ) -> None:
        """Chunks of a run, one for each token, from `seq` and `index` on; the last with `end`."""
        for number, text in enumerate(texts):
            chunk = Chunk(
                id=request_id,
                attempt=attempt,
                run=str(attempt),
                seq=seq + number,
                index=index + number,
                token_ids=(number,),
                text=text,
                finish_reason=end if number == len(texts) - 1 else None,
            )
            self.world.append(RESPONSES, self.lane(request_id), chunk, key=request_id)

    def fence(self, request_id: str, attempt: int, origin: int = -1) -> None:
        """A router begins another attempt, or names the record with the answer before it."""
        fence = Fence(id=request_id, attempt=attempt, origin=origin)
        self.world.append(RESPONSES, self.lane(request_id), fence, key=request_id)

    def lane(self, request_id: str) -> int:
        return lane_of(request_id, self.world.lanes)

    def results(self) -> list[Result]:
        """All results, in the order of their lanes."""
        found = map(decode, self.world.all_records(RESULTS))
        return [result for result in found if isinstance(result, Result)]

    async def wait_results(self, count: int = 1, within_s: float = 60.0) -> list[Result]:
        """The results, once there are so many."""
        await self.world.wait_until(lambda: len(self.results()) >= count, within_s)
        await self.world.sleep(1.0)  # one too many would come
        assert len(self.results()) == count
        return self.results()

    async def only(self, request_id: str = "a") -> Result:
        """The result, which is the only one."""
        [result] = await self.wait_results()
        assert result.id == request_id
        return result
