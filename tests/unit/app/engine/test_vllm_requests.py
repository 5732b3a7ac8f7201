"""Tests of the adapter of vLLM, without vLLM; tests/vllm has the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from kvlane.app.engine.interface import EngineDead, EngineError, GenerateContext, InvalidRequest
from kvlane.app.engine.vllm import versions
from kvlane.app.engine.vllm.async_llm import VllmEngine, _output, _transfer_lease_s
from kvlane.app.engine.vllm.event_receiver import MAX_PENDING_MESSAGES, KvEventReceiver
from kvlane.app.engine.vllm.params import extra_args, vllm_priority, vllm_prompt
from kvlane.app.engine.vllm.stats import VllmStats
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    EngineEvent,
    EventsLost,
    UnreadableEvent,
)
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineStats, LogProb
from kvlane.streams.request import Hints, MultimodalData, PrefillResult, Request

HANDLE = b'{"kv_transfer_params": {"remote_host": "a"}}'


def test_additional_arguments_are_passed_on() -> None:
    assert extra_args(Request(id="a")) == {}
    assert extra_args(Request(id="a", extra_args=b'{"x": [1]}')) == {"x": [1]}


@pytest.mark.parametrize("handed", [HANDLE, b'{"remote_host": "a"}'])
def test_transfer_of_a_prefill_is_passed_on_beside_the_arguments(handed: bytes) -> None:
    result = PrefillResult(disaggregated_params=handed)
    request = Request(id="a", extra_args=b'{"x": 1}', prefill_result=result)
    assert extra_args(request) == {"kv_transfer_params": {"remote_host": "a"}, "x": 1}


@pytest.mark.parametrize("handed", [None, PrefillResult(disaggregated_params=HANDLE)])
def test_arguments_name_no_engine_to_fetch_a_cache_from(handed: PrefillResult | None) -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params: reserved"):
        extra_args(Request(id="a", extra_args=HANDLE, prefill_result=handed))


def came(**answer: Any) -> Any:
    """A step of an answer, in vLLM's words."""
    plain = {"token_ids": [5], "finish_reason": None, "stop_reason": None, "logprobs": None}
    step = {"outputs": [SimpleNamespace(**(plain | answer))], "kv_transfer_params": None}
    return SimpleNamespace(**step)


def test_transfer_of_prefill_is_accepted_by_decode() -> None:
    step = came(finish_reason="length")
    step.kv_transfer_params = {"remote_host": "a"}
    output = _output(step, None, stopped=False)
    assert output.transfer is not None
    handed = PrefillResult(disaggregated_params=output.transfer)
    assert extra_args(Request(id="a", prefill_result=handed)) == {
        "kv_transfer_params": {"remote_host": "a"}
    }


@pytest.mark.parametrize(
    ("theirs", "stopped", "ours"),
    [
        (None, False, None), (None, True, "cancelled"), ("stop", False, "stop"),
        ("length", True, "length"), ("abort", False, "cancelled"), ("repetition", False, "stop"),
        ("error", False, "error"), ("of a newer vLLM", False, "error"),
    ],
)  # fmt: skip
def test_ends(theirs: str | None, ours: str | None, *, stopped: bool) -> None:
    assert _output(came(finish_reason=theirs), None, stopped=stopped).finish_reason == ours


def test_own_probability_is_first_and_then_the_requested_ones() -> None:
    entries = {
        5: SimpleNamespace(logprob=-3.0, rank=9),
        7: SimpleNamespace(logprob=-0.5, rank=1),
        8: SimpleNamespace(logprob=-1.0, rank=2),
    }
    output = _output(came(logprobs=[entries]), 2, stopped=False)
    assert output.log_probs == ((LogProb(5, -3.0), LogProb(7, -0.5), LogProb(8, -1.0)),)


