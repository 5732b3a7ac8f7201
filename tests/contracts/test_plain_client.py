"""Tests of the contract of the log with aiokafka as it is: a run of `test_log.py` by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlane.streams.brokers.broker_factory import Broker

PLAIN_CLIENT = {"KVLANE_TEST_PLAIN_CLIENT": "1"}


@pytest.mark.kafka
@pytest.mark.slow
def test_contract_of_the_log_holds_without_replaced_parts(kafka: Broker) -> None:
    broker = {"KVLANE_BROKER": "env", "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    suite = Path(__file__).with_name("test_log.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kafka", str(suite)],
        env=os.environ | PLAIN_CLIENT | broker, capture_output=True, text=True, check=False,
        timeout=150,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:]
    assert " passed" in run.stdout
