"""KV cache index: from the cache events of engines to the cached prefix length of a prompt.

In the worker, beside the engine:

    `indexer/cache_events/engine_events.py`  cache events as engines publish them
    `indexer/cache_events/estimated_cache.py`       estimated events for engines that publish none
    `indexer/cache_events/event_normalizer.py`         engine events to canonical events; shows all
    vocabularies `indexer/cache_events/cache_mirror.py`         contents of the cache, as published

In every router and indexer:

    `indexer/events.py`         canonical events, and their columnar encoding
    `indexer/index.py`          the index: applies events, matches prompts; start here
    `indexer/epochs.py`          epochs, event ids and gaps: which events are applied
    `indexer/blocks/tier_store.py`          blocks of one tier, and the growth of their arrays
    `indexer/blocks/updates.py`        event rows to updates of the table
    `indexer/blocks/block_table.py`          hash table from a key to a set of caches
    `indexer/blocks/holder_sets.py`           sets of caches, each one stored once
    `indexer/blocks/prefix_search.py`         prompt to depth by cache
    `indexer/blocks/prefix_keys.py`       keys along a prompt, computed on demand
    `indexer/blocks/kernel_entry.py`        kernels that are called from Python
    `indexer/blocks/snapshot_format.py`      snapshot format
    `indexer/reference_index.py`      slow reference implementation in dicts

Identity of blocks, on both sides:

    `indexer/block_hashes.py`        hashes of blocks, compatible with other systems
    `indexer/block_keys.py`           keys that the index looks up
    `indexer/xxh3.py`           hash function in plain Python
    `indexer/native/xxh3_kernels.py`   hash function in compiled code

Compiled code: `indexer/kernels.py` (decorators and cache), `indexer/precompile.py` (ahead-of-time
compilation), `indexer/native/intrinsics.py` (memory intrinsics) and `indexer/native/simd.py` (SIMD
intrinsics).
"""
