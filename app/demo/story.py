"""What the demo shows: chats and prompts, caches that are found again, and a worker that dies.

Asks as any client does: chats by OpenAI's own package over HTTP, prompts straight through Kafka.
Every text is held against what the engine must say, so a token that is lost, doubled or out of
place is found.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from app.demo import comparing
from app.demo.asked import Asked, Judge
from app.demo.ledger import Crew, Decisions
from app.demo.parts import DemoFailed, Parts, played
from app.demo.trace import TraceRequest, shipped_slice
from app.lifetime import Lifetime
from app.preprocess.openai import Kind
from app.settings import Settings
from streams.client import Client
from streams.ports import Log
from streams.prompt import Prompt

READY_S = 60.0
ANSWER_S = 60.0
LONGEST_ANSWER = 64
"""Tokens at which answers of the trace are cut, so that the demo is a matter of seconds."""
LONG_PROMPT = "Tell me a very long story."
LONG_ANSWER = 400
KILL_AFTER_S = 0.5
EXAMPLES = ("What is a log?", "And who keeps it?", "Did anything get lost?")
DIRECT = ("Why do trains wait?", "Was the harbour quiet?")


class Story:
    """One showing. Every request is kept in `asked`, to be judged at the end."""

    def __init__(
        self,
        log: Log,
        parts: Parts,
        settings: Settings,
        life: Lifetime,
        console: Console,
        workers: int,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._clock = life.clock
        self._console = console
        self._workers = workers
        self._client = Client(log, life.clock)
        self._decisions = Decisions(log)
        self._crew = Crew(log, life, settings.worker_timeout_s)
        self._judge = Judge(settings, life.clock)
        self._life = life
        self._began = life.clock.now()
        self.asked: list[Asked] = []

    async def tell(self, prompts: Sequence[str]) -> bool:
        """All of it; whether every text was right. Raises DemoFailed when a part ends by itself."""
        self._life.spawn("ledger", self._decisions.follow(await self._decisions.beginning()))
        self._crew.follow()
        await self._judge.open()
        url = f"http://{self._settings.http_host}:{self._settings.http_port}/v1"
        chat = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S)
        async with self._client, chat as self._openai:
            await self._parts.start()
            return await played(self._parts, self._acts(prompts or EXAMPLES), self._clock)

    async def _acts(self, prompts: Sequence[str]) -> bool:
        await self._wait_ready()
        await self._show_chat(prompts)
        await self._show_prompts(DIRECT)
        await self._compare()
        await self._pull_the_plug()
        return self._reckon()

    # --- the acts --------------------------------------------------------------------------------

    async def _wait_ready(self) -> None:
        until = self._clock.now() + READY_S
        await self._wait_for_crew(0)
        while True:
            try:
                if (await self._openai.models.list()).data:
                    break
            except openai.APIError:
                if self._clock.now() > until:
                    raise DemoFailed(f"the gateway knows no model after {READY_S:g} s") from None
            await self._clock.sleep(0.1)
        self._console.print(
            f"a gateway, a preprocessor, a router, an indexer and {self._workers} workers are up, "
            f"{self._clock.now() - self._began:.1f} s after their start\n",
            style="dim",
        )

    async def _wait_for_crew(self, since: int) -> None:
        if not await self._crew.complete(self._workers, READY_S, since):
            raise DemoFailed(f"not all workers take requests after {READY_S:g} s")

    async def _show_chat(self, prompts: Sequence[str]) -> None:
        """A conversation through OpenAI's package: each turn finds the ones before in a cache."""
        self._title("A chat by the openai package, over HTTP")
        messages: list[Any] = []
        for prompt in prompts:
            messages.append({"role": "user", "content": prompt})
            self._console.print(f"[bold]you[/]     {escape(prompt)}", highlight=False)
            self._console.print("[bold]answer[/]  ", end="")
            asked = await self._chat(messages, show=True)
            messages.append({"role": "assistant", "content": asked.text})
            await self._until_told(asked)
            self._console.print(
                f"        [dim]{self._where(asked)}, {asked.ttft_s * 1000:.0f} ms to the first "
                f"text, {self._decisions.cached(asked.id) or 0} of {asked.prompt_tokens} prompt "
                "tokens from its cache[/]\n",
                highlight=False,
            )

    async def _show_prompts(self, prompts: Sequence[str]) -> None:
        """Prompts as records on Kafka; answers by key."""
        self._title("Prompts published straight to Kafka, read back by their keys")
        answers = [
            await self._publish("chat", {"messages": [{"role": "user", "content": p}]})
            for p in prompts
        ]
        for prompt, asked in zip(prompts, answers, strict=True):
            await self._finish(asked)
            self._console.print(f"[bold]prompt[/]  {escape(prompt)}  [dim]{asked.id}[/]")
            self._console.print(f"[bold]stream[/]  {escape(asked.text)}", highlight=False)
            self._console.print(f"        [dim]{self._where(asked)}[/]\n", highlight=False)

    async def _compare(self) -> None:
        """The trace by cache and load, then with fresh caches in turn."""
        trace = shipped_slice(self._judge.vocabulary)
        longest = max(len(r.token_ids) for r in trace)
        self._title(
            f"{len(trace)} requests of a production trace, prompts of up to {longest} tokens"
        )
        args = (self._decisions, self._clock, self._console)
        kv_aware = await comparing.play("KV-aware", trace, self._ask_trace, *args)
        await self._show_caches()
        since = self._crew.now()
        await self._parts.restart({"worker", "router"}, {"policy": "round_robin"})
        await self._wait_for_crew(since)
        await self._chat([{"role": "user", "content": "ready?"}])  # all lanes have an owner again
        in_turn = await comparing.play("round robin", trace, self._ask_trace, *args)
        self._console.print()
        self._console.print(comparing.table([in_turn, kv_aware]), highlight=False)
        self._console.print("\nwhy three of them went where they went (KV-aware):")
        for line in comparing.telling(kv_aware, self._decisions):
            self._console.print(line, highlight=False, markup=False, style="dim")

    async def _show_caches(self) -> None:
        """What the indexer knows of the caches, as anybody may ask it."""
        url = f"http://{self._settings.http_host}:{self._settings.indexer_port}/workers"
        async with httpx.AsyncClient(timeout=ANSWER_S) as http:
            workers = (await http.get(url)).raise_for_status().json()["workers"]
        held = ", ".join(f"{w['worker']} {sum(r['blocks'] for r in w['ranks'])}" for w in workers)
        self._console.print(f"blocks in the caches, by the indexer: {held}", style="dim")

    async def _pull_the_plug(self) -> None:
        """A long answer; when it is well under way, its worker dies."""
        self._title("A worker dies in mid stream")
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            console=self._console,
        ) as progress:  # fmt: skip
            line = progress.add_task("long answer", total=None)
            killed = ""
            turns = [{"role": "user", "content": LONG_PROMPT}]
            limits = {"max_tokens": LONG_ANSWER, "ignore_eos": True}
            async with aclosing(self._heard(turns, limits)) as heard:
                async for asked in heard:
                    progress.update(line, total=len(asked.due.text), completed=len(asked.text))
                    where = self._decisions.workers(asked.id)
                    if not killed and where and self._clock.now() - asked.at > KILL_AFTER_S:
                        killed = where[-1]
                        await self._parts.kill(killed)
                        progress.console.print(
                            f"[red]kill -9 {killed}[/], {len(asked.text)} of "
                            f"{len(asked.due.text)} characters into its answer",
                            highlight=False,
                        )
        self._console.print(
            f"the answer is complete: {self._where(asked)}, "
            f"{asked.longest_silence_s:.1f} s of silence in between",
            highlight=False,
        )

    def _reckon(self) -> bool:
        """Hold every text against the engine's answer."""
        wrong = [a for a in self.asked if not a.is_right]
        for asked in wrong:
            self._console.print(
                f"[red]differs:[/] {asked.id} ended as {asked.ended or 'nothing'} with "
                f"{len(asked.text)} of {len(asked.due.text)} characters on {self._where(asked)}",
                highlight=False,
            )
        self._console.print(
            f"\n[bold]{len(self.asked) - len(wrong)} of {len(self.asked)} texts are exactly what "
            f"the engine says[/], {self._clock.now() - self._began:.0f} s in all",
            highlight=False,
        )
        return not wrong

    # --- asking ----------------------------------------------------------------------------------

    async def _chat(self, messages: Sequence[Any], *, show: bool = False) -> Asked:
        shown = 0
        async with aclosing(self._heard(messages, {})) as heard:
            async for asked in heard:
                if show:
                    text = asked.text[shown:]
                    self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                shown = len(asked.text)
        if show:
            self._console.print()
        return asked

    async def _heard(
        self, messages: Sequence[Any], limits: dict[str, Any]
    ) -> AsyncGenerator[Asked, None]:
        """Ask over HTTP; the request after each piece of its answer, and at its end."""
        body = {"model": self._settings.model, "messages": list(messages), **limits}
        asked = await self._judge.asked("", "chat", body)
        self.asked.append(asked)
        stream: Any = await self._openai.chat.completions.create(
            model=self._settings.model, messages=messages, stream=True, extra_body=limits
        )
        asked.id = stream.response.headers["x-kvlane-id"]
        try:
            async for chunk in stream:
                for choice in chunk.choices:
                    text, reason = choice.delta.content or "", choice.finish_reason
                    asked.hear(text, reason, self._clock.now())
                yield asked
        except openai.APIError as e:
            asked.ended = str(e)
            yield asked

    async def _ask_trace(self, request: TraceRequest) -> Asked:
        limit = min(request.output_tokens, LONGEST_ANSWER)
        body = {"token_ids": request.token_ids, "max_tokens": limit}
        return await self._finish(await self._publish("tokens", body))

    async def _publish(self, kind: Kind, body: dict[str, Any]) -> Asked:
        body = {"model": self._settings.model, **body}
        prompt = Prompt(id=self._client.new_request_id(), kind=kind, body=body)
        asked = await self._judge.asked(prompt.id, kind, body)
        self.asked.append(asked)
        await self._client.publish(prompt)
        return asked

    async def _finish(self, asked: Asked) -> Asked:
        try:
            async for piece in self._client.stream(asked.id, timeout_s=ANSWER_S):
                asked.receive(piece, self._clock.now())
        except TimeoutError:
            asked.ended = "timeout"
        await self._until_told(asked)
        return asked

    async def _until_told(self, asked: Asked) -> None:
        """Its end stands in the ledger a moment after its last text; not longer than a second."""
        until = self._clock.now() + 1.0
        while self._decisions.cached(asked.id) is None and self._clock.now() < until:
            await self._clock.sleep(0.01)

    def _where(self, asked: Asked) -> str:
        return ", then ".join(self._decisions.workers(asked.id)) or "no worker"

    def _title(self, text: str) -> None:
        self._console.rule(f"[bold]{text}[/]", align="left")
