"""XXH3-64 with a seed: of some bytes, and of many rows of equal length at once.

Owns the hash function and nothing else; the format is fixed by the xxHash specification, for every
length and seed. Plain integers for single values, numpy columns for rows: the same lines compute
both, since a column of u64 wraps as an int masked to 64 bits does.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Word: TypeAlias = Any
"""An int below 2^64, or a column of u64."""

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
_SECRET_WORDS: list[int] = [struct.unpack_from("<Q", SECRET, offset)[0] for offset in range(185)]
"""The secret's u64 at every byte offset."""
STRIPE = 64
STRIPES_PER_BLOCK = 16


def xxh3(data: bytes, seed: int = 0) -> int:
    """The hash of some bytes."""
    value: int = _hash(_Bytes(data), seed & M64)
    return value


def xxh3_rows(rows: NDArray[np.uint32], seed: int = 0) -> NDArray[np.uint64]:
    """The hash of each row: u32 words, read as little endian bytes; shape (n, words), words > 0."""
    value: NDArray[np.uint64] = _hash(_Rows(rows), seed & M64)
    return value


class _Bytes:
    """Reads words of one input, and does the two operations in which ints differ from columns."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.length = len(data)

    def u32(self, offset: int) -> Word:
        return int.from_bytes(self.data[offset : offset + 4], "little")

    def u64(self, offset: int) -> Word:
        return int.from_bytes(self.data[offset : offset + 8], "little")

    @staticmethod
    def fold(a: Word, b: Word) -> Word:
        """Both halves of the 128-bit product, xored."""
        product = a * b
        return (product ^ (product >> 64)) & M64

    @staticmethod
    def swap(a: Word) -> Word:
        """The bytes in reverse order."""
        return int.from_bytes(a.to_bytes(8, "little"), "big")


class _Rows:
    """The same for a column of inputs."""

    def __init__(self, rows: NDArray[np.uint32]) -> None:
        self.columns = rows.T.astype(np.uint64)
        self.length = 4 * rows.shape[1]

    def u32(self, offset: int) -> Word:
        return self.columns[offset // 4]

    def u64(self, offset: int) -> Word:
        column = offset // 4
        return self.columns[column] | (self.columns[column + 1] << 32)

    @staticmethod
    def fold(a: Word, b: Word) -> Word:
        """As `_Bytes.fold`, of 32-bit halves."""
        a_low, a_high, b_low, b_high = a & M32, a >> 32, b & M32, b >> 32
        low, left = a_low * b_low, a_high * b_low
        middle = (low >> 32) + (left & M32) + a_low * b_high
        high = (left >> 32) + (middle >> 32) + a_high * b_high
        return high ^ ((middle << 32) | (low & M32))

    @staticmethod
    def swap(a: Word) -> Word:
        """As `_Bytes.swap`."""
        return a.byteswap()


_Input: TypeAlias = _Bytes | _Rows


def _hash(data: _Input, seed: int) -> Word:
    if data.length > 240:
        return _long(data, seed)
    if data.length > 128:
        return _upto_240(data, seed)
    if data.length > 16:
        return _upto_128(data, seed)
    if data.length > 8:
        return _upto_16(data, seed)
    if data.length >= 4:
        return _upto_8(data, seed)
    assert isinstance(data, _Bytes), "rows have whole words"
    return _upto_3(data.data, seed)


def _avalanche(h: Word) -> Word:
    h = h ^ (h >> 37)
    h = (h * MIX_1) & M64
    return h ^ (h >> 32)


def _upto_3(data: bytes, seed: int) -> int:
    n = len(data)
    if n:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        flip = (_SECRET_WORDS[0] & M32) ^ (_SECRET_WORDS[4] & M32)
        h = combined ^ ((flip + seed) & M64)
    else:
        h = seed ^ _SECRET_WORDS[56] ^ _SECRET_WORDS[64]
    h = ((h ^ (h >> 33)) * P64_2) & M64
    h = ((h ^ (h >> 29)) * P64_3) & M64
    return h ^ (h >> 32)


def _upto_8(data: _Input, seed: int) -> Word:
    seed ^= int.from_bytes((seed & M32).to_bytes(4, "little"), "big") << 32
    flip = ((_SECRET_WORDS[8] ^ _SECRET_WORDS[16]) - seed) & M64
    h = (data.u32(data.length - 4) + (data.u32(0) << 32)) ^ flip
    h = h ^ _rotated(h, 49) ^ _rotated(h, 24)
    h = (h * MIX_2) & M64
    h = h ^ ((h >> 35) + data.length)
    h = (h * MIX_2) & M64
    return h ^ (h >> 28)


def _rotated(h: Word, bits: int) -> Word:
    return ((h << bits) & M64) | (h >> (64 - bits))


def _upto_16(data: _Input, seed: int) -> Word:
    flips = flips_of_16(seed)
    low, high = data.u64(0) ^ flips[0], data.u64(data.length - 8) ^ flips[1]
    return _avalanche((data.length + data.swap(low) + high + data.fold(low, high)) & M64)


def flips_of_16(seed: int) -> tuple[int, int]:
    """What the two words of a 16-byte input are xored with."""
    low = (_SECRET_WORDS[24] ^ _SECRET_WORDS[32]) + seed
    high = (_SECRET_WORDS[40] ^ _SECRET_WORDS[48]) - seed
    return low & M64, high & M64


def _mix(data: _Input, at: int, secret: int, seed: int) -> Word:
    """16 bytes of the input against 16 bytes of the secret."""
    low = data.u64(at) ^ ((_SECRET_WORDS[secret] + seed) & M64)
    high = data.u64(at + 8) ^ ((_SECRET_WORDS[secret + 8] - seed) & M64)
    return data.fold(low, high)


def _upto_128(data: _Input, seed: int) -> Word:
    n = data.length
    total = (n * P64_1) & M64
    for i in range((n - 1) // 32, -1, -1):
        total = total + _mix(data, 16 * i, 32 * i, seed)
        total = total + _mix(data, n - 16 * (i + 1), 32 * i + 16, seed)
    return _avalanche(total & M64)


def _upto_240(data: _Input, seed: int) -> Word:
    n = data.length
    total = (n * P64_1) & M64
    for i in range(8):
        total = total + _mix(data, 16 * i, 16 * i, seed)
    total = _avalanche(total & M64)
    for i in range(8, n // 16):
        total = total + _mix(data, 16 * i, 16 * (i - 8) + 3, seed)
    return _avalanche((total + _mix(data, n - 16, 119, seed)) & M64)


def _long(data: _Input, seed: int) -> Word:
    secret = _seeded_secret(seed)
    sums: list[Word] = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]
    stripes = (data.length - 1) // STRIPE
    for stripe in range(stripes):
        within = stripe % STRIPES_PER_BLOCK
        _accumulate(data, STRIPE * stripe, secret, 8 * within, sums)
        if within == STRIPES_PER_BLOCK - 1:
            for lane in range(8):
                mixed = sums[lane] ^ (sums[lane] >> 47) ^ secret[128 + 8 * lane]
                sums[lane] = (mixed * P32_1) & M64
    _accumulate(data, data.length - STRIPE, secret, 121, sums)
    total = (data.length * P64_1) & M64
    for lane in range(0, 8, 2):
        total = total + data.fold(
            sums[lane] ^ secret[11 + 8 * lane], sums[lane + 1] ^ secret[19 + 8 * lane]
        )
    return _avalanche(total & M64)


def _accumulate(data: _Input, at: int, secret: list[int], key: int, sums: list[Word]) -> None:
    """Take in one stripe."""
    for lane in range(8):
        word = data.u64(at + 8 * lane)
        mixed = word ^ secret[key + 8 * lane]
        sums[lane ^ 1] = (sums[lane ^ 1] + word) & M64
        sums[lane] = (sums[lane] + (mixed & M32) * (mixed >> 32)) & M64


def _seeded_secret(seed: int) -> list[int]:
    """The secret as long inputs use it, u64 at every byte offset."""
    if not seed:
        return _SECRET_WORDS
    words = b"".join(
        struct.pack("<QQ", (_SECRET_WORDS[at] + seed) & M64, (_SECRET_WORDS[at + 8] - seed) & M64)
        for at in range(0, len(SECRET), 16)
    )
    return [struct.unpack_from("<Q", words, offset)[0] for offset in range(185)]
