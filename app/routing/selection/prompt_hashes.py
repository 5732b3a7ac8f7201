"""Block hashes of a request's prompt for lookups in the index, computed once.

They depend on the block size of the model's caches, on the adapter, and on the salt, never on the
worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.block_hashes import local_hashes
from kvlane.streams.codecs import token_count
from kvlane.streams.request import BlockExtraInfo, Request


class PromptHashes:
    """The input of a request: its prompt, and `taken`, the tokens of its answer so far."""

    def __init__(self, request: Request, taken: bytes = b"") -> None:
        self.request = request
        self.tokens = request.prompt_tokens + token_count(taken)
        self._taken = taken
        self._local: dict[int, NDArray[np.uint64]] = {}

    @classmethod
    def from_hashes(
        cls, request: Request, tokens: int, local: NDArray[np.uint64], block_size: int,
        taken: bytes = b"",
    ) -> PromptHashes:  # fmt: skip
        """A prompt known by its length and its hashes only, as in a trace."""
        prompt = cls(request, taken)
        prompt.tokens = tokens
        prompt._local[block_size] = local
        return prompt

    @property
    def has_output(self) -> bool:
        return bool(self._taken)

    def hit_rate(self, overlap_blocks: int, block_size: int) -> float | None:
        """Part of the blocks that overlap is found by, 0 to 1; a block that is not full counts as
        one. None for a request without any."""
        tokens = token_count(self.request.routing_tokens().token_ids)
        blocks = -(-tokens // block_size)
        return overlap_blocks / blocks if blocks else None

    def local_hashes(self, block_size: int) -> NDArray[np.uint64]:
        """The local hashes of its whole blocks; none for a prompt that cannot be hashed."""
        local = self._local.get(block_size)
        if local is None:
            local = self._local[block_size] = self._hashed(block_size)
        return local

    def _hashed(self, block_size: int) -> NDArray[np.uint64]:
        token_ids, blocks = self.request.routing_tokens()
        if not token_ids:
            return np.empty(0, np.uint64)
        try:
            return local_hashes(
                token_ids + self._taken,
                block_size,
                lora_name=self.request.hints.lora_name or "",
                cache_salt=self.request.cache_salt,
                mm_hashes=[_hashes(block) for block in blocks or ()],
            )
        except (ValueError, OverflowError):  # no tokens, or no hashes: engines report the error
            return np.empty(0, np.uint64)


def _hashes(block: BlockExtraInfo | None) -> list[int] | None:
    return [each.mm_hash for each in block.mm_objects] if block else None
