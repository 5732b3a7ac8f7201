"""Tests of the choice between aiokafka's own parts and their replacements: by its version."""

from __future__ import annotations

import subprocess
import sys

import pytest

FETCHERS_PARSER = "from aiokafka.consumer import fetcher; print(fetcher.MemoryRecords.__module__)"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("version", "parser"),
    [
        ("0.14.0", "kvlane.streams.kafka.client_patches.record_batches"),
        ("0.14.1", "aiokafka.record"),
    ],
)
def test_parts_of_a_version_are_replaced_only_if_it_was_tested(version: str, parser: str) -> None:
    code = (
        f"import aiokafka; aiokafka.__version__ = '{version}'; "
        "import kvlane.streams.kafka.kafka_log; "
        "from kvlane.streams.kafka.client_patches.client_parts import client_parts; "
        "client_parts(); "
        f"client_parts(); {FETCHERS_PARSER}"
    )
    process = _run(code)
    assert process.stdout.startswith(parser)
    lines = process.stderr.splitlines()
    assert len(lines) == (version != "0.14.0")
    assert all(f"aiokafka {version} is used as it is" in line for line in lines)


def test_plain_client_loads_no_module_that_replaces_a_part() -> None:
    code = (
        "import aiokafka, sys; aiokafka.__version__ = '9.0.0'; "
        "import kvlane.streams.kafka.kafka_log; "
        "from kvlane.streams.kafka.client_patches.client_parts import client_parts; "
        "client_parts(); "
        "print(*(m for m in sys.modules if m.startswith('kvlane.streams.kafka.client_patches.')))"
    )
    loaded = {name.rpartition(".")[2] for name in _run(code).stdout.split()}
    assert loaded == {"producer_queue", "client_parts", "plain_client"}


def test_importing_the_library_replaces_nothing() -> None:
    assert _run(f"import kvlane; {FETCHERS_PARSER}").stdout.startswith("aiokafka.record")
