"""Tests of the file of API keys, and look-ups of keys."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from kvlane.app.access import key_file
from kvlane.app.access.key_file import KeyFile, KeyFileError, KeyRing, Tenant, new_key

NOW_S = 1_800_000_000.0


def ring(*keys: key_file.ApiKey) -> KeyRing:
    return KeyRing(KeyFile(keys=list(keys)))


def test_key_finds_its_entry_and_the_file_does_not_hold_it() -> None:
    token, entry = new_key("acme")
    assert ring(new_key("other").entry, entry).find(token, NOW_S) == entry
    secret = token.split("_", 2)[2]
    assert len(secret) == 43
    assert secret.encode() not in msgspec.json.encode(entry)


def test_equal_secrets_have_different_hashes() -> None:
    entries = [new_key("acme").entry for _ in range(3)]
    assert len({entry.salt for entry in entries}) == len({entry.hash for entry in entries}) == 3


def test_wrong_key_finds_nothing() -> None:
    token, entry = new_key("acme")
    other, _ = new_key("acme")
    key_id, secret = token.split("_", 2)[1:]
    wrong = (
        "", "kvl", "kvl_", f"kvl_{key_id}", f"kvl_{key_id}_", f"kvl_{key_id}_{secret[:-1]}",
        f"kvl_{key_id}_{secret}x", f"KVL_{key_id}_{secret}", f"kvl_-_{secret}", other,
        f"kvl_{key_id}_{other.split('_', 2)[2]}", entry.hash, f"kvl_{key_id}_{entry.hash}",
        f"kvl_{key_id}_\udc80", f"kvl_{key_id}_ü", secret,
    )  # fmt: skip
    for each in wrong:
        assert ring(entry).find(each, NOW_S) is None, each


def test_revoked_key_finds_nothing() -> None:
    token, entry = new_key("acme")
    file = KeyFile(keys=[entry]).without(entry.id)
    assert KeyRing(file).find(token, NOW_S) is None
    assert file.keys[0].status(NOW_S) == "revoked"


def test_key_expires_at_its_time() -> None:
    at = datetime.fromtimestamp(NOW_S, UTC)
    token, entry = new_key("acme", expires=at)
    assert ring(entry).find(token, NOW_S - 0.1) == entry
    assert ring(entry).find(token, NOW_S) is None


def test_file_is_read_as_it_was_written_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o644)
    expires = datetime.now(UTC) + timedelta(days=1)
    file = KeyFile().with_key(new_key("acme", "operator", "for me", expires).entry)
    file = file.with_tenant("acme", {"tokens": 5, "share_cache": True})
    key_file.write_key_file(path, file)
    assert key_file.read_key_file(path) == file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]


def test_link_to_the_file_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    link.symlink_to(real)
    key_file.write_key_file(link, KeyFile().with_key(new_key("acme").entry))
    assert link.is_symlink()
    assert len(key_file.read_key_file(real).keys) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "form"),
        (b"\xff\xfe", "form"),
        (b"[]", "form"),
        (b'{"kyes": []}', "kyes"),
        (b'{"keys": [{"id": "a"}]}', "salt"),
        (b'{"keys": [{"id": "a", "salt": "0", "hash": "00", "tenant": "t"}]}', "salt of the key a"),
        (b'{"keys": [{"id": "a", "salt": "00", "hash": "xx", "tenant": "t"}]}', "hash"),
        (b'{"keys": [{"id": "a", "salt": "00", "hash": "00", "tenant": "a/b"}]}', "tenant"),
        (b'{"tenants": {"t": {"requests": -1}}}', "requests"),
        (b'{"tenants": {"t": {"tokens_per_minute": 1' + 400 * b"0" + b"}}}", "tokens_per_minute"),
        (b'{"tenants": {"t": {"request": 1}}}', "request"),
        (
            (
                b'{"keys": [{"id": "a", "salt": "00", "hash": "00", "tenant": "t"},'
                b'{"id": "a", "salt": "01", "hash": "00", "tenant": "t"}]}'
            ),
            "same id",
        ),
        (
            (
                b'{"keys": [{"id": "a", "salt": "00", "hash": "00", "tenant": "t",'
                b'"expires": "2030-01-01T00:00:00"}]}'
            ),
            "expires",
        ),
    ],
)
def test_file_of_another_form_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(KeyFileError, match=reason):
        key_file.parse_key_file(content)


def test_missing_or_odd_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(KeyFileError, match=str(path)):
            key_file.read_key_file(path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(KeyFileError, match=r"bad\.json: it is not"):
        key_file.read_key_file(tmp_path / "bad.json")


def test_invalid_tenant_name_is_refused() -> None:
    for name in ("", "a b", "a/b", "a\0b", "x" * 101):
        with pytest.raises(KeyFileError, match="tenant"):
            new_key(name)


def test_new_key_keeps_the_limits_of_its_tenant() -> None:
    file = KeyFile().with_key(new_key("acme").entry)
    assert file.tenants == {"acme": Tenant()}
    file = file.with_tenant("acme", {"requests": 3}).with_key(new_key("acme").entry)
    assert file.tenants == {"acme": Tenant(requests=3)}
    assert len(file.keys) == 2


def test_default_limits_hold_for_tenants_without_their_own() -> None:
    file = KeyFile(
        {"acme": Tenant(tokens_per_day=3, share_cache=True)},
        defaults=Tenant(tokens_per_day=5, requests=0),
    ).with_key(new_key("globex").entry)
    tenants = KeyRing(file).tenants
    assert tenants["acme"] == Tenant(tokens_per_day=3, requests=0, share_cache=True)
    assert tenants["globex"] == Tenant(tokens_per_day=5, requests=0)


def test_odd_budgets_and_defaults_are_named() -> None:
    for content, error in (
        (b'{"tenants": {"a": {"tokens_per_day": -1}}}', "tokens_per_day"),
        (b'{"tenants": {"a": {"tokens_per_month": "1M"}}}', "tokens_per_month"),
        (b'{"defaults": {"tokens_per_year": 1}}', "tokens_per_year"),
        (b'{"defaults": {"share_cache": true}}', "`defaults` may have limits only"),
    ):
        with pytest.raises(KeyFileError, match=error):
            key_file.parse_key_file(content)


def test_unknown_key_cannot_be_revoked() -> None:
    with pytest.raises(KeyFileError, match="kvlane keys list"):
        KeyFile().without("nonsense")
