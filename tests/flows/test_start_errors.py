"""Tests of errors of the start: the fault and its correction, in two lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlane.app.router import Router
from kvlane.app.runtime.process import faststream_app

pytestmark = pytest.mark.slow


def failed(kind: str, **variables: str) -> list[str]:
    """What a process logs before it ends with code 1: warnings and errors of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVLANE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvlane.app", "run", kind],
        env=inherited | variables, capture_output=True, text=True, timeout=90, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    return [line for line in lines if not line.endswith(" starts") and " aiokafka: " not in line]


def test_invalid_setting_is_named() -> None:
    what, remedy = failed("router", KVLANE_LANES="0")
    assert what.startswith("router cannot start: KVLANE_LANES=0: Input should be greater than")
    assert "kvlane settings" in remedy


def test_missing_servers_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", "")
    with pytest.raises(SystemExit, match="1"):
        faststream_app("router", Router)
    assert "router cannot start: KVLANE_BOOTSTRAP_SERVERS is not set" in capsys.readouterr().err


def test_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    what, remedy = failed(
        "worker", KVLANE_BOOTSTRAP_SERVERS="127.0.0.1:1", KVLANE_MODEL_PATH=str(folder)
    )
    assert "worker fails: BadModel" in what
    assert str(folder) in what
    assert "what to do:" in remedy


def test_unknown_variable_is_named_before_a_broker_that_is_not_there() -> None:
    lines = failed("router", KVLANE_BOOTSTRAP_SERVERS="127.0.0.1:1", KVLANE_WORKER_TIMEOUTS="3")
    assert lines[0].endswith(
        "not a setting, ignored: KVLANE_WORKER_TIMEOUTS (did you mean KVLANE_WORKER_TIMEOUT_S?)"
    )
    assert len([line for line in lines if "WORKER_TIMEOUTS" in line]) == 1
    what, remedy = lines[1:]
    assert "router fails: BrokerUnavailable: no Kafka at 127.0.0.1:1" in what
    assert "what to do: Check KVLANE_BOOTSTRAP_SERVERS" in remedy
