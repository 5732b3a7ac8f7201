"""The file of API keys: salted hashes of the keys, and the limits of their tenants, as JSON.

    {"defaults": {"tokens_per_day": 1000000}, "tenants": {"acme": {"requests_per_minute": 600}},
     "keys": [{"id": "5f3e7c96a0b1", "salt": "…", "hash": "…", "tenant": "acme", "role": "user"}]}

A key is `kvl_ID_SECRET`: the id finds the entry, the secret is 32 random bytes. The file holds
HMAC-SHA256(salt, secret): secrets cannot be guessed, so a slow hash would protect nothing, and
would make requests without a key cost more than others.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvlane.app.operator_error import OperatorError
from kvlane.streams.ids import TENANT_PATTERN

PREFIX = "kvl"
MAX_FILE_BYTES = 16 * 1024 * 1024
_ID_BYTES = 6
_SALT_BYTES = 16
_SECRET_BYTES = 32

KeyRole = Literal["user", "operator", "metrics"]
"""`user`: models and its tenant's streams. `operator`: also dry runs, the indexer and figures.
`metrics`: figures only."""

KeyName = Annotated[str, msgspec.Meta(pattern=rf"^{TENANT_PATTERN}\Z")]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]+\Z", max_length=128)]
MAX_LIMIT = 2**53
"""Larger limits are not exact as floats, which buckets use."""
KeyLimit = Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)]


class KeyFileError(OperatorError):
    """The file of API keys cannot be used, or not as the command asks."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a tenant (None: no limit), and how its requests are queued and cached.

    `requests`, `tokens`: in flight, tokens of prompts and of the longest answers. `tokens_per_day`,
    `tokens_per_month`: budgets, by the calendar in UTC. `file_bytes`: of all its files, `batches`:
    not ended; both for the deployment. `queue_class`: one of KVLANE_QUEUE_CLASSES; empty: the one
    with the tenant's name, if any. `share_cache`: its prompts share cached blocks with all requests
    without a tenant's salt.
    """

    requests: KeyLimit | None = None
    tokens: KeyLimit | None = None
    requests_per_minute: KeyLimit | None = None
    tokens_per_minute: KeyLimit | None = None
    tokens_per_day: KeyLimit | None = None
    tokens_per_month: KeyLimit | None = None
    file_bytes: KeyLimit | None = None
    batches: KeyLimit | None = None
    queue_class: str = ""
    share_cache: bool = False


LIMITS = Tenant.__struct_fields__[:-2]
"""The limits among the fields of a tenant."""


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. `note`: for people; `expires`: with a time zone."""

    id: KeyName
    salt: Hex
    hash: Hex
    tenant: KeyName
    role: KeyRole = "user"
    note: str = ""
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    disabled: bool = False

    def status(self, now_s: float) -> str:
        """`valid`, `revoked` or `expired`, at a time in seconds since 1970."""
        if self.disabled:
            return "revoked"
        if self.expires is not None and self.expires.timestamp() <= now_s:
            return "expired"
        return "valid"


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`defaults`: the limits of all tenants, each where the tenant has none of its own."""

    tenants: dict[KeyName, Tenant] = {}
    keys: list[ApiKey] = []
    defaults: Tenant = Tenant()

    @property
    def tenant_names(self) -> list[str]:
        return sorted({key.tenant for key in self.keys} | set(self.tenants))

    def terms(self, name: str) -> Tenant:
        """The terms of a tenant, with the default limits."""
        own = self.tenants.get(name, Tenant())
        missing = [limit for limit in LIMITS if getattr(own, limit) is None]
        limits = {limit: getattr(self.defaults, limit) for limit in missing}
        return msgspec.structs.replace(own, **limits)

    def with_key(self, key: ApiKey) -> KeyFile:
        tenants = {key.tenant: Tenant()} | self.tenants
        return msgspec.structs.replace(self, tenants=tenants, keys=[*self.keys, key])

    def without(self, key_id: str) -> KeyFile:
        """The file with a key revoked. Raises KeyFileError for an unknown id."""
        if all(key.id != key_id for key in self.keys):
            raise KeyFileError(f"no key has the id {key_id!r}: `kvlane keys list` shows the ids")
        revoked = [
            msgspec.structs.replace(key, disabled=True) if key.id == key_id else key
            for key in self.keys
        ]
        return msgspec.structs.replace(self, keys=revoked)

    def with_tenant(self, name: str, changes: Mapping[str, object]) -> KeyFile:
        tenant = msgspec.structs.replace(self.tenants.get(name, Tenant()), **changes)
        return msgspec.structs.replace(self, tenants=self.tenants | {name: tenant})

    def with_defaults(self, changes: Mapping[str, object]) -> KeyFile:
        return msgspec.structs.replace(
            self, defaults=msgspec.structs.replace(self.defaults, **changes)
        )


class CreatedKey(NamedTuple):
    """A new key. `token` is the secret that clients send; it is not stored."""

    token: str
    entry: ApiKey


class KeyRing:
    def __init__(self, file: KeyFile) -> None:
        self._keys = {key.id: key for key in file.keys}
        self.tenants = {name: file.terms(name) for name in file.tenant_names}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: str, now_s: float) -> ApiKey | None:
        key_id, secret = _parts(token)
        key = self._keys.get(key_id, _NO_KEY)
        digest = _hash(bytes.fromhex(key.salt), secret)
        is_equal = hmac.compare_digest(digest.encode(), key.hash.encode())
        return key if is_equal and key is not _NO_KEY and key.status(now_s) == "valid" else None


def new_key(
    tenant: str, role: KeyRole = "user", note: str = "", expires: datetime | None = None
) -> CreatedKey:
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    salt = secrets.token_bytes(_SALT_BYTES)
    fields = {"id": key_id, "salt": salt.hex(), "hash": _hash(salt, secret), "tenant": tenant}
    more = {"role": role, "note": note, "expires": expires}
    try:
        entry = msgspec.convert(fields | more, ApiKey)
    except msgspec.ValidationError as e:
        raise KeyFileError(f"this key cannot be made: {e}") from None
    return CreatedKey(f"{PREFIX}_{key_id}_{secret}", entry)


def parse_key_file(content: bytes) -> KeyFile:
    """The file in its JSON form. Raises KeyFileError that names the field."""
    try:
        file = msgspec.json.decode(content, type=KeyFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise KeyFileError(f"it is not in the form of `kvlane keys`: {e}") from None
    ids = [key.id for key in file.keys]
    if len(set(ids)) < len(ids):
        raise KeyFileError("two of its keys have the same id")
    if odd := next((key.id for key in file.keys if len(key.salt) % 2), None):
        raise KeyFileError(f"the salt of the key {odd} is not in hexadecimal bytes")
    if file.defaults.queue_class or file.defaults.share_cache:
        raise KeyFileError("`defaults` may have limits only, no queue_class and no share_cache")
    return file


def read_key_file(path: Path) -> KeyFile:
    """Read the file. Raises KeyFileError that names it."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise KeyFileError(
                f"{path}: no such file", correction="`kvlane keys create --tenant NAME` makes it."
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"{path}: it exceeds {MAX_FILE_BYTES} bytes")
        content = path.read_bytes()
    except OSError as e:
        raise KeyFileError(f"{path}: {e.strerror or e}") from None
    try:
        return parse_key_file(content)
    except KeyFileError as e:
        raise KeyFileError(f"{path}: {e}") from None


def write_key_file(path: Path, file: KeyFile) -> None:
    """Replace the file atomically, for its owner's eyes only (mode 0600). Raises KeyFileError."""
    content = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as e:
        raise KeyFileError(f"{path}: {e.strerror or e}") from None


@contextmanager
def lock_key_file(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file: the folder is locked. Raises KeyFileError."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as e:
        raise KeyFileError(f"{path}: {e.strerror or e}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _parts(token: str) -> tuple[str, str]:
    prefix, _, rest = token.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX else ("", "")


def _hash(salt: bytes, secret: str) -> str:
    return hmac.digest(salt, secret.encode(errors="surrogatepass"), "sha256").hex()


_NO_KEY = ApiKey(id="-", salt="00" * _SALT_BYTES, hash="0" * 64, tenant="-")
"""Compared for unknown ids, so that they take as long as known ones."""
