"""Tests of images and of the compose deployment: `make test-docker` builds both and runs them.

Nothing here is collected without KVLANE_TEST_CONTAINERS, which that target sets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if os.environ.get("KVLANE_TEST_CONTAINERS") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))
