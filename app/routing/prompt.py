"""The tokens of a request as the index knows them: the keys of their blocks, made once.

The keys depend on the block size of the model's caches, on the adapter, and on the salt, never on
the worker; so one row of them is compared with every cache.
"""

from __future__ import annotations

from indexer.hashing import local_hashes
from indexer.keys import KeySecret, prompt_keys
from streams.codecs import token_count
from streams.records import BlockExtraInfo, Request


class Prompt:
    """What is to be computed of a request: its prompt, and `taken`, the answer's tokens so far."""

    def __init__(self, request: Request, secret: KeySecret, taken: bytes = b"") -> None:
        self.request = request
        self.tokens = token_count(request.token_ids) + token_count(taken)
        self._secret = secret
        self._taken = taken
        self._keys: dict[int, list[int]] = {}

    def keys(self, block_size: int) -> list[int]:
        """The keys of its whole blocks, u64; none for what cannot be hashed."""
        keys = self._keys.get(block_size)
        if keys is None:
            keys = self._keys[block_size] = self._hashed(block_size)
        return keys

    def _hashed(self, block_size: int) -> list[int]:
        token_ids, blocks = self.request.routing_tokens()
        if not token_ids:
            return []
        try:
            local = local_hashes(
                token_ids + self._taken,
                block_size,
                lora_name=self.request.hints.lora_name or "",
                cache_salt=self.request.cache_salt,
                mm_hashes=[_hashes(block) for block in blocks or ()],
            )
        except (ValueError, OverflowError):  # no tokens, or no hashes: engines say what is wrong
            return []
        keys: list[int] = prompt_keys(local, self._secret).tolist()
        return keys


def _hashes(block: BlockExtraInfo | None) -> list[int] | None:
    return [each.mm_hash for each in block.mm_objects] if block else None
