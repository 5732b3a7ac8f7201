"""XXH3-64 with a seed, in plain Python: for single values such as names, and as the reference.

`indexer/native/xxh3_kernels.py` has the same formulas for arrays of blocks.
"""

from __future__ import annotations

import struct

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
STRIPE = 64
STRIPES_PER_BLOCK = 16


def xxh3(data: bytes, seed: int = 0) -> int:
    """XXH3-64 hash of bytes."""
    seed &= M64
    if len(data) > 240:
        return _long(data, seed)
    if len(data) > 128:
        return _upto_240(data, seed)
    if len(data) > 16:
        return _upto_128(data, seed)
    if len(data) > 8:
        return _upto_16(data, seed)
    if len(data) >= 4:
        return _upto_8(data, seed)
    return _upto_3(data, seed)


def _u32(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], "little")


def _u64(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")


def _folded(a: int, b: int) -> int:
    """Xor of both halves of the 128-bit product."""
    product = a * b
    return (product ^ (product >> 64)) & M64


def _bytes_reversed(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _avalanche(h: int) -> int:
    h = h ^ (h >> 37)
    h = (h * MIX_1) & M64
    return h ^ (h >> 32)


def _upto_3(data: bytes, seed: int) -> int:
    n = len(data)
    if n:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        flip = (SECRET_WORDS[0] & M32) ^ (SECRET_WORDS[4] & M32)
        h = combined ^ ((flip + seed) & M64)
    else:
        h = seed ^ SECRET_WORDS[56] ^ SECRET_WORDS[64]
    h = ((h ^ (h >> 33)) * P64_2) & M64
    h = ((h ^ (h >> 29)) * P64_3) & M64
    return h ^ (h >> 32)


def _upto_8(data: bytes, seed: int) -> int:
    seed ^= _bytes_reversed(seed & M32, 4) << 32
    flip = ((SECRET_WORDS[8] ^ SECRET_WORDS[16]) - seed) & M64
    h = (_u32(data, len(data) - 4) + (_u32(data, 0) << 32)) ^ flip
    h = h ^ _rotated(h, 49) ^ _rotated(h, 24)
    h = (h * MIX_2) & M64
    h = h ^ ((h >> 35) + len(data))
    h = (h * MIX_2) & M64
    return h ^ (h >> 28)


def _rotated(h: int, bits: int) -> int:
    return ((h << bits) & M64) | (h >> (64 - bits))


def _upto_16(data: bytes, seed: int) -> int:
    low = _u64(data, 0) ^ (((SECRET_WORDS[24] ^ SECRET_WORDS[32]) + seed) & M64)
    high = _u64(data, len(data) - 8) ^ (((SECRET_WORDS[40] ^ SECRET_WORDS[48]) - seed) & M64)
    return _avalanche((len(data) + _bytes_reversed(low, 8) + high + _folded(low, high)) & M64)


def _mix(data: bytes, at: int, secret: int, seed: int) -> int:
    """Mix 16 bytes of the input with 16 bytes of the secret."""
    low = _u64(data, at) ^ ((SECRET_WORDS[secret] + seed) & M64)
    high = _u64(data, at + 8) ^ ((SECRET_WORDS[secret + 8] - seed) & M64)
    return _folded(low, high)


def _upto_128(data: bytes, seed: int) -> int:
    n = len(data)
    total = (n * P64_1) & M64
    for i in range((n - 1) // 32, -1, -1):
        total = total + _mix(data, 16 * i, 32 * i, seed)
        total = total + _mix(data, n - 16 * (i + 1), 32 * i + 16, seed)
    return _avalanche(total & M64)


def _upto_240(data: bytes, seed: int) -> int:
    n = len(data)
    total = (n * P64_1) & M64
    for i in range(8):
        total = total + _mix(data, 16 * i, 16 * i, seed)
    total = _avalanche(total & M64)
    for i in range(8, n // 16):
        total = total + _mix(data, 16 * i, 16 * (i - 8) + 3, seed)
    return _avalanche((total + _mix(data, n - 16, 119, seed)) & M64)


def _long(data: bytes, seed: int) -> int:
    secret = _seeded_secret(seed)
    sums = list(FIRST_SUMS)
    stripes = (len(data) - 1) // STRIPE
    for stripe in range(stripes):
        within = stripe % STRIPES_PER_BLOCK
        _accumulate(data, STRIPE * stripe, secret, 8 * within, sums)
        if within == STRIPES_PER_BLOCK - 1:
            for lane in range(8):
                mixed = sums[lane] ^ (sums[lane] >> 47) ^ secret[128 + 8 * lane]
                sums[lane] = (mixed * P32_1) & M64
    _accumulate(data, len(data) - STRIPE, secret, 121, sums)
    total = (len(data) * P64_1) & M64
    for lane in range(0, 8, 2):
        total = total + _folded(
            sums[lane] ^ secret[11 + 8 * lane], sums[lane + 1] ^ secret[19 + 8 * lane]
        )
    return _avalanche(total & M64)


def _accumulate(data: bytes, at: int, secret: list[int], key: int, sums: list[int]) -> None:
    for lane in range(8):
        word = _u64(data, at + 8 * lane)
        mixed = word ^ secret[key + 8 * lane]
        sums[lane ^ 1] = (sums[lane ^ 1] + word) & M64
        sums[lane] = (sums[lane] + (mixed & M32) * (mixed >> 32)) & M64


def _seeded_secret(seed: int) -> list[int]:
    """The seeded secret of long inputs: u64 at every byte offset."""
    if not seed:
        return SECRET_WORDS
    words = b"".join(
        struct.pack("<QQ", (SECRET_WORDS[at] + seed) & M64, (SECRET_WORDS[at + 8] - seed) & M64)
        for at in range(0, len(SECRET), 16)
    )
    return [struct.unpack_from("<Q", words, offset)[0] for offset in range(185)]
