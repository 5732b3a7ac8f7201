"""The demo with the real vLLM: two workers on this machine's CPU, and a model made on the spot.

The model's weights are random, so nobody can say beforehand what it answers. But it answers the
same, whichever worker is asked and whatever that one has in its cache: each request of the trace is
asked under both policies, and a long one with and without a worker that dies; the answers must be
equal, token by token. What the router expected to be in a cache is held against what vLLM found.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
from rich.console import Console
from rich.markup import escape

from app.demo import comparing, tiny_model
from app.demo.asked import Asked, percentile
from app.demo.comparing import Showing
from app.demo.ledger import Crew, Decisions
from app.demo.parts import DemoFailed, Parts, played
from app.demo.trace import TraceRequest, tokens_of
from app.engine.continuation import Due
from app.lifetime import Lifetime
from app.settings import Settings
from app.trace import CHUNK_TOKENS, SHIPPED, read_trace
from streams.client import Client
from streams.ports import Log
from streams.prompt import Prompt

MODEL = "tiny"
WORKERS = 2
BLOCKS = 384
"""Of each cache; the trace has several times as many, so caches must forget."""
CONTEXT_LENGTH = 2048
READY_S = 600.0
"""vLLM takes ten seconds to start on an idle machine, and minutes on one that is not."""
ANSWER_S = 120.0
SHRINK = CHUNK_TOKENS // tiny_model.BLOCK
"""A chunk of the trace becomes one block, so that prompts of 12 000 tokens have 750."""
COPIES = 2
"""The trace is played twice, the second time in other words: 600 requests."""
REQUESTS_PER_S = 8.0
LONGEST_ANSWER = 12
LONG_ANSWER = 600
KILL_AT = 100
"""Tokens of the long answer after which its worker dies."""
UNKNOWN = Due((), "", "length")


def changes(folder: Path) -> dict[str, Any]:
    """Settings of a deployment that serves the model of a folder by vLLM."""
    return {
        "engine": "vllm",
        "model": MODEL,
        "model_path": tiny_model.make_model(folder),
        "engine_args": tiny_model.arguments(BLOCKS, CONTEXT_LENGTH),
        "context_length": CONTEXT_LENGTH,
        "worker_timeout_s": 10.0,  # both engines and everything else share few cores
    }


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Where the model is, as long as the demo lasts."""
    return tempfile.TemporaryDirectory(prefix="kvlane-demo-")


class Errors(NamedTuple):
    """How far predictions were off: tokens, in blocks. Over `requests` of them."""

    requests: int
    mean: float
    p95: float
    most: float


