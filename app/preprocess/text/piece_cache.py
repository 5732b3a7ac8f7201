"""Cache of the tokens of long pieces of text: one for all models and tenants of a process.

A piece is found again only by requests of the same tenant with the same cache salt: the time that a
prompt takes says nothing about the prompts of others. When the cache is full, the tenant with the
largest share loses its least recently used piece.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

CACHE_BYTES = 64 * 1024 * 1024
MIN_CHARS = 256
"""Shorter pieces of text are tokenised again each time: that is as quick as the cache."""
MAX_SHARES = 256
"""Tenants with a share; the one without a request for the longest time loses its share to a new
one."""
ENTRY_BYTES = 256
"""Memory of an entry without its text and tokens: its key, and its place in two tables."""


class Scope(NamedTuple):
    """The requests that may find each other's pieces. "" for all without a tenant, or a salt."""

    tenant: str = ""
    salt: str = ""


ANYONE = Scope()


class _Key(NamedTuple):
    model: Hashable
    salt: str
    text: str


class _Share:
    """The pieces of one tenant, the least recently used one first."""

    def __init__(self) -> None:
        self.bytes = 0
        self.pieces: OrderedDict[_Key, array[int]] = OrderedDict()

    def evict(self) -> int:
        """Remove the least recently used piece; returns its size."""
        size = size_of(*_entry(self.pieces.popitem(last=False)))
        self.bytes -= size
        return size


class PieceCache:
    """Tokens of pieces of text, by model and scope."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self.bytes = 0
        """Memory of all entries, by `size_of`."""
        self._most_bytes = most_bytes
        self._shares: OrderedDict[str, _Share] = OrderedDict()

    def get(self, model: Hashable, scope: Scope, text: str) -> array[int] | None:
        share = self._shares.get(scope.tenant)
        if share is None or len(text) < MIN_CHARS:
            return None
        self._shares.move_to_end(scope.tenant)
        key = _Key(model, scope.salt, text)
        tokens = share.pieces.get(key)
        if tokens is not None:
            share.pieces.move_to_end(key)
        return tokens

    def put(self, model: Hashable, scope: Scope, text: str, tokens: array[int]) -> None:
        """Keep the tokens of a piece, if it is long enough to be worth it."""
        size = size_of(text, tokens)
        if len(text) < MIN_CHARS or size > self._most_bytes:
            return
        share = self._shares.get(scope.tenant)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self.bytes -= self._shares.popitem(last=False)[1].bytes
            share = self._shares[scope.tenant] = _Share()
        key = _Key(model, scope.salt, text)
        if key in share.pieces:
            return
        share.pieces[key] = tokens
        share.bytes += size
        self.bytes += size
        while self.bytes > self._most_bytes:
            self.bytes -= max(self._shares.values(), key=lambda share: share.bytes).evict()


def size_of(text: str, tokens: array[int]) -> int:
    """Memory of an entry, in bytes."""
    return text.__sizeof__() + tokens.__sizeof__() + ENTRY_BYTES


def _entry(item: tuple[_Key, array[int]]) -> tuple[str, array[int]]:
    key, tokens = item
    return key.text, tokens
