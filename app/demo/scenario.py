"""The demo scenario: chats and prompts, cache reuse under two policies, a worker failure, an agent.

Every text is compared with the expected one: a lost, duplicated or misplaced token is detected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import aiohttp
import openai
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvlane.app.demo import agent_scene
from kvlane.app.demo.agent_scene import AgentCall, AgentTurn
from kvlane.app.demo.demo_session import DemoEnvironment, DemoSession
from kvlane.app.demo.expected_answers import AnswerOracle, DemoAnswer
from kvlane.app.demo.policy_comparison import TracePrompt, bundled_prompts
from kvlane.app.local.processes import DeploymentFailed
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind
from kvlane.streams.prompt import Prompt

READY_S = 60.0
ANSWER_S = 60.0
MAX_TRACE_OUTPUT_TOKENS = 64
"""So that the demo takes seconds."""
TRACE_SPEEDUP = 60.0
"""Speed-up of the trace, which is a sample of the production requests (see app/data/NOTICE)."""
DISAGGREGATED_SPEEDUP = TRACE_SPEEDUP / 2
"""Speed-up of the trace with one prefill worker: at the usual one, the p99 of TTFT is 6 s."""
LONG_PROMPT = "Tell me a very long story."
LONG_ANSWER = 400
KILL_AFTER_S = 0.5
EXAMPLE_PROMPTS = ("What is a log?", "And who keeps it?", "Did anything get lost?")
KAFKA_PROMPTS = ("Why do trains wait?", "Was the harbour quiet?")


class DemoScenario(DemoSession):
    ready_timeout_s = READY_S

    def __init__(self, on: DemoEnvironment, console: Console) -> None:
        super().__init__(on, console)
        self._oracle = AnswerOracle(on.settings, on.context.clock)
        self.answers: list[DemoAnswer] = []

    async def run(self, prompts: Sequence[str]) -> bool:
        """Run it; True when every text is correct. Raises DeploymentFailed when a process ends."""
        await self._oracle.load()
        url = f"http://{self._settings.http_host}:{self._settings.http_port}/v1"
        chat = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S)
        async with chat as self._openai:
            return await self.play(lambda: self._steps(prompts or EXAMPLE_PROMPTS))

    async def _steps(self, prompts: Sequence[str]) -> bool:
        await self._wait_ready()
        await self._show_chat(prompts)
        await self._show_prompts(KAFKA_PROMPTS)
        await self._compare()
        await self._show_failover()
        is_whole = self._is_disaggregated or await self._show_agent()
        return self._check_answers() and is_whole

    # --- steps -----------------------------------------------------------------------------------

    async def _wait_ready(self) -> None:
        until = self._clock.now() + READY_S
        await self.wait_for_workers()
        while True:
            try:
                if (await self._openai.models.list()).data:
                    break
            except openai.APIError:
                if self._clock.now() > until:
                    raise DeploymentFailed(
                        f"the gateway has no model after {READY_S:g} s"
                    ) from None
            await self._clock.sleep(0.1)
        self._console.print(
            "a gateway, a preprocessor, a router, a collector, an indexer and "
            f"{self._workers_shown} are up, {self.elapsed_s:.1f} s after their start\n",
            style="dim",
        )

    async def _show_chat(self, prompts: Sequence[str]) -> None:
        """A conversation through OpenAI's package: each turn reuses the cached earlier ones."""
        self.show_title("A chat by the openai package, over HTTP")
        messages: list[Any] = []
        for prompt in prompts:
            messages.append({"role": "user", "content": prompt})
            self._console.print(f"[bold]you[/]     {escape(prompt)}", highlight=False)
            self._console.print("[bold]answer[/]  ", end="")
            answer = await self._chat(messages, show=True)
            messages.append({"role": "assistant", "content": answer.text})
            await self.wait_for_outcome(answer.id)
            self._console.print(
                f"        [dim]{self.workers_of(answer.id)}, {answer.ttft_s * 1000:.0f} ms to the "
                f"first text, {self._decisions.cached_tokens(answer.id) or 0} of "
                f"{answer.prompt_tokens} prompt "
                "tokens from its cache[/]\n",
                highlight=False,
            )

    async def _show_prompts(self, prompts: Sequence[str]) -> None:
        self.show_title("Prompts published directly to Kafka, answers read by their keys")
        answers = [
            await self._publish("chat", {"messages": [{"role": "user", "content": p}]})
            for p in prompts
        ]
        for prompt, answer in zip(prompts, answers, strict=True):
            await self._finish(answer)
            self._console.print(f"[bold]prompt[/]  {escape(prompt)}  [dim]{answer.id}[/]")
            self._console.print(f"[bold]stream[/]  {escape(answer.text)}", highlight=False)
            self._console.print(f"        [dim]{self.workers_of(answer.id)}[/]\n", highlight=False)

    async def _compare(self) -> None:
        """The trace with KV-aware routing, then, with empty caches, in round robin."""
        trace = bundled_prompts(self._oracle.vocabulary)
        longest = max(len(r.token_ids) for r in trace)
        self.show_title(
            f"{len(trace)} requests of a production trace, prompts of up to {longest} tokens"
        )
        speed = DISAGGREGATED_SPEEDUP if self._is_disaggregated else TRACE_SPEEDUP
        kv_aware = await self.replay("KV-aware", trace, self._run_trace_request, speed)
        await self._show_caches()
        warm_up = partial(self._chat, [{"role": "user", "content": "ready?"}])
        await self.replay_in_round_robin(trace, self._run_trace_request, warm_up, kv_aware, speed)

    async def _show_caches(self) -> None:
        url = f"http://{self._settings.http_host}:{self._settings.indexer_port}/workers"
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.request("GET", url, timeout=limit, raise_for_status=True) as answer:
            workers = (await answer.json())["workers"]
        held = ", ".join(f"{w['worker']} {sum(r['blocks'] for r in w['ranks'])}" for w in workers)
        self._console.print(f"cached blocks, from the indexer: {held}", style="dim")

    async def _show_failover(self) -> None:
        what = "A decode worker" if self._is_disaggregated else "A worker"
        self.show_title(f"{what} is killed in mid stream")
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
        ) as progress:
            line = progress.add_task("long answer", total=None)
            killed = ""
            turns = [{"role": "user", "content": LONG_PROMPT}]
            limits = {"max_tokens": LONG_ANSWER, "ignore_eos": True}
            async with aclosing(self._stream_chat(turns, limits)) as stream:
                async for answer in stream:
                    progress.update(
                        line, total=len(answer.expected.text), completed=len(answer.text)
                    )
                    where = self._decisions.answering_workers(answer.id)
                    if not killed and where and self._clock.now() - answer.sent_at > KILL_AFTER_S:
                        killed = where[-1]
                        await self._deployment.kill(killed)
                        progress.console.print(
                            f"[red]kill -9 {killed}[/], {len(answer.text)} of "
                            f"{len(answer.expected.text)} characters into its answer",
                            highlight=False,
                        )
        self._console.print(
            f"the answer is complete: {self.workers_of(answer.id)}, "
            f"longest pause {answer.longest_pause_s:.1f} s",
            highlight=False,
        )

    async def _show_agent(self) -> bool:
        """Kill the worker of an agent in its second call. True when each call arrived once and
        whole."""
        self.show_title("The worker of an agent is killed in the middle of a tool call")
        folder, path = agent_scene.script_file()
        with folder:
            await self.restart_with_empty_caches(
                {
                    "engine": "echo",
                    "model": agent_scene.MODEL,
                    "echo_script": path,
                    "echo_itl_ms": agent_scene.TOKEN_MS,
                },
                self._wait_for_script,
            )
            turns = await self._run_agent()
        is_whole = agent_scene.is_whole(turns)
        verdict = "each call arrived once and whole" if is_whole else "[red]a call differs[/]"
        self._console.print(verdict, highlight=False)
        return is_whole

    async def _run_agent(self) -> list[AgentTurn]:
        killed = ""

        async def interrupt(request_id: str, call: AgentCall) -> None:
            nonlocal killed
            where = self._decisions.answering_workers(request_id)
            is_middle = len(call.arguments) > len(agent_scene.ARGUMENTS) // 3
            if not killed and where and call.name == "trains" and is_middle:
                killed = where[-1]
                await self._deployment.kill(killed)
                self._console.print(
                    f"[red]kill -9 {killed}[/], {len(call.arguments)} of "
                    f"{len(agent_scene.ARGUMENTS)} characters into the arguments of {call.name}",
                    highlight=False,
                )

        turns: list[AgentTurn] = []
        messages: list[Any] = [{"role": "user", "content": agent_scene.QUESTION}]
        self._console.print(f"[bold]you[/]     {agent_scene.QUESTION}", highlight=False)
        while not turns or turns[-1].calls:
            turn = await agent_scene.take_turn(self._openai, messages, interrupt)
            turns.append(turn)
            messages.append(turn.message)
            for call in turn.calls:
                result = agent_scene.TOOLS[call.name]
                self._console.print(
                    f"[bold]call[/]    {call.name}({escape(call.arguments)}): {result}  "
                    f"[dim]{self.workers_of(turn.request_id)}[/]",
                    highlight=False,
                )
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        self._console.print(f"[bold]answer[/]  {turns[-1].text}", highlight=False)
        return turns

    async def _wait_for_script(self) -> None:
        until = self._clock.now() + READY_S
        messages: list[Any] = [{"role": "user", "content": "ready?"}]
        while True:
            try:
                await self._openai.chat.completions.create(
                    model=agent_scene.MODEL, messages=messages
                )
                return
            except openai.APIError as e:
                if self._clock.now() > until:
                    raise DeploymentFailed(f"no scripted answer after {READY_S:g} s: {e}") from None
            await self._clock.sleep(0.1)

    def _check_answers(self) -> bool:
        wrong = [a for a in self.answers if not a.is_correct]
        for answer in wrong:
            self._console.print(
                f"[red]differs:[/] {answer.id} ended with {answer.finish_reason or 'no reason'} "
                "after "
                f"{len(answer.text)} of {len(answer.expected.text)} characters on "
                f"{self.workers_of(answer.id)}",
                highlight=False,
            )
        if self._is_disaggregated:
            self._console.print(
                f"\n{self._decisions.handed_over_requests} of {len(self.answers)} requests were "
                "handed over from a prefill worker to a decode worker",
                highlight=False,
            )
        self._console.print(
            f"\n[bold]{len(self.answers) - len(wrong)} of {len(self.answers)} texts are exactly as "
            f"expected[/], {self.elapsed_s:.0f} s in all",
            highlight=False,
        )
        return not wrong

    # --- requests --------------------------------------------------------------------------------

    async def _chat(self, messages: Sequence[Any], *, show: bool = False) -> DemoAnswer:
        shown = 0
        async with aclosing(self._stream_chat(messages, {})) as stream:
            async for answer in stream:
                if show:
                    text = answer.text[shown:]
                    self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                shown = len(answer.text)
        if show:
            self._console.print()
        return answer

    async def _stream_chat(
        self, messages: Sequence[Any], limits: dict[str, Any]
    ) -> AsyncGenerator[DemoAnswer, None]:
        """Send a chat over HTTP; yields it after each chunk of its answer, and at its end."""
        body = {"model": self._settings.model, "messages": list(messages), **limits}
        answer = await self._oracle.expect_answer("", "chat", body)
        self.answers.append(answer)
        stream: Any = await self._openai.chat.completions.create(
            model=self._settings.model, messages=messages, stream=True, extra_body=limits
        )
        answer.id = stream.response.headers["x-kvlane-id"]
        try:
            async for chunk in stream:
                for choice in chunk.choices:
                    text, reason = choice.delta.content or "", choice.finish_reason
                    answer.add_text(text, reason, self._clock.now())
                yield answer
        except openai.APIError as e:
            answer.finish_reason = str(e)
            yield answer

    async def _run_trace_request(self, request: TracePrompt) -> DemoAnswer:
        limit = min(request.output_tokens, MAX_TRACE_OUTPUT_TOKENS)
        body = {"token_ids": request.token_ids, "max_tokens": limit}
        return await self._finish(await self._publish("tokens", body))

    async def _publish(self, kind: TokenizedKind, body: dict[str, Any]) -> DemoAnswer:
        body = {"model": self._settings.model, **body}
        prompt = Prompt(id=self._client.new_request_id(), kind=kind, body=body)
        answer = await self._oracle.expect_answer(prompt.id, kind, body)
        self.answers.append(answer)
        await self._client.publish(prompt)
        return answer

    async def _finish(self, answer: DemoAnswer) -> DemoAnswer:
        try:
            async for piece in self._client.stream(answer.id, timeout_s=ANSWER_S):
                answer.add_record(piece, self._clock.now())
        except TimeoutError:
            answer.finish_reason = "timeout"
        await self.wait_for_outcome(answer.id)
        return answer
