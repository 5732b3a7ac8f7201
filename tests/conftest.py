"""Settings of all tests. Broker fixtures are in `tests.brokers`."""

import gc

import pytest
from hypothesis import settings

# An example may be slow because the machine is busy; the time limit of the whole test is enough.
settings.register_profile("kvlane", deadline=None)
settings.load_profile("kvlane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that wait come first: the tests that run beside them use the time, and the
    short files at the end leave no process without work."""
    waiting = {
        item.path
        for item in items
        if item.get_closest_marker("slow") or item.get_closest_marker("kafka")
    }
    items.sort(key=lambda item: item.path not in waiting)


def pytest_collection_finish() -> None:
    """Collected tests and imported modules stay until the end: garbage collections need not walk
    them again and again, and may be rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
