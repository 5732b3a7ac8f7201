"""What the demo shows: prompts in, streams out, a worker killed in mid stream, and the reckoning.

Every text is held against what the engine must say, so a token that is lost, doubled or out of
place is found. Publishes and reads as any client does; where requests ran is read from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.demo.asked import Asked, Placements, percentile
from app.demo.parts import DemoFailed, Parts
from app.demo.trace import TraceRequest, shipped_slice
from app.preprocess.byte_level import render_chat
from streams.client import Client
from streams.clock import Clock
from streams.ports import Log
from streams.prompt import Prompt
from streams.records import End

SPEED = 2.0
"""How much faster than in production the requests of the trace come."""
LONGEST_ANSWER = 48
"""Tokens at which answers of the trace are cut, so that the demo is a matter of seconds."""
LONG_PROMPT = "A stream that outlives its worker. "
LONG_ANSWER = 300
KILL_AFTER = 60
ANSWER_S = 60.0
EXAMPLES = (
    "What does kvlane promise?",
    "Every token once, whatever dies: même les accents, 漢字 und 😀.",
    "Good. Now let somebody pull a plug.",
)


class Story:
    """One showing. Every request is kept in `asked`, to be judged at the end."""

    def __init__(
        self, log: Log, fleet: Parts, clock: Clock, console: Console, workers: int
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._console = console
        self._workers = workers
        self._client = Client(log, clock)
        self._placements = Placements(log)
        self._killed = ""
        self._began = clock.now()
        self.asked: list[Asked] = []

    async def tell(self, prompts: Sequence[str]) -> bool:
        """All of it; whether every text was right. Raises DemoFailed when a part ends by itself."""
        follower = asyncio.create_task(self._placements.follow(await self._placements.beginning()))
        watch: asyncio.Task[Any] | None = None
        try:
            async with self._client:
                await self._fleet.start()
                watch = asyncio.create_task(self._watch_fleet())
                acts = asyncio.create_task(self._acts(prompts or EXAMPLES))
                try:
                    await asyncio.wait([acts, watch], return_when=asyncio.FIRST_COMPLETED)
                    return await (watch if watch.done() else acts)
                finally:
                    await _cancelled(acts)
        finally:
            await _cancelled(follower, *([watch] if watch else []))

    async def _watch_fleet(self) -> bool:
        while True:
            self._fleet.check()
            await self._clock.sleep(0.5)

    async def _acts(self, prompts: Sequence[str]) -> bool:
        await self._wait_ready()
        for prompt in prompts:
            await self._show_chat(prompt)
        trace = shipped_slice()
        began = self._clock.now()
        await self._run_trace(trace)
        self._reckon(self._clock.now() - began)
        return all(a.is_right for a in self.asked)

    # --- the acts --------------------------------------------------------------------------------

    async def _wait_ready(self) -> None:
        first = self._chat("ready?")
        await self._finish(first)
        if not first.is_right:
            raise DemoFailed(f"no answer to a first prompt within {ANSWER_S:g} s: {first.ended}")
        self._console.print(
            f"a router, a preprocessor and {self._workers} workers are up, "
            f"{self._clock.now() - self._began:.1f} s after their start\n",
            style="dim",
        )

    async def _show_chat(self, prompt: str) -> None:
        """One prompt, its answer as it comes."""
        show = self._console.print
        show(f"[bold]you[/]     {escape(prompt)}", highlight=False)
        show("[bold]answer[/]  ", end="")
        asked = self._chat(prompt)
        async for text in self._pieces(asked):
            show(text, end="", markup=False, highlight=False, soft_wrap=True)
        show(
            f"\n        [dim]{self._where(asked)}, {asked.ttft_s * 1000:.0f} ms to the first "
            "token[/]\n",
            highlight=False,
        )

    async def _run_trace(self, trace: Sequence[TraceRequest]) -> None:
        """The requests of the trace at their times; and a long answer, whose worker is killed."""
        longest = max(len(r.token_ids) for r in trace)
        self._console.print(
            f"{len(trace)} requests of a production trace, prompts of up to {longest} tokens, at "
            f"{SPEED:g} times its speed.\nMeanwhile the worker of one long answer is killed.",
            highlight=False,
        )
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self._console,
        ) as progress:  # fmt: skip
            bar = progress.add_task("requests", total=len(trace))
            async with asyncio.TaskGroup() as requests:
                requests.create_task(self._pull_the_plug(progress))
                began = self._clock.now()
                for request in trace:
                    due = began + request.arrival_s / SPEED
                    await self._clock.sleep(max(0.0, due - self._clock.now()))
                    limit = min(request.output_tokens, LONGEST_ANSWER)
                    body = {"token_ids": request.token_ids, "max_tokens": limit}
                    asked = self._new("tokens", body, request.token_ids, limit)
                    answered = requests.create_task(self._finish(asked))
                    answered.add_done_callback(lambda _: progress.advance(bar))

    async def _pull_the_plug(self, progress: Progress) -> None:
        """A long answer; when it is well under way, its worker dies."""
        line = progress.add_task("long answer", total=LONG_ANSWER)
        asked = self._chat(LONG_PROMPT, LONG_ANSWER)
        async for _ in self._pieces(asked):
            progress.update(line, completed=len(asked.tokens))
            where = self._placements.of(asked.id)
            if not self._killed and where and len(asked.tokens) >= KILL_AFTER:
                self._killed = where[-1]
                await self._fleet.kill(self._killed)
                progress.console.print(
                    f"[red]kill -9 {self._killed}[/], {len(asked.tokens)} tokens into the long "
                    "answer",
                    highlight=False,
                )
        progress.console.print(
            f"the long answer is complete: {self._where(asked)}, "
            f"{asked.longest_silence_s:.1f} s of silence in between",
            highlight=False,
        )

    def _reckon(self, took_s: float) -> None:
        """Hold every text against the engine's answer, and show the figures of the second act."""
        right = sum(a.is_right for a in self.asked)
        moved = [a for a in self.asked if len(self._placements.of(a.id)) > 1]
        trace = [a for a in self.asked if a.from_trace]
        ttft_ms = [a.ttft_s * 1000 for a in trace]
        tokens = sum(len(a.tokens) for a in self.asked if a.at >= trace[0].at)
        ran = [self._placements.of(a.id)[-1] for a in self.asked if self._placements.of(a.id)]
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_row(
            "text exactly as the engine says it", f"{right} of {len(self.asked)} requests"
        )
        table.add_row(
            "time to the first token",
            f"p50 {percentile(ttft_ms, 0.5):.0f} ms, p99 {percentile(ttft_ms, 0.99):.0f} ms, "
            f"{len(trace)} requests of the trace",
        )
        table.add_row("tokens", f"{tokens} in {took_s:.1f} s, {tokens / took_s:.0f} a second")
        table.add_row("moved to another worker", f"{len(moved)} requests of {self._killed}")
        if moved:
            gaps = [a.longest_silence_s for a in moved]
            table.add_row("their longest silence", f"{max(gaps):.1f} s")
        counts = ", ".join(f"{w} {ran.count(w)}" for w in sorted(set(ran)))
        table.add_row("ended on", counts)
        self._console.print()
        self._console.print(table, highlight=False)
        for asked in (a for a in self.asked if not a.is_right):
            self._console.print(
                f"[red]differs:[/] {asked.id} ended as {asked.ended or 'nothing'} with "
                f"{len(asked.tokens)} tokens on {self._where(asked)}",
                highlight=False,
            )

    # --- asking ----------------------------------------------------------------------------------

    def _chat(self, text: str, max_tokens: int | None = None) -> Asked:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return self._new("chat", body, render_chat([("user", text)]), max_tokens)

    def _new(
        self, kind: Any, body: dict[str, Any], token_ids: Sequence[int], max_tokens: int | None
    ) -> Asked:
        prompt = Prompt(id=self._client.new_request_id(), kind=kind, body=body)
        asked = Asked(prompt, token_ids, max_tokens)
        self.asked.append(asked)
        return asked

    async def _pieces(self, asked: Asked) -> AsyncGenerator[str, None]:
        """Publish a request and pass on its text as it comes; a time-out ends it."""
        asked.at = self._clock.now()
        try:
            await self._client.publish(asked.prompt)
            async for piece in self._client.stream(asked.id, timeout_s=ANSWER_S):
                asked.receive(piece, self._clock.now())
                yield "" if isinstance(piece, End) else piece.text
        except TimeoutError:
            asked.ended = "timeout"

    async def _finish(self, asked: Asked) -> None:
        async for _ in self._pieces(asked):
            pass

    def _where(self, asked: Asked) -> str:
        return ", then ".join(self._placements.of(asked.id)) or "no worker"


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