class RealStory:
    """One showing. `tell` returns whether all was as it should be."""

    def __init__(
        self, log: Log, parts: Parts, settings: Settings, life: Lifetime, console: Console
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._life = life
        self._clock = life.clock
        self._console = console
        self._client = Client(log, life.clock)
        self._decisions = Decisions(log)
        self._crew = Crew(log, life, settings.worker_timeout_s)
        self._began = life.clock.now()

    async def tell(self) -> bool:
        """All of it. Raises DemoFailed when a part ends by itself."""
        self._life.spawn("ledger", self._decisions.follow(await self._decisions.beginning()))
        self._crew.follow()
        async with self._client:
            self._console.print("two vLLM workers are starting", style="dim")
            await self._parts.start()
            return await played(self._parts, self._acts(), self._clock)

    async def _acts(self) -> bool:
        await self._ready(0)
        self._say(f"all is up, {self._clock.now() - self._began:.0f} s after the start\n")
        await self._chat()
        kv_aware, in_turn = await self._compare()
        survived = await self._pull_the_plug()
        return self._reckon(kv_aware, in_turn, survived=survived)

    async def _ready(self, since: int) -> None:
        if not await self._crew.complete(WORKERS, READY_S, since):
            raise DemoFailed(f"not all workers take requests after {READY_S:g} s")

    # --- the acts --------------------------------------------------------------------------------

    async def _chat(self) -> None:
        self._title("A chat by the openai package (random weights: it makes no sense)")
        url = f"http://{self._settings.http_host}:{self._settings.http_port}/v1"
        turn: Any = {"role": "user", "content": "What is a log?"}
        limits = {"ignore_eos": True}
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=ANSWER_S) as chat:
            said = await chat.chat.completions.create(
                model=MODEL,
                messages=[turn],
                max_tokens=24,
                temperature=0,
                extra_body=limits,
            )
        text = said.choices[0].message.content or ""
        self._console.print(f"[bold]answer[/]  {escape(repr(text))}\n", highlight=False)

    async def _compare(self) -> tuple[Showing, Showing]:
        """The trace by cache and load, then with fresh caches in turn."""
        trace = shrunk_trace()
        longest = max(len(request.token_ids) for request in trace)
        self._title(
            f"{len(trace)} requests of a production trace, shrunk to prompts of up to {longest} "
            "tokens"
        )
        speed = (trace[-1].arrival_s - trace[0].arrival_s) / len(trace) * REQUESTS_PER_S
        args = (self._decisions, self._clock, self._console)
        kv_aware = await comparing.play("KV-aware", trace, self._ask, *args, speed=speed)
        since = self._crew.now()
        await self._parts.restart({"worker", "router"}, {"policy": "round_robin"})
        await self._ready(since)
        await self._ask(trace[0]._replace(token_ids=[5, 6, 7]))  # all lanes have an owner again
        in_turn = await comparing.play("round robin", trace, self._ask, *args, speed=speed)
        self._console.print()
        self._console.print(comparing.table([in_turn, kv_aware]), highlight=False)
        self._console.print("\nwhy three of them went where they went (KV-aware):")
        for line in comparing.telling(kv_aware, self._decisions):
            self._console.print(line, highlight=False, markup=False, style="dim")
        return kv_aware, in_turn

    async def _pull_the_plug(self) -> bool:
        """A long answer, twice; the second time its worker dies. Whether both are the same."""
        self._title("A worker is killed in mid stream")
        prompt = random.Random(99).choices(_VOCABULARY, k=100)
        whole = await self._tokens(await self._publish(prompt, LONG_ANSWER))
        request_id = await self._publish(prompt, LONG_ANSWER)
        tokens: list[int] = []
        killed = ""
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            tokens += getattr(piece, "token_ids", ())
            if not killed and len(tokens) >= KILL_AT:
                killed = self._decisions.workers(request_id)[-1]
                await self._parts.kill(killed)
                self._say(f"[red]kill -9 {killed}[/], {len(tokens)} tokens into its answer")
        where = ", then ".join(self._decisions.workers(request_id))
        same = tokens == whole
        verdict = "equal to" if same else "[red]not[/] equal to"
        self._say(f"{len(tokens)} tokens from {where}: {verdict} the undisturbed answer\n")
        return same

    def _reckon(self, kv_aware: Showing, in_turn: Showing, *, survived: bool) -> bool:
        errors = self._errors(kv_aware)
        pairs = zip(kv_aware.asked, in_turn.asked, strict=True)
        differ = sum(a.tokens != b.tokens for a, b in pairs)
        checks = {
            f"cached tokens, expected by the router and found by vLLM, over {errors.requests} "
            f"requests: p95 off by {errors.p95:.2f} blocks (mean {errors.mean:.3f}, most "
            f"{errors.most:.0f}); at most 1": errors.p95 <= 1 and errors.requests >= 500,
            f"{kv_aware.cached_share:.1%} of the prompts came from caches, in turn "
            f"{in_turn.cached_share:.1%}": kv_aware.cached_share > in_turn.cached_share,
            f"{len(in_turn.asked) - differ} of {len(in_turn.asked)} answers are the same under "
            "both policies": not differ,
            "the answer survived its worker": survived,
        }
        for what, holds in checks.items():
            self._say(f"{'[green]holds[/]' if holds else '[red]fails[/]'}  {what}")
        self._say(f"{self._clock.now() - self._began:.0f} s in all")
        return all(checks.values())

    def _errors(self, showing: Showing) -> Errors:
        off = []
        for asked in showing.asked:
            found, (decision, *_) = self._decisions.cached(asked.id), self._decisions.of(asked.id)
            if found is not None:
                off.append(abs(found - decision.cached_tokens_predicted) / tiny_model.BLOCK)
        return Errors(len(off), sum(off) / len(off), percentile(off, 0.95), max(off))

    # --- asking ----------------------------------------------------------------------------------

    async def _ask(self, request: TraceRequest) -> Asked:
        """Publish a request of the trace and read its answer."""
        at = self._clock.now()
        limit = min(request.output_tokens, LONGEST_ANSWER)
        request_id = await self._publish(request.token_ids, limit)
        asked = Asked(request_id, UNKNOWN, len(request.token_ids), at)
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            asked.receive(piece, self._clock.now())
        until = self._clock.now() + 1.0
        while self._decisions.cached(request_id) is None and self._clock.now() < until:
            await self._clock.sleep(0.01)
        return asked

    async def _publish(self, tokens: Sequence[int], limit: int) -> str:
        body = {
            "model": MODEL, "token_ids": list(tokens), "max_tokens": limit, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        request_id = self._client.new_request_id()
        await self._client.publish(Prompt(id=request_id, kind="tokens", body=body))
        return request_id

    async def _tokens(self, request_id: str) -> list[int]:
        tokens: list[int] = []
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            tokens += getattr(piece, "token_ids", ())
        return tokens

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _title(self, text: str) -> None:
        self._console.rule(f"[bold]{text}[/]", align="left")


_VOCABULARY = range(16, tiny_model.VOCABULARY)


def shrunk_trace() -> list[TraceRequest]:
    """The trace that comes with kvlane, several times over in different words, in small prompts."""
    rows = list(read_trace(SHIPPED))
    lasts = (rows[-1].timestamp - rows[0].timestamp) / 1000
    trace = []
    for copy in range(COPIES):
        for row in rows:
            ids = [chunk * COPIES + copy for chunk in row.hash_ids]
            length = max(row.input_length // SHRINK, 1)
            tokens = tokens_of(ids, length, _VOCABULARY, chunk_tokens=tiny_model.BLOCK)
            trace.append(
                TraceRequest(row.timestamp / 1000 + copy * lasts, tokens, row.output_length)
            )
    return trace
