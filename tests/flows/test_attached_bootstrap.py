"""Tests of workers beside two SGLang servers in disaggregation mode, which meet in rooms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

from kvlane.app.engine.attached.request_body import FAKE_BOOTSTRAP_HOST
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import EngineError, GenerateContext, InvalidRequest
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.serving.engine_health import PROBE
from kvlane.app.settings import Settings
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import BootstrapInfo, Request, StopConditions
from tests.flows.test_attached_handover import outputs
from tests.harness.model_servers import TOKENIZER, ModelServer
from tests.harness.sglang_servers import MeetingRooms, SglangServer

CLOCK = SystemClock()
PROMPT = list(range(5, 45))
ADDRESS = ("10.0.0.7", 8998)


class Pair(NamedTuple):
    """Engines attached to two servers, and the rooms of these."""

    rooms: MeetingRooms
    servers: dict[str, SglangServer]
    engines: dict[str, ValidatingEngine]
    configs: dict[str, EngineConfig]


def attached(server: ModelServer, **over: Any) -> AttachedEngine:
    where = ServerAddress(server.url, read_timeout_s=5.0, start_timeout_s=5.0)
    given = {"transfer_lease_s": 300.0} | over
    return AttachedEngine(CLOCK, where, TOKENIZER, AssumedLimits(512, 16, 40), **given)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        made = Pair(MeetingRooms(), {}, {}, {})
        for mode in ("prefill", "decode"):
            behind = EchoEngine(CLOCK, 0.0, max_num_seqs=8)
            await behind.start("behind")
            server = await stack.enter_async_context(SglangServer(behind, mode, made.rooms))  # type: ignore[arg-type]
            address = ADDRESS if mode == "prefill" else None
            engine = ValidatingEngine(attached(server, bootstrap=address))
            made.configs[mode] = await engine.start("w")
            stack.push_async_callback(engine.cleanup)
            made.servers[mode], made.engines[mode] = server, engine
        yield made


def make_request(max_tokens: int, room: int | None = 2**63 - 1, **more: Any) -> Request:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    info = None if room is None else BootstrapInfo(*ADDRESS, room)
    return Request(id="a", token_ids=pack_tokens(PROMPT), stop=stop, bootstrap_info=info, **more)


async def test_prefill_worker_advertises_the_endpoint_of_its_server(pair: Pair) -> None:
    config = pair.configs["prefill"]
    assert (config.bootstrap_host, config.bootstrap_port) == ADDRESS
    assert config.transfer_lease_s == 300.0
    config = pair.configs["decode"]
    assert (config.bootstrap_host, config.bootstrap_port) == (None, None)


async def test_two_servers_that_meet_answer_as_one(pair: Pair) -> None:
    waiting = asyncio.ensure_future(outputs(pair.engines["decode"], "decode", make_request(12)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    (last,) = await outputs(pair.engines["prefill"], "prefill", make_request(1))
    assert (last.finish_reason, last.transfer) == ("length", None)
    tokens = [token for output in await waiting for token in output.token_ids]
    assert tokens == echo_answer(PROMPT, 12)
    assert (pair.rooms.met, pair.rooms.faults) == ([2**63 - 1], [])
    for mode, streams in (("prefill", False), ("decode", True)):
        sent = pair.servers[mode].received_bodies()[-1]
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ADDRESS
        assert sent.get("stream", False) == streams
        assert "kv_transfer_params" not in sent


async def test_trials_and_probes_need_no_other_server(pair: Pair) -> None:
    for mode, engine in pair.engines.items():
        assert await outputs(engine, "aggregated", PROBE)
        bodies = pair.servers[mode].received_bodies()
        assert {b["bootstrap_host"] for b in bodies} == {FAKE_BOOTSTRAP_HOST}
    assert (pair.rooms.met, pair.rooms.faults) == ([], [])


async def test_whole_request_is_refused_with_the_settings_that_avoid_it(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="KVLANE_ENFORCE_DISAGGREGATION"):
        await outputs(pair.engines["decode"], "aggregated", make_request(12, room=None))
    assert not pair.rooms.faults


async def test_abort_closes_the_connection_of_a_server_that_waits(pair: Pair) -> None:
    engine, context = pair.engines["decode"], GenerateContext("a", phase="decode")
    stream = engine.generate(make_request(12), context)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    context.cancel()
    await engine.abort(context)
    assert (await waiting).finish_reason == "cancelled"
    await stream.aclose()


async def test_bootstrap_endpoint_is_for_servers_of_sglang() -> None:
    behind = EchoEngine(CLOCK, 0.0, max_num_seqs=8)
    await behind.start("behind")
    async with ModelServer(behind) as server:
        engine = attached(server, bootstrap=ADDRESS)
        with pytest.raises(EngineError, match="KVLANE_ATTACH_BOOTSTRAP is set, but"):
            await engine.start("w")
        await engine.cleanup()


@pytest.mark.parametrize(
    ("value", "address"),
    [("", None), ("10.0.0.7:8998", ADDRESS), ("[fe80::1]:1", ("[fe80::1]", 1))],
)
def test_address_of_the_endpoint(value: str, address: tuple[str, int] | None) -> None:
    settings = Settings(_env_file=None, attach_bootstrap=value)
    assert settings.attach_bootstrap_address == address


@pytest.mark.parametrize("value", ["10.0.0.7", "http://a:1", "a:b", ":8998"])
def test_wrong_address_of_the_endpoint_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"give host:port, such as 10\.0\.0\.7:8998"):
        Settings(_env_file=None, attach_bootstrap=value)


def test_endpoint_needs_the_time_that_servers_wait(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="KVLANE_ATTACH_BOOTSTRAP needs"):
        Settings(
            _env_file=None, engine="attached", attach_url="http://a:1", model_path=tmp_path,
            attach_bootstrap="a:1",
        )  # fmt: skip