def test_probes_transfer_nothing() -> None:
    handed = PrefillResult(disaggregated_params=HANDLE)
    assert extra_args(Request(id="a", prefill_result=handed, is_probe=True)) == {}
    assert extra_args(Request(id="a", is_probe=True), "prefill") == {}


def test_prefill_requests_a_transfer() -> None:
    assert extra_args(Request(id="a", extra_args=b'{"x": 1}'), "prefill") == {
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        "x": 1,
    }


@pytest.mark.parametrize(
    ("connector", "extra", "lease_s"),
    [
        ("NixlConnector", {}, 30.0),
        ("NixlConnector", {"kv_lease_duration": 5}, 5.0),
        ("OtherConnector", {}, None),
        ("OtherConnector", {"kv_lease_duration": 5}, 5.0),
    ],
)
def test_lease_is_that_of_the_connector(
    connector: str, extra: dict[str, int], lease_s: float | None
) -> None:
    config = SimpleNamespace(kv_connector=connector, get_from_extra_config=extra.get)
    assert _transfer_lease_s(config) == lease_s
    assert _transfer_lease_s(None) is None


async def test_media_are_fetched_within_the_bounds_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class MediaConnector:
        def __init__(self, **bounds: Any) -> None:
            self.bounds = bounds

        async def fetch_image_async(self, url: str) -> Any:
            return url, self.bounds

        fetch_audio_async = fetch_video_async = fetch_image_async

    bounds = {"allowed_local_media_path": "/media", "allowed_media_domains": ["a.example"]}
    media = SimpleNamespace(MediaConnector=MediaConnector)
    inputs = SimpleNamespace(tokens_input=None)
    for name, module in (("multimodal.media", media), ("inputs", inputs)):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.multimodal", SimpleNamespace())  # type: ignore[arg-type]
    image = MultimodalData(kind="url", url="https://a.example/1.png")
    request = Request(id="a", token_ids=pack_tokens([1]), multi_modal_data={"image_url": (image,)})
    config = SimpleNamespace(is_multimodal_model=True, **bounds)
    prompt = await vllm_prompt(request, config)
    assert prompt["multi_modal_data"] == {"image": [(image.url, bounds)]}
    for hosts, path, url in (
        (["a.example"], "", "https://b.example/1.png"),
        (None, "", "http://169.254.169.254/"),
        ([], "", "file:///etc/passwd"),
        (None, "/media", "http://b.example/1.png"),
    ):
        other = MultimodalData(kind="url", url=url)
        request = replace(request, multi_modal_data={"image_url": (other,)})
        config.allowed_media_domains, config.allowed_local_media_path = hosts, path
        with pytest.raises(InvalidRequest, match="not allowed"):
            await vllm_prompt(request, config)
    given = MultimodalData(kind="url", url="data:image/png;base64,AA")
    request = replace(request, multi_modal_data={"image_url": (given,)})
    assert (await vllm_prompt(request, config))["multi_modal_data"]["image"][0][0] == given.url


@pytest.mark.parametrize(
    "args", [b"[]", b"{", b"[" * 5000, b'{"kv_transfer_params": 1}', b'{"kvlane_taken_tokens": 3}']
)
def test_value_that_is_no_object_or_reserved_is_refused(args: bytes) -> None:
    with pytest.raises(InvalidRequest, match="extra_args"):
        extra_args(Request(id="a", extra_args=args))


def test_higher_priorities_go_first_where_lower_numbers_do() -> None:
    assert vllm_priority(Request(id="a")) == 0
    assert vllm_priority(Request(id="a", hints=Hints(priority=3))) == -3


def test_metrics_add_up_over_ranks_and_end_with_the_last_request() -> None:
    figures = VllmStats()
    figures.blocks_per_rank = 100

    def step(rank: int, running: int, used: float) -> None:
        class Stats:
            num_running_reqs = running
            num_waiting_reqs = 1
            num_skipped_waiting_reqs = 1
            kv_cache_usage = used

        figures.on_step(rank, Stats)

    step(0, 3, 0.5)
    step(1, 2, 0.1)
    step(1, 1, 0.2)
    assert figures.snapshot(idle=False) == EngineStats(
        running=4, waiting=4, kv_used_blocks=70, kv_total_blocks=200, steps=3
    )
    assert figures.snapshot(idle=True) == EngineStats(kv_total_blocks=200, steps=3)


