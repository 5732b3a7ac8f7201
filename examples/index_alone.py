"""The KV cache index without Kafka: which cache holds how much of a prompt?

python examples/index_alone.py
"""

from __future__ import annotations

from kvlane import (
    CacheEvent,
    CacheId,
    EventKind,
    Index,
    encode_events,
    hash_blocks,
    index_secret,
    prompt_keys,
)

BLOCK_SIZE = 16
secret = index_secret(b"the same for all that exchange events")
index = Index(secret)

prompt = list(range(100))  # token ids: six full blocks and a rest
hashes = hash_blocks(prompt, BLOCK_SIZE).local
keys = prompt_keys(hashes, secret).tolist()  # a key stands for a block and all blocks before it

# Two workers report what they cached: the whole prompt, and its first two blocks. The first event
# of a worker's life says that its cache was empty, so that the index knows all of it.
for worker, blocks in (("worker-1", 6), ("worker-2", 2)):
    stored = CacheEvent(EventKind.STORED, keys=tuple(keys[:blocks]))
    events = encode_events([CacheEvent(EventKind.CLEARED), stored])
    # partition, cache, epoch, first event id, events
    index.apply_events(0, CacheId(worker, 0), 1, 0, events)

for cache, overlap in index.match_prefix(hashes).items():
    print(f"{cache.worker} holds {overlap.device * BLOCK_SIZE} of {len(prompt)} tokens")

# A cached block leaves: the second worker has one block left.
removed = encode_events([CacheEvent(EventKind.REMOVED, keys=(keys[1],))])
index.apply_events(0, CacheId("worker-2", 0), 1, 2, removed)
for cache, overlap in index.match_prefix(hashes).items():
    print(f"{cache.worker} holds {overlap.device * BLOCK_SIZE} of {len(prompt)} tokens")
