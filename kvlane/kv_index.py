"""KV cache index as a library: block hashes, cache events, and longest cached prefixes."""

from __future__ import annotations

from kvlane.indexer.block_hashes import BlockHashes, hash_blocks, prompt_keys
from kvlane.indexer.block_hashes import derive_secret as index_secret
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import CacheEvent, EventKind, encode_events
from kvlane.indexer.index import Index

__all__ = [
    "BlockHashes", "CacheEvent", "CacheId", "EventKind", "Index", "encode_events", "hash_blocks",
    "index_secret", "prompt_keys",
]  # fmt: skip
