"""KV cache index: from the cache events of engines to the cached prefix length of a prompt.

In the worker, beside the engine:

    cache_events/engine_events.py     cache events as engines publish them, or their estimate
    cache_events/event_normalizer.py  engine events to canonical events; shows all vocabularies
    cache_events/cache_mirror.py      contents of the cache, as published

In every router and indexer:

    index.py                   the index: applies events, matches prompts; start here
    events.py                  canonical events, and their columnar encoding
    epochs.py                  epochs, event ids and gaps: decides which events are applied
    blocks/tier_store.py       blocks of one tier, and the growth of their arrays
    blocks/updates.py          event rows to updates of the table
    blocks/block_table.py      hash table from a key to a set of caches
    blocks/holder_sets.py      sets of caches, each one stored once
    blocks/prefix_search.py    cached depth of a prompt by cache
    blocks/prefix_keys.py      keys along a prompt, computed on demand
    blocks/kernel_entry.py     kernels that are called from Python
    blocks/snapshot_format.py  snapshot format

Identity of blocks, on both sides: block_hashes.py (hashes, compatible with other systems, and keys
that the index looks up), xxh3.py (hash function of single values), native/xxh3_kernels.py (in
compiled code).

Compiled code: kernels.py (decorators and cache), precompile.py (ahead-of-time compilation),
native/intrinsics.py (memory intrinsics), native/simd.py (SIMD intrinsics).
"""
