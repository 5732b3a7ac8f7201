"""A batch harness: a gateway, runners of jobs, and an answering fleet that is a loop of the test.

The fleet reads `batch` and appends one result for each prompt, as routers, workers and collectors
do together; prompts that repeat an id are ignored, as they do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from kvlane.app.batches.job_runner import JobRunner
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Result, ResultError
from kvlane.streams.topics import BATCH, RESULTS, lane_of
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.key_files import auth_headers
from tests.harness.memory_world import MemoryWorld

CHATS = "/v1/chat/completions"
BOUNDARY = "a-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(content: bytes | None, *, filename: str = "in.jsonl", **fields: str) -> bytes:
    """A multipart body; fields come before the file."""
    parts = [
        f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
        for name, value in ({"purpose": "batch"} | fields).items()
    ]
    if content is not None:
        head = f'content-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
        parts.append(head.encode() + content)
    lines = b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY.encode(), part) for part in parts)
    return lines + b"--%s--\r\n" % BOUNDARY.encode()


def chat_line(name: str, url: str = CHATS, **over: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"say {name}"}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": body} | over


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class AnsweringFleet:
    """Appends a result for each prompt of `batch`. `failing`: custom ids that get an error."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.prompts: dict[str, dict[str, Any]] = {}
        self.cancelled: set[str] = set()
        self.seen = 0
        self.failing: set[str] = set()
        self.answers: Callable[[str], bool] = lambda _: True
        """Whether a prompt of this custom id ends."""
        self.delay_s = 0.01
        self._answered: set[str] = set()

    async def run(self) -> None:
        read: dict[int, int] = {}
        while True:
            for partition in range(self.world.broker.partitions[BATCH]):
                records = self.world.records(BATCH, partition)
                for record in records[read.get(partition, 0) :]:
                    self._take(json.loads(record.value or b"{}"))
                read[partition] = len(records)
            for name in [n for n in self.prompts if n not in self._answered]:
                if name in self.cancelled:
                    self._answer(name, "cancelled", 499)
                elif self.answers(self.prompts[name]["custom_id"]):
                    self._answer(name, "completed", 200)
            await self.world.sleep(self.delay_s)

    def _take(self, prompt: dict[str, Any]) -> None:
        if prompt.get("kind") == "cancel":
            self.cancelled.add(prompt["id"])
        else:
            self.seen += 1
            self.prompts.setdefault(prompt["id"], prompt)

    def _answer(self, name: str, status: str, code: int) -> None:
        self._answered.add(name)
        prompt = self.prompts[name]
        custom_id = prompt["custom_id"]
        error = None
        if custom_id in self.failing:
            status, code = "failed", 400
        if code != 200:
            error = ResultError(message="no", type="invalid_request_error", code=status)
        body = {"object": "chat.completion", "text": custom_id} if code == 200 else None
        result = Result(
            id=name, status=status, status_code=code, model="demo", body=body, error=error,
            batch_id=prompt["batch_id"], custom_id=custom_id,
        )  # fmt: skip
        lane = lane_of(name, self.world.lanes)
        self.world.broker.append(RESULTS, lane, [encode(result, name)])


class BatchHarness:
    """One gateway, and runners by name."""

    def __init__(self, gateway: GatewayHarness, fleet: AnsweringFleet) -> None:
        self.world = gateway.world
        self.gateway = gateway
        self.fleet = fleet
        self.runners: dict[str, tuple[JobRunner, MemoryLog, ProcessContext]] = {}

    @staticmethod
    async def open(world: MemoryWorld, *runners: str, **over: Any) -> BatchHarness:
        """A gateway, a fleet that answers, and these runners."""
        harness = BatchHarness(await GatewayHarness.open(world, **over), AnsweringFleet(world))
        world.spawn(harness.fleet.run())
        for name in runners:
            await harness.start_runner(name, **over)
        return harness

    async def start_runner(self, name: str, **over: Any) -> JobRunner:
        log = await self.world.connect(name)
        ctx = ProcessContext(name, self.world.clock, random.Random(name))
        runner = JobRunner(log, memory_settings(**over), ctx)
        await runner.start()
        self.runners[name] = runner, log, ctx
        return runner

    async def kill(self, name: str) -> None:
        """Kill a runner, as kill -9 does."""
        _, log, ctx = self.runners.pop(name)
        log.kill()
        await ctx.cancel_tasks()

    async def send(self, method: str, path: str, body: Any = None, token: str = "") -> HttpExchange:
        headers = auth_headers(token) if token else {}
        return await self.gateway.send(method, path, body, headers).wait_done()

    async def upload(self, content: bytes, token: str = "") -> str:
        headers = auth_headers(token) if token else {}
        answer = HttpExchange(
            self.gateway.gateway.http, "POST", "/v1/files", form(content), FORM | headers
        )
        await answer.wait_done()
        assert answer.status == 200, answer.content
        file_id: str = answer.json["id"]
        return file_id

    async def submit(self, content: bytes, token: str = "", **over: Any) -> str:
        """The id of a new batch over this input."""
        body = {"input_file_id": await self.upload(content, token), "endpoint": CHATS} | over
        answer = await self.send("POST", "/v1/batches", body, token)
        assert answer.status == 200, answer.content
        assert answer.json["status"] == "validating"
        batch_id: str = answer.json["id"]
        return batch_id

    async def batch(self, batch_id: str, token: str = "") -> dict[str, Any]:
        answer = await self.send("GET", f"/v1/batches/{batch_id}", token=token)
        assert answer.status == 200, answer.content
        told: dict[str, Any] = answer.json
        return told

    async def ended(
        self, batch_id: str, token: str = "", within_s: float = 120.0
    ) -> dict[str, Any]:
        """The batch, once it has ended."""
        deadline = self.world.clock.now() + within_s
        while True:
            batch = await self.batch(batch_id, token)
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            assert self.world.clock.now() < deadline, batch
            await self.world.sleep(0.1)

    async def lines(self, file_id: str | None, token: str = "") -> list[dict[str, Any]]:
        """The lines of a file; none without one."""
        if file_id is None:
            return []
        answer = await self.send("GET", f"/v1/files/{file_id}/content", token=token)
        assert answer.status == 200, answer.content
        return [json.loads(line) for line in answer.content.splitlines()]
