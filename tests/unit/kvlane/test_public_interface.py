"""Tests of the names of `import kvlane`: there, documented, and loaded on first use only."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import kvlane
import kvlane.kafka
import kvlane.kv_index
import kvlane.serving


def test_every_name_is_in_one_group() -> None:
    groups = (kvlane.kafka.__all__, kvlane.kv_index.__all__, kvlane.serving.__all__)
    assert sorted(name for group in groups for name in group) == sorted(kvlane.__all__)


@pytest.mark.parametrize("name", kvlane.__all__)
def test_every_name_has_a_docstring(name: str) -> None:
    assert len((inspect.getdoc(getattr(kvlane, name)) or "").split()) >= 4


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvlane.nonsense


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import kvlane", ("kvlane.app", "kvlane.streams", "kvlane.indexer", "numba")),
        ("from kvlane import Client, KafkaLog, Prompt", ("kvlane.app", "numba", "faststream")),
        ("from kvlane import Index, hash_blocks", ("kvlane.app", "kvlane.streams", "pydantic")),
        ("from kvlane import Engine, worker_app", ("faststream",)),
    ],
)
def test_public_names_are_loaded_lazily(statement: str, absent: tuple[str, ...]) -> None:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()).isdisjoint(absent)
