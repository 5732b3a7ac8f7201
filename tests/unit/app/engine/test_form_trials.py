"""Trials of forms in a process: killed when they take too long, and one of a tenant at a time.

The process is real; a module with the name of xgrammar takes its place, which the real vLLM has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvlane.app.engine.interface import EngineError, InvalidRequest
from kvlane.app.engine.vllm import form_trials
from kvlane.app.engine.vllm.form_trials import FormTrials
from kvlane.streams.request import GuidedDecoding
from tests.harness.http_harness import until

COMPILER = """
import os, time
from types import SimpleNamespace

class TokenizerInfo:
    deserialize_json = staticmethod(str)

class Row(list):
    tolist = list.copy

def allocate_token_bitmask(rows, size):
    assert (rows, size) == (1, 64)
    return [Row([0, 0])]

class GrammarMatcher:
    def __init__(self, compiled):
        self.compiled = compiled
        self.tokens = []

    def fill_next_token_bitmask(self, bits):
        bits[0][:] = [1, -(2 ** 31)]  # the end of the answer, and token 63

    def accept_token(self, token):
        self.tokens.append(token)
        while self.compiled.text == "slow tokens" and len(self.tokens) == 9:
            pass
        return True

    def is_terminated(self):
        assert self.tokens[-1] == 63
        return len(self.tokens) == 10

class GrammarCompiler:
    def __init__(self, tokenizer, **options):
        assert tokenizer == "a tokenizer"

    def compile_regex(self, text):
        if text == "unknown":
            raise RuntimeError("xgrammar cannot read it")
        if text == "large":
            raise MemoryError
        if text == "crash":
            os.abort()
        if text == "end":
            os.kill(os.getppid(), 9)
        with open(os.environ["TRIED"], "a") as tried:
            tried.write(text + "\\n")
        while text.startswith("endless"):
            pass
        while text.startswith("wait") and not os.path.exists(os.environ["TRIED"] + ".go"):
            time.sleep(0.01)
        tokenizer = SimpleNamespace(vocab_size=64, stop_token_ids=[0])
        return SimpleNamespace(text=text, tokenizer_info=tokenizer)
"""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "xgrammar.py").write_text(COMPILER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    monkeypatch.setattr(form_trials, "TRIAL_CPU_S", 1)
    return tmp_path / "tried"


@pytest.fixture
async def trials(tried: Path) -> AsyncIterator[FormTrials]:
    made = FormTrials(lambda: "a tokenizer")
    yield made
    await made.close()


def regex(text: str) -> GuidedDecoding:
    return GuidedDecoding(regex=text)


async def until_tried(tried: Path, *texts: str) -> None:
    await until(lambda: tried.exists() and set(texts) <= set(tried.read_text().split()))


@pytest.mark.parametrize("text", ["endless", "slow tokens"])
async def test_form_that_takes_too_long_is_killed_and_refused(
    trials: FormTrials, text: str
) -> None:
    began_at = time.process_time()
    with pytest.raises(InvalidRequest, match="not compiled within 1 s of processor time"):
        await trials.check(regex(text), "evil")
    await trials.check(regex("short"), "evil")
    assert time.process_time() - began_at < 1  # nothing of it ran here


async def test_form_is_tried_once_for_each_tenant(trials: FormTrials, tried: Path) -> None:
    for tenant in ("acme", "zenith", "acme"):
        await trials.check(regex("a"), tenant)
    assert tried.read_text().split() == ["a", "a"]


async def test_trial_of_a_tenant_holds_no_other_tenant(trials: FormTrials, tried: Path) -> None:
    forms = [regex("wait1"), regex("wait2")]
    waiting = [asyncio.create_task(trials.check(form, "evil")) for form in forms]
    await until_tried(tried, "wait1")
    await trials.check(regex("short"), "acme")
    assert tried.read_text().split() == ["wait1", "short"]
    tried.with_name("tried.go").touch()
    await asyncio.gather(*waiting)


async def test_trials_at_a_time_are_bounded(trials: FormTrials, tried: Path) -> None:
    """A prompt on Kafka names its tenant itself."""
    names = [f"wait{n}" for n in range(form_trials.MAX_TRIALS + 1)]
    waiting = [asyncio.create_task(trials.check(regex(name), name)) for name in names]
    await until_tried(tried, *names[:-1])
    await asyncio.sleep(0.3)
    assert set(tried.read_text().split()) == set(names[:-1])
    tried.with_name("tried.go").touch()
    await asyncio.gather(*waiting)
    assert set(tried.read_text().split()) == set(names)


async def test_trial_goes_on_after_its_client_has_left(trials: FormTrials, tried: Path) -> None:
    left = asyncio.create_task(trials.check(regex("wait"), "evil"))
    await until_tried(tried, "wait")
    left.cancel()
    following = asyncio.create_task(trials.check(regex("short"), "evil"))
    await asyncio.sleep(0.1)
    assert tried.read_text().split() == ["wait"]
    tried.with_name("tried.go").touch()
    await following


@pytest.mark.parametrize("text", ["large", "crash"])
async def test_form_that_would_end_the_engine_is_refused(trials: FormTrials, text: str) -> None:
    with pytest.raises(InvalidRequest, match="use a simpler schema"):
        await trials.check(regex(text), "acme")


async def test_form_that_xgrammar_refuses_is_left_to_vllm(trials: FormTrials) -> None:
    await trials.check(regex("unknown"), "acme")


async def test_process_that_ended_is_started_again(trials: FormTrials) -> None:
    with pytest.raises(EngineError, match="has ended") as raised:
        await trials.check(regex("end"), "acme")
    assert raised.value.retryable
    await trials.check(regex("short"), "acme")
