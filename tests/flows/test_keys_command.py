"""Tests of the command `kvlane keys`."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.access import key_file
from kvlane.app.access.key_file import KeyRing, Tenant
from kvlane.app.cli import app

NOW_S = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("KVLANE_API_KEYS_FILE", str(path))
    monkeypatch.setenv("COLUMNS", "80")
    return path


def kvlane(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def created(*arguments: str) -> str:
    result = kvlane("create", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_key_is_printed_once_and_works(path: Path) -> None:
    token = created("--tenant", "acme", "--role", "operator", "--note", "laptop", "--days", "30")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token.split("_", 2)[2] not in path.read_text()
    (entry,) = key_file.read_key_file(path).keys
    assert (entry.tenant, entry.role, entry.note) == ("acme", "operator", "laptop")
    assert entry.expires is not None
    found = KeyRing(key_file.read_key_file(path)).find(token, entry.expires.timestamp() - 1)
    assert found == entry


def test_keys_are_listed_without_their_secrets_in_80_columns(path: Path) -> None:
    token = created("--tenant", "acme", "--note", "laptop", "--days", "30")
    other = created("--tenant", "globex", "--role", "metrics")
    kvlane("limit", "acme", "--requests", "8", "--tokens-per-minute", "1000000")
    got = kvlane("list").stdout
    for each in (token, other):
        _, key_id, secret = each.split("_", 2)
        assert key_id in got
        assert secret not in got
    assert key_file.read_key_file(path).keys[0].hash not in got
    assert all(len(line) <= 80 for line in got.splitlines())


@pytest.mark.usefixtures("path")
def test_limits_of_each_tenant_are_listed_with_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    created("--tenant", "acme")
    created("--tenant", "globex")
    values = {
        "requests": 1, "tokens": 2, "requests-per-minute": 3, "tokens-per-minute": 4,
        "tokens-per-day": 5, "file-bytes": 7, "batches": 8,
    }  # fmt: skip
    options = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    kvlane("limit", "acme", *options, "--queue-class", "night", "--share-cache")
    kvlane("limit", "--defaults", "--tokens-per-month", "6", "--requests", "9")
    rows = [" ".join(row.split()) for row in kvlane("list").stdout.splitlines()[-4:]]
    limits = ", ".join(f"{name} {n}" for n, name in enumerate(key_file.LIMITS[:6], 1))
    assert rows == [
        "tenant class cache limits",
        f"acme night shared {limits}, file_bytes 7, batches 8",
        "globex by name own requests 9, tokens_per_month 6",
        "(defaults) by name own requests 9, tokens_per_month 6",
    ]


def test_default_limits_are_limits_only(path: Path) -> None:
    created("--tenant", "acme")
    before = path.read_bytes()
    for arguments in (["acme", "--defaults"], ["--defaults", "--share-cache"], ["--requests", "1"]):
        refused = kvlane("limit", *arguments)
        assert refused.exit_code == 1
        assert "--defaults with limits only" in refused.output
    assert path.read_bytes() == before


def test_revoked_key_is_kept_as_revoked(path: Path) -> None:
    token = created("--tenant", "acme")
    key_id = token.split("_")[1]
    assert kvlane("revoke", key_id).exit_code == 0
    assert KeyRing(key_file.read_key_file(path)).find(token, NOW_S) is None
    assert "revoked" in kvlane("list").stdout
    unknown = kvlane("revoke", "nonsense")
    assert unknown.exit_code == 1
    assert "kvlane keys list" in unknown.output


def test_limits_are_changed_and_removed_one_by_one(path: Path) -> None:
    created("--tenant", "acme")
    kvlane("limit", "acme", "--requests", "8", "--tokens", "0", "--share-cache")
    kvlane("limit", "acme", "--queue-class", "batch", "--requests-per-minute", "60")
    expected = Tenant(
        requests=8, tokens=0, requests_per_minute=60, queue_class="batch", share_cache=True
    )
    assert key_file.read_key_file(path).tenants["acme"] == expected
    kvlane("limit", "acme", "--tokens", "-1", "--own-cache", "--queue-class", "")
    assert key_file.read_key_file(path).tenants["acme"] == Tenant(
        requests=8, requests_per_minute=60
    )
    unknown = kvlane("limit", "nobody", "--requests", "1")
    assert unknown.exit_code == 1
    assert "tenant 'nobody' has no key" in unknown.output


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["create", "--tenant", "a b"], "tenant"),
        (["create", "--tenant", "a", "--role", "root"], "user, operator or metrics"),
        (["list"], "no such file"),
        (["revoke", "x"], "no such file"),
        (["create", "--tenant", "a", "--file", "/none/keys.json"], "/none/keys.json"),
    ],
)
def test_error_is_one_line(arguments: list[str], reason: str) -> None:
    result = kvlane(*arguments)
    assert result.exit_code == 1
    assert reason in result.output
    assert "Traceback" not in result.output


def test_missing_key_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLANE_API_KEYS_FILE", raising=False)
    assert "set KVLANE_API_KEYS_FILE or give --file" in kvlane("list").output


def test_file_of_another_format_is_not_overwritten(path: Path) -> None:
    path.write_text("[1, 2]")
    assert kvlane("create", "--tenant", "a").exit_code == 1
    assert path.read_text() == "[1, 2]"


def test_keys_that_are_created_at_once_are_all_there(path: Path) -> None:
    def create(number: int) -> None:
        with key_file.lock_key_file(path):
            file = key_file.read_key_file(path) if path.exists() else key_file.KeyFile()
            key_file.write_key_file(path, file.with_key(key_file.new_key(f"t{number}").entry))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(24)))
    assert len(key_file.read_key_file(path).keys) == 24