def test_missing_vllm_is_reported_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "PACKAGE_NAMES", ())
    with pytest.raises(EngineError, match="not installed") as raised:
        versions.installed_version()
    assert "pip install -e" in raised.value.correction


@pytest.mark.parametrize("version", ["0.9.1", "0.31.0", "0.28.0+cpu"])
def test_old_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions, "version", lambda package: version)
    with pytest.raises(EngineError, match=r"too old, 0\.32 is required"):
        versions.installed_version()


@pytest.mark.parametrize(
    ("version", "warns"), [("0.32.0", False), ("0.32.4+cpu", False), ("0.40.0", True)]
)
def test_new_vllm_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warns: bool
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: version)
    assert versions.installed_version() == version
    assert bool(caplog.records) == warns


def test_installation_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "entry_points", lambda group: [])
    with pytest.raises(EngineError, match="reinstall it"):
        versions.check_plugin()


def frames(number: int, rank: int, *events: Any) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, list(events), rank])]


def removed(block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"}


ORPHAN = """
import os, time
from kvlane.app.engine.vllm.parent_death import PARENT_PID_VARIABLE, end_with_parent
os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
if os.fork() == 0:
    end_with_parent()  # before its number is known: then it may be orphaned
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_core_ends_with_a_worker_that_was_killed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    core = int(worker.stdout.readline())
    assert is_alive(core)
    worker.kill()
    worker.communicate()
    until = time.monotonic() + 30
    while is_alive(core):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text("utf-8")
    except FileNotFoundError:
        return False


async def test_events_arrive_by_rank_with_gaps_and_restarts() -> None:
    got: list[tuple[int, EngineEvent]] = []
    inbox = KvEventReceiver(lambda events, rank=0: got.extend((rank, event) for event in events))
    endpoint = inbox.open()
    with zmq.Context() as context, context.socket(zmq.PUB) as sender:
        sender.connect(endpoint)
        async with asyncio.timeout(20):
            while not got:  # until the subscription stands
                sender.send_multipart(frames(0, 0, removed(1)))
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            got.clear()
            for number, rank, block in ((0, 1, 5), (1, 1, 6), (4, 1, 7), (0, 1, 8)):
                sender.send_multipart(frames(number, rank, removed(block)))
            sender.send_multipart([b"not", b"readable"])
            sender.send_multipart(frames(1, 1, removed(9)))
            while len(got) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await inbox.close()
    await inbox.close()
    kinds = [
        event.block_hashes[0] if isinstance(event, BlocksRemoved) else type(event)
        for _, event in got
    ]
    assert kinds == [5, 6, EventsLost, 7, AllCleared, 8, UnreadableEvent, 9]
    assert {rank for rank, event in got if type(event) is not UnreadableEvent} == {1}


async def test_failing_listener_ends_the_engine() -> None:
    def fail(*_: object) -> None:
        raise IndexError("rank 7")

    inbox = KvEventReceiver(fail)
    endpoint = inbox.open()
    assert inbox._socket.get_hwm() == MAX_PENDING_MESSAGES
    engine = VllmEngine(SystemClock(), "source", model="m")
    engine._inbox = inbox
    with zmq.Context() as context, context.socket(zmq.PUB) as sender:
        sender.connect(endpoint)
        async with asyncio.timeout(20):
            while inbox.failure is None:
                sender.send_multipart(frames(0, 7, removed(1)))
                await asyncio.sleep(0.01)
    with pytest.raises(EngineDead, match="rank 7"):
        await anext(engine.generate(Request(id="a"), GenerateContext("a")))
    await inbox.close()
