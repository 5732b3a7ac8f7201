"""Which worker's cache holds which blocks: from what engines say to how much of a prompt is cached.

Beside an engine, in the worker:

    engine_events  what engines say of their caches       modelled  what others would say
    bridge         engine events to canonical ones        mirror    what the cache holds, as told

In every router and indexer:

    events     canonical events, and the columns they travel in
    index      the index: follows events, answers prompts; begin here
      lives      which events count: epochs, ids, gaps
      store      the blocks of a tier, and room for more
      changes    events to changes of the table           search    prompts to depths by cache
      table      from a key to a set of caches            sets      each set of caches once
      prefixes   keys along a prompt, where they are asked for
      entries    the kernels that Python calls            snapshots its bytes
    reference  the same in dicts, slow and obvious: what the index is held against

What blocks are called by, on both sides:

    hashing    the hashes of blocks, as others have them  keys      what the index looks up
    xxh3       the hash function                          hash_kernels, lanes  the same, fast

Below: kernels (how they are compiled and kept), warm (beforehand), memory (what numba lacks).
"""
