"""The real vLLM on a CPU: engines that all tests share, since each takes seconds to start.

Nothing here is collected where vLLM is not installed: `make test-vllm` sees to that.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvlane.app.demo import tiny_model

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

TIMEOUT_S = 300
"""Time limit of a test: its fixtures start up to three engines, which takes 45 s, and four times as
long on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM warns about itself
            if inspect.iscoroutinefunction(getattr(item, "function", None)):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.vllm.adapters import make_adapter

    folder = tmp_path_factory.mktemp("adapters")
    return {"one": make_adapter(folder / "one", 1), "two": make_adapter(folder / "two", 2)}


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> None:
    os.environ.update(tiny_model.environment())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model: Path, adapters: dict[str, Path]) -> AsyncIterator[object]:
    """A worker's engine, with adapters, and a cache of 40 blocks."""
    from tests.vllm.engines import COMPACT, RealEngine, started

    engine = await started(model, blocks=40, adapters=adapters, structured_outputs_config=COMPACT)
    assert isinstance(engine, RealEngine)
    yield engine
    await engine.cleanup()
