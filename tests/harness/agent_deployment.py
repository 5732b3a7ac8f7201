"""Workers with a script of calls and a gateway in processes, on a real broker, to be killed in the
middle of answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import SecretStr

from kvlane.app.gateway import Gateway
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.records import Fencing, Started
from kvlane.streams.topics import LEDGER
from tests.harness.kafka_processes import app_process, provisioned, wait_answered
from tests.harness.key_files import SECRET, KeyFileHarness, auth_headers

LANES = 2
CALLS = ('{"name": "weather", "arguments": {"city": "Köln"}}', '{"name": "now", "arguments": {}}')
TAGGED = [f"<tool_call>\n{call}\n</tool_call>" for call in CALLS]
WEATHER = json.dumps({"city": "Köln", "days": [{"weather": "rain"}] * 5}, ensure_ascii=False)
SCRIPT = {
    "one": f"<think>The weather decides.</think>I look at the weather first.\n{TAGGED[0]}",
    "two": f"<think>Both of them.</think>{TAGGED[0]}\n{TAGGED[1]}",
    "json": f"<think>The week has days.</think>{WEATHER}",
    "regex": f"<think>It has some words.</think>{'rain, ' * 20}",
}


class AgentDeployment(NamedTuple):
    """Two workers and a gateway, each in a process, and another gateway in this one. `key`: of a
    tenant; `limited_key`: of one that may have no request."""

    log: KafkaLog
    processes: dict[str, subprocess.Popen[bytes]]
    url: str
    killed_url: str
    key: str
    limited_key: str

    async def kill(self) -> None:
        """End a worker that has begun an answer, and the gateway."""
        victim = next(r.worker for r in await self._ledger() if isinstance(r, Started))
        self.processes[victim].kill()
        self.processes["g"].kill()

    async def has_continued(self) -> bool:
        """Whether an answer went on with another worker."""
        return any(isinstance(record, Fencing) for record in await self._ledger())

    async def _ledger(self) -> list[AnyRecord]:
        ends = await self.log.end_offsets(LEDGER, range(LANES))
        reader = self.log.reader()
        reader.assign({Partition(LEDGER, lane): 0 for lane in ends})
        found: list[AnyRecord] = []
        while any(reader.position(Partition(LEDGER, lane)) < end for lane, end in ends.items()):
            for records in (await reader.poll(1.0)).values():
                found += map(decode, records)
        await reader.close()
        return found


@asynccontextmanager
async def agent_deployment(
    kafka: Broker, prefix: str, folder: Path
) -> AsyncIterator[AgentDeployment]:
    keys = KeyFileHarness(folder)
    key, limited_key = keys.add("acme"), keys.add("small")
    keys.limit("small", requests=0)
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=prefix, lanes=LANES,
        router_id="r", status_port=None, http_port=0, hash_secret="tests", worker_timeout_s=3,
        api_keys_file=keys.path, stream_secret=SecretStr(SECRET),
    )  # fmt: skip
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    port = str(free_ports(1)[0])
    environment = os.environ | {
        "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": prefix,
        "KVLANE_LANES": str(LANES),
        "KVLANE_ENGINE": "echo",
        "KVLANE_ECHO_SCRIPT": str(folder / "script.json"),
        "KVLANE_ECHO_ITL_MS": "40",
        "KVLANE_HASH_SECRET": "tests",
        "KVLANE_STATUS_PORT": "",
        "KVLANE_HTTP_PORT": port,
        "KVLANE_API_KEYS_FILE": str(keys.path),
        "KVLANE_STREAM_SECRET": SECRET,
    }
    kinds = {"w1": "worker", "w2": "worker", "g": "gateway"}
    async with provisioned(settings) as log, AsyncExitStack() as parts:
        with ExitStack() as processes:
            started = {
                name: processes.enter_context(
                    app_process(
                        kind, folder / f"{name}.log", environment | {"KVLANE_WORKER_ID": name}
                    )
                )
                for name, kind in kinds.items()
            }
            own: list[Router | Gateway] = []
            for part in (Router, Gateway):
                of_kind = KafkaLog(settings.kafka_connection(part.__name__), prefix=prefix)
                ctx = ProcessContext(part.__name__)
                await of_kind.start()
                parts.push_async_callback(of_kind.close)
                parts.push_async_callback(ctx.cancel_tasks)
                own.append(part(of_kind, settings, ctx))
                await own[-1].start()
                parts.push_async_callback(own[-1].stop)
            urls = own[1].url, f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(headers=auth_headers(key)) as http:
                for url in urls:
                    models = f"{url}/v1/models"
                    await wait_answered(started["g"], http, models, lambda got: got.json()["data"])
            yield AgentDeployment(log, started, *urls, key, limited_key)
