"""Tests of settings of the demo's processes."""

from __future__ import annotations

import pytest

from kvlane.app.demo.demo_run import _changes
from kvlane.app.local.processes import _text
from kvlane.app.settings import Settings, variable_name
from kvlane.streams.brokers.broker import ExternalBroker


def test_processes_of_the_demo_share_a_hash_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker in Docker may have an address that is not this machine's loopback."""
    changes = _changes(Settings(_env_file=None), ExternalBroker("10.0.0.7:9092"))
    for name, value in (changes | {"bootstrap_servers": "10.0.0.7:9092"}).items():
        monkeypatch.setenv(variable_name(name), _text(value))
    secrets = {Settings(_env_file=None).block_key_secret() for _ in range(2)}
    assert len(secrets) == 1


def test_given_hash_secret_stays() -> None:
    given = Settings(_env_file=None, hash_secret="given")
    assert "hash_secret" not in _changes(given, ExternalBroker("10.0.0.7:9092"))
