"""XXH3-64 with a seed: of single values, and the constants of the kernels for arrays of blocks
(`indexer/native/xxh3_kernels.py`).
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

M32 = (1 << 32) - 1
M64 = (1 << 64) - 1
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MIX_1, MIX_2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SECRET_WORDS: list[int] = [struct.unpack_from("<Q", SECRET, offset)[0] for offset in range(185)]
"""The secret's u64 at every byte offset."""
FIRST_SUMS = (P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1)
STRIPES_PER_BLOCK = 16


def xxh3(data: bytes, seed: int = 0) -> int:
    """XXH3-64 hash of bytes, for single values such as names."""
    return xxh3_64_intdigest(data, seed & M64)
