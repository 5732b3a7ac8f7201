"""Request ids: UUIDs of version 7, which say when they were drawn and rise as they are drawn.

The time in an id bounds every search for its records. Ids of any other form are as good as keys;
they only cost a longer search.

Ids of gateways are *sealed*: eight hex digits follow the UUID, by which any gateway can tell whose
request it is, without having seen it. An id is no secret; who may read its stream is.
"""

from __future__ import annotations

import hmac
import random
import uuid

from streams.clock import Clock

SEALED_CHARS = 8
_UUID_CHARS = 36
_COUNTER_BITS = 12
_SEED_BITS = 11  # a counter starts in its lower half, so a millisecond has room for 2048 ids


class RequestIds:
    """Draws ids that rise as strings within this process, also when the clock goes back."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._ms = 0
        self._counter = 0

    def new(self) -> str:
        """The next id."""
        now_ms = self._clock.wall_ms()
        self._counter += 1
        if now_ms > self._ms:
            self._start(now_ms)
        elif self._counter >> _COUNTER_BITS:
            self._start(self._ms + 1)
        return _uuid7(self._ms, self._counter, self._rng)

    def _start(self, ms: int) -> None:
        self._ms, self._counter = ms, self._rng.getrandbits(_SEED_BITS)


class Seal:
    """Binds ids to tenants: SEALED_CHARS hex digits of HMAC-SHA256(secret, tenant, UUID).

    Equal for all gateways with the same secret. A guess is right once in four billion times; what
    it could win is one stream whose UUID must be known already.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sealed(self, drawn: str, tenant: str) -> str:
        """The id of a tenant's request; `drawn` is the UUID before it."""
        return f"{drawn}-{self._digits(drawn, tenant)}"

    def is_of(self, request_id: str, tenant: str) -> bool:
        """Whether a gateway drew this id for this tenant."""
        drawn, digits = request_id[:_UUID_CHARS], request_id[_UUID_CHARS:]
        expected = f"-{self._digits(drawn, tenant)}"
        return is_sealed(request_id) and hmac.compare_digest(digits.encode(), expected.encode())

    def _digits(self, drawn: str, tenant: str) -> str:
        said = f"{tenant}\0{drawn}".encode(errors="surrogatepass")
        return hmac.digest(self._secret, said, "sha256").hex()[:SEALED_CHARS]


def is_sealed(request_id: str) -> bool:
    """Whether an id has the form of a gateway's, whoever drew it."""
    long = len(request_id) == _UUID_CHARS + 1 + SEALED_CHARS
    return long and request_id[_UUID_CHARS] == "-" and issued_ms(request_id) is not None


def new_request_id(clock: Clock, rng: random.Random) -> str:
    """One id. Ids of the same millisecond rise only if one `RequestIds` draws them."""
    return RequestIds(clock, rng).new()


def issued_ms(request_id: str) -> int | None:
    """When an id was drawn, by the clock of whoever drew it; None if it does not say.

    Whatever follows the UUID in the id is not looked at.
    """
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
