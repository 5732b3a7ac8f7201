"""The adapter of vLLM, as far as it goes without vLLM; tests/vllm has the rest."""

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

from app.engine.contract import EngineError, InvalidRequest
from app.engine.vllm import versions
from app.engine.vllm.engine import _output
from app.engine.vllm.figures import Figures
from app.engine.vllm.inbox import Inbox
from app.engine.vllm.params import extra_of, priority_of
from indexer.engine_events import AllCleared, BlocksRemoved, EngineEvent, EventsLost
from streams.records import EngineFigures, Hints, LogProb, PrefillResult, Request

HANDLE = b'{"kv_transfer_params": {"remote_host": "a"}}'


def test_additional_arguments_are_passed_on() -> None:
    assert extra_of(Request(id="a")) == {}
    assert extra_of(Request(id="a", extra_args=b'{"x": [1]}')) == {"x": [1]}


@pytest.mark.parametrize("handed", [HANDLE, b'{"remote_host": "a"}'])
def test_what_a_prefill_handed_over_goes_before_what_the_request_says(handed: bytes) -> None:
    request = Request(
        id="a",
        extra_args=b'{"kv_transfer_params": {"do_remote_decode": true}, "x": 1}',
        prefill_result=PrefillResult(disaggregated_params=handed),
    )
    assert extra_of(request) == {"kv_transfer_params": {"remote_host": "a"}, "x": 1}


def came(**answer: Any) -> Any:
    """A step of an answer, in vLLM's words."""
    plain = {"token_ids": [5], "finish_reason": None, "stop_reason": None, "logprobs": None}
    step = {"outputs": [SimpleNamespace(**(plain | answer))], "kv_transfer_params": None}
    return SimpleNamespace(**step)


def test_what_prefill_gives_decode_takes() -> None:
    step = came(finish_reason="length")
    step.kv_transfer_params = {"remote_host": "a"}
    output = _output(step, None, stopped=False)
    assert output.transfer is not None
    handed = PrefillResult(disaggregated_params=output.transfer)
    assert extra_of(Request(id="a", prefill_result=handed)) == {
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


def test_probabilities_are_its_own_and_then_those_that_were_asked_for() -> None:
    entries = {
        5: SimpleNamespace(logprob=-3.0, rank=9),
        7: SimpleNamespace(logprob=-0.5, rank=1),
        8: SimpleNamespace(logprob=-1.0, rank=2),
    }
    output = _output(came(logprobs=[entries]), 2, stopped=False)
    assert output.log_probs == ((LogProb(5, -3.0), LogProb(7, -0.5), LogProb(8, -1.0)),)


def test_probes_transfer_nothing() -> None:
    assert extra_of(Request(id="a", extra_args=HANDLE, is_probe=True)) == {}


@pytest.mark.parametrize("args", [b"[]", b"{", b'{"kv_transfer_params": 1}', b"[" * 5000])
def test_what_is_no_object_is_refused(args: bytes) -> None:
    with pytest.raises(InvalidRequest, match="extra_args"):
        extra_of(Request(id="a", extra_args=args))


def test_higher_priorities_go_first_where_lower_numbers_do() -> None:
    assert priority_of(Request(id="a")) == 0
    assert priority_of(Request(id="a", hints=Hints(priority=3))) == -3


def test_figures_add_up_over_ranks_and_end_with_the_last_request() -> None:
    figures = Figures()
    figures.blocks = 100

    def step(rank: int, running: int, used: float) -> None:
        class Stats:
            num_running_reqs = running
            num_waiting_reqs = 1
            num_skipped_waiting_reqs = 1
            kv_cache_usage = used

        figures.record(rank, Stats)

    step(0, 3, 0.5)
    step(1, 2, 0.1)
    step(1, 1, 0.2)
    assert figures.now(idle=False) == EngineFigures(
        running=4, waiting=4, kv_used_blocks=70, kv_total_blocks=200, steps=3
    )
    assert figures.now(idle=True) == EngineFigures(kv_total_blocks=200, steps=3)


def test_without_vllm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PACKAGES", ())
    with pytest.raises(EngineError, match="pip install 'kvlane"):
        versions.installed()


@pytest.mark.parametrize("version", ["0.9.1", "0.31.0", "0.28.0+cpu"])
def test_an_old_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions, "version", lambda package: version)
    with pytest.raises(EngineError, match=r"too old, 0\.32 is needed"):
        versions.installed()


@pytest.mark.parametrize(
    ("version", "warns"), [("0.32.0", False), ("0.32.4+cpu", False), ("0.40.0", True)]
)
def test_a_new_vllm_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warns: bool
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: version)
    assert versions.installed() == version
    assert bool(caplog.records) == warns


def test_an_installation_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "entry_points", lambda group: [])
    with pytest.raises(EngineError, match="install it again"):
        versions.check_plugin()


def frames(number: int, rank: int, *events: Any) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, list(events), rank])]


def removed(block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"}


ORPHAN = """
import os, time
from app.engine.vllm.parent import PARENT, end_with_parent
os.environ[PARENT] = str(os.getpid())
if os.fork() == 0:
    end_with_parent()  # before its number is known: then it may be orphaned
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_core_ends_with_a_worker_that_was_killed() -> None:
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


async def test_events_come_in_by_rank_and_gaps_and_restarts_are_told() -> None:
    told: list[tuple[int, EngineEvent]] = []
    inbox = Inbox(lambda events, rank=0: told.extend((rank, event) for event in events))
    endpoint = inbox.open()
    with zmq.Context() as context, context.socket(zmq.PUB) as sender:
        sender.connect(endpoint)
        async with asyncio.timeout(20):
            while not told:  # until the subscription stands
                sender.send_multipart(frames(0, 0, removed(1)))
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            told.clear()
            for number, rank, block in ((0, 1, 5), (1, 1, 6), (4, 1, 7), (0, 1, 8)):
                sender.send_multipart(frames(number, rank, removed(block)))
            sender.send_multipart([b"not", b"readable"])
            while len(told) < 6 or not inbox.unread.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await inbox.close()
    await inbox.close()
    kinds = [
        event.block_hashes[0] if isinstance(event, BlocksRemoved) else type(event)
        for _, event in told
    ]
    assert kinds == [5, 6, EventsLost, 7, AllCleared, 8]
    assert {rank for rank, _ in told} == {1}
