"""Tests of the engine contract with the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvlane.app.demo import tiny_model
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.vllm.async_llm import VllmEngine
from tests.conformance import Conformance, Lifecycle, Subject
from tests.vllm.engines import CLOCK, RealEngine


class TestVllm(Conformance, Lifecycle):
    @pytest.fixture
    def make(self, model: Path) -> Callable[[], Engine]:
        arguments = tiny_model.engine_arguments(40)
        return lambda: VllmEngine(CLOCK, str(model), model="tiny", arguments=arguments)

    @pytest.fixture
    def subject(self, engine: RealEngine) -> Subject:
        subject = Subject(
            engine, engine.config, lambda: not engine.llm.get_num_unfinished_requests()
        )
        engine.listeners[:] = [lambda events, rank=0: subject.got.extend(events)]
        subject.salt = len(engine.events) * 1000 + 17
        return subject
