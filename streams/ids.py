"""Request ids: UUIDs of version 7, whose creation time bounds every search for their records. Ids
of gateways end with a tenant tag, by which any gateway verifies the tenant of a request."""

from __future__ import annotations

import hmac
import random
import uuid

from kvlane.streams.clock import Clock

TENANT_PATTERN = r"[A-Za-z0-9._:@-]{1,100}"
"""A tenant's name: without a slash and a zero byte, the separators after tenants."""
TAG_CHARS = 8
SALT_CHARS = 32
_UUID_CHARS = 36
_COUNTER_BITS = 12
_SEED_BITS = 11  # a counter starts in its lower half, so a millisecond has room for 2048 ids


class RequestIds:
    """Generates ids that increase as strings within this process, even if the clock goes back."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._ms = 0
        self._counter = 0

    def new(self) -> str:
        now_ms = self._clock.wall_ms()
        self._counter += 1
        if now_ms > self._ms:
            self._start(now_ms)
        elif self._counter >> _COUNTER_BITS:
            self._start(self._ms + 1)
        return _uuid7(self._ms, self._counter, self._rng)

    def _start(self, ms: int) -> None:
        self._ms, self._counter = ms, self._rng.getrandbits(_SEED_BITS)


class TenantTag:
    """Binds ids to tenants: TAG_CHARS hex digits of HMAC-SHA256(secret, tenant, UUID)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def tagged(self, drawn: str, tenant: str, *, is_stored: bool = False) -> str:
        """The id of a tenant's request; `drawn` is its UUID. `is_stored`: its response is."""
        return f"{drawn}-{self._digits(drawn, tenant, is_stored=is_stored)}"

    def matches(self, request_id: str, tenant: str) -> bool:
        return any(self._is_of(request_id, tenant, is_stored=stored) for stored in (False, True))

    def is_stored(self, request_id: str, tenant: str) -> bool:
        """Whether a gateway made this id for a response of this tenant that is stored."""
        return self._is_of(request_id, tenant, is_stored=True)

    def _is_of(self, request_id: str, tenant: str, *, is_stored: bool) -> bool:
        expected = self.tagged(request_id[:_UUID_CHARS], tenant, is_stored=is_stored)
        return has_tenant_tag(request_id) and hmac.compare_digest(
            request_id.encode(), expected.encode()
        )

    def cache_salt(self, tenant: str, salt: str) -> str:
        """The cache salt of a tenant's request: an HMAC, so that no client has another tenant's."""
        parts = f"cache\0{tenant}\0{salt}".encode(errors="surrogatepass")
        return hmac.digest(self._secret, parts, "sha256").hex()[:SALT_CHARS]

    def _digits(self, drawn: str, tenant: str, *, is_stored: bool) -> str:
        use = "\0stored" if is_stored else ""
        signed = f"{tenant}\0{drawn}{use}".encode(errors="surrogatepass")
        return hmac.digest(self._secret, signed, "sha256").hex()[:TAG_CHARS]


def has_tenant_tag(request_id: str) -> bool:
    """Whether an id has the form of a gateway's id; the tag is not verified."""
    long = len(request_id) == _UUID_CHARS + 1 + TAG_CHARS
    return long and request_id[_UUID_CHARS] == "-" and issued_ms(request_id) is not None


def new_request_id(clock: Clock, rng: random.Random) -> str:
    """One id. Ids of the same millisecond are ordered only if one `RequestIds` makes them."""
    return RequestIds(clock, rng).new()


def issued_ms(request_id: str) -> int | None:
    """Creation time of an id (of the UUID at its start), by the clock of its maker; else None."""
    try:
        drawn = uuid.UUID(request_id[:_UUID_CHARS])
    except ValueError:
        return None
    if drawn.version != 7 or str(drawn) != request_id[:_UUID_CHARS].lower():
        return None
    return drawn.int >> 80


def _uuid7(ms: int, counter: int, rng: random.Random) -> str:
    """RFC 9562: 48 bits of time, version, 12 bits here a counter, variant, 62 random bits."""
    bits = (ms << 80) | (7 << 76) | (counter << 64) | (0b10 << 62) | rng.getrandbits(62)
    return str(uuid.UUID(int=bits))
