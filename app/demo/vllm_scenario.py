"""The demo scenario with vLLM: two workers on a CPU or GPU, and a tiny generated model.

The answers of random weights are not known in advance, but do not depend on worker or cache: each
request is sent under both policies, a long one with and without a worker failure, and the answers
must be equal. With a prefill and a decode worker, the trace is sent to the decode worker alone
first, then, with empty caches, handed over.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
from rich.markup import escape

from kvlane.app.demo import tiny_model
from kvlane.app.demo.demo_session import DemoSession
from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.demo.policy_comparison import PolicyRun, TracePrompt, chunk_tokens
from kvlane.app.engine.simulated.text_generator import ExpectedAnswer
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, CHUNK_TOKENS, read_trace
from kvlane.streams.prompt import Prompt

MODEL = "tiny"
VLLM_WORKERS = 2
BLOCKS = 384
"""Size of each cache; the trace has several times as many, so caches must evict."""
CONTEXT_LENGTH = 2048
READY_S = 600.0
"""vLLM takes ten seconds to start on an idle machine, and minutes on one that is not."""
ANSWER_S = 120.0
SHRINK_FACTOR = CHUNK_TOKENS // tiny_model.BLOCK_SIZE
"""A chunk of the trace becomes one block, so that prompts of 12 000 tokens have 750."""
TRACE_COPIES = 2
"""The second time with other tokens."""
REQUESTS_PER_S = 8.0
DISAGGREGATED_COPIES, DISAGGREGATED_PER_S = 1, 4.0
"""Slower with one prefill and one decode worker: an engine that holds blocks is never idle."""
LONGEST_ANSWER = 12
LONG_ANSWER = 600
KILL_AFTER_TOKENS = 100
MIN_HANDED_OVER = 0.9
"""Share of prompts; on a busy machine the time limit of a hand-over may pass."""
MIN_COMPARED = 0.8
"""Share of requests with an expected and a found number of cached tokens: one attempt."""
UNKNOWN_ANSWER = ExpectedAnswer((), "", "length")


def vllm_settings(folder: Path, *, hands_over: bool = False) -> dict[str, Any]:
    """Settings of a deployment that serves the model in a folder; `hands_over`: all prompts."""
    engine_args = tiny_model.engine_arguments(BLOCKS, CONTEXT_LENGTH)
    settings: dict[str, Any] = {
        "engine": "vllm",
        "model": MODEL,
        "model_path": tiny_model.make_model(folder),
        "engine_args": engine_args,
        "context_length": CONTEXT_LENGTH,
        "worker_timeout_s": 10.0,  # both engines and everything else share few cores
    }
    if hands_over:
        engine_args |= tiny_model.connector_arguments()
        settings["handover_min_tokens"] = 0
    return settings


class VllmScenario(DemoSession):
    ready_timeout_s = READY_S

    async def run(self) -> bool:
        self._console.print(f"{self._workers_shown} with vLLM are starting", style="dim")
        return await self.play(self._steps)

    async def _steps(self) -> bool:
        await self.wait_for_workers()
        self.show(f"ready, {self.elapsed_s:.0f} s after the start\n")
        await self._chat()
        trace = shrunk_trace(DISAGGREGATED_COPIES if self._is_disaggregated else TRACE_COPIES)
        longest = max(len(request.token_ids) for request in trace)
        self.show_title(
            f"{len(trace)} requests of a production trace, shrunk to prompts of up to {longest} "
            "tokens"
        )
        if self._is_disaggregated:
            checks = await self._compare_whole(trace)
        else:
            checks = await self._compare_policies(trace)
        checks["the answer survived its worker"] = await self._show_failover()
        return self._show_checks(checks)

    # --- steps -----------------------------------------------------------------------------------

    async def _chat(self) -> None:
        self.show_title("A chat by the openai package (random weights: it makes no sense)")
        url = f"http://{self._settings.http_host}:{self._settings.http_port}/v1"
        turn: Any = {"role": "user", "content": "What is a log?"}
        limits = {"ignore_eos": True}
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=ANSWER_S) as chat:
            reply = await chat.chat.completions.create(
                model=MODEL, messages=[turn], max_tokens=24, temperature=0, extra_body=limits
            )
        text = reply.choices[0].message.content or ""
        self._console.print(f"[bold]answer[/]  {escape(repr(text))}\n", highlight=False)

    async def _compare_policies(self, trace: Sequence[TracePrompt]) -> dict[str, bool]:
        """The trace with KV-aware routing, then, with empty caches, in round robin."""
        speed = _speed(trace, REQUESTS_PER_S)
        kv_aware = await self.replay("KV-aware", trace, self._run_request, speed)
        in_turn = await self.replay_in_round_robin(
            trace, self._run_request, partial(self._warm_up, trace), kv_aware, speed
        )
        return {
            **self._check_predictions(kv_aware),
            f"{kv_aware.cached_share:.1%} of the prompt tokens were cached, in round robin "
            f"{in_turn.cached_share:.1%}": kv_aware.cached_share > in_turn.cached_share,
            **_check_answers("under both policies", kv_aware, in_turn),
        }

    async def _compare_whole(self, trace: Sequence[TracePrompt]) -> dict[str, bool]:
        """The trace on the decode worker alone, then, with empty caches, handed over."""
        decode_worker = next(part.name for part in self._parts if part.role == "decode")
        speed = _speed(trace, DISAGGREGATED_PER_S)
        on_one = partial(self._run_request, worker=decode_worker)
        whole = await self.replay("one worker", trace, on_one, speed)
        changes = {"enforce_disaggregation": True}
        await self.restart_with_empty_caches(changes, partial(self._warm_up, trace))
        handed_over = await self.replay("handed over", trace, self._run_request, speed)
        self.show_runs(whole, handed_over)
        self._console.print()
        phases = [
            [decision.phase for decision in self._decisions.decisions(answer.id)]
            for answer in handed_over.answers
        ]
        count = phases.count(["prefill", "decode"])
        return {
            f"{count} of {len(phases)} prompts were handed over from a prefill worker to a decode "
            f"worker; limit {MIN_HANDED_OVER:.0%}": count >= MIN_HANDED_OVER * len(phases),
            **self._check_predictions(handed_over),
            **_check_answers("to those of one worker", whole, handed_over),
        }

    async def _show_failover(self) -> bool:
        """A long answer, twice; kills its worker the second time. Whether both are equal."""
        what = "A decode worker" if self._is_disaggregated else "A worker"
        self.show_title(f"{what} is killed in mid stream")
        prompt = random.Random(99).choices(_VOCABULARY, k=100)
        whole = await self._tokens(await self._publish(prompt, LONG_ANSWER))
        request_id = await self._publish(prompt, LONG_ANSWER)
        tokens: list[int] = []
        killed = ""
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            tokens += getattr(piece, "token_ids", ())
            if not killed and len(tokens) >= KILL_AFTER_TOKENS:
                killed = self._decisions.workers_of(request_id)[-1]
                await self._deployment.kill(killed)
                self.show(f"[red]kill -9 {killed}[/], {len(tokens)} tokens into its answer")
                if self._is_disaggregated:
                    await self._deployment.start(killed)
        where = self.workers_of(request_id)
        same = tokens == whole
        verdict = "equal to" if same else "[red]not[/] equal to"
        self.show(f"{len(tokens)} tokens from {where}: {verdict} the uninterrupted answer\n")
        return same

    def _show_checks(self, checks: Mapping[str, bool]) -> bool:
        for what, holds in checks.items():
            self.show(f"{'[green]passed[/]' if holds else '[red]failed[/]'}  {what}")
        self.show(f"{self.elapsed_s:.0f} s in all")
        return all(checks.values())

    def _check_predictions(self, run: PolicyRun) -> dict[str, bool]:
        off = []
        for answer in run.answers:
            found = self._decisions.cached_tokens(answer.id)
            predicted = self._decisions.decisions(answer.id)[0].cached_tokens_predicted
            if found is not None:
                off.append(abs(found - predicted) / tiny_model.BLOCK_SIZE)
        p95 = float(np.percentile(off, 95, method="inverted_cdf"))
        return {
            f"cached tokens, expected by the router and found by vLLM, over {len(off)} requests: "
            f"p95 error {p95:.2f} blocks (mean {sum(off) / len(off):.3f}, max {max(off):.0f}); "
            "limit 1": p95 <= 1 and len(off) >= MIN_COMPARED * len(run.answers)
        }

    # --- requests --------------------------------------------------------------------------------

    async def _warm_up(self, trace: Sequence[TracePrompt]) -> None:
        await self._run_request(trace[0]._replace(token_ids=[5, 6, 7]))

    async def _run_request(self, request: TracePrompt, worker: str = "") -> DemoAnswer:
        """Publish a request of the trace and read its answer; `worker`: where all of it runs."""
        at = self._clock.now()
        limit = min(request.output_tokens, LONGEST_ANSWER)
        request_id = await self._publish(request.token_ids, limit, worker)
        answer = DemoAnswer(request_id, UNKNOWN_ANSWER, len(request.token_ids), at)
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            answer.add_record(piece, self._clock.now())
        await self.wait_for_outcome(request_id)
        return answer

    async def _publish(self, tokens: Sequence[int], limit: int, worker: str = "") -> str:
        body: dict[str, Any] = {
            "model": MODEL, "token_ids": list(tokens), "max_tokens": limit, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        if worker:
            body["nvext"] = {"backend_instance_id": worker}
        request_id = self._client.new_request_id()
        await self._client.publish(Prompt(id=request_id, kind="tokens", body=body))
        return request_id

    async def _tokens(self, request_id: str) -> list[int]:
        tokens: list[int] = []
        async for piece in self._client.stream(request_id, timeout_s=ANSWER_S):
            tokens += getattr(piece, "token_ids", ())
        return tokens


def _speed(trace: Sequence[TracePrompt], requests_per_s: float) -> float:
    return (trace[-1].arrival_s - trace[0].arrival_s) / len(trace) * requests_per_s


def _check_answers(equal_to: str, run: PolicyRun, other: PolicyRun) -> dict[str, bool]:
    pairs = list(zip(run.answers, other.answers, strict=True))
    equal = sum(a.tokens == b.tokens for a, b in pairs)
    return {f"{equal} of {len(pairs)} answers are equal {equal_to}": equal == len(pairs)}


_VOCABULARY = range(16, tiny_model.VOCABULARY_SIZE)


def shrunk_trace(copies: int) -> list[TracePrompt]:
    """The trace that ships with kvlane, repeated with other tokens, with shorter prompts."""
    rows = list(read_trace(BUNDLED_TRACE))
    lasts = (rows[-1].timestamp - rows[0].timestamp) / 1000
    trace = []
    for copy in range(copies):
        for row in rows:
            ids = [chunk * copies + copy for chunk in row.hash_ids]
            length = max(row.input_length // SHRINK_FACTOR, 1)
            tokens = chunk_tokens(ids, length, _VOCABULARY, chunk_tokens=tiny_model.BLOCK_SIZE)
            trace.append(
                TracePrompt(row.timestamp / 1000 + copy * lasts, tokens, row.output_length)
            )
    return trace
