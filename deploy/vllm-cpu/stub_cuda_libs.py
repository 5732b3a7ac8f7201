#!/usr/bin/env python3
"""Stubs of 1.9 GB of CUDA libraries, so that the CUDA build of torch loads without a GPU.

torch is linked against those libraries. Without a GPU none of them is ever called, yet the dynamic
loader needs the files and every symbol. This script reads from the installed torch which symbols it
imports from each library that is missing, and writes small shared objects with exactly
these symbols into torch/lib, where torch's RPATH finds them. Every stub function returns 1, which
is an error code in all of these interfaces. The real cudart and cupti (13 MB) are installed, so
`torch.cuda.is_available()` is False, as it should be.

Run it with the interpreter of the environment that holds torch. Needs no compiler, leaves
libraries that are installed alone, refuses to work beside a CUDA driver, and may be run again.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Libraries that may be stubbed, each with the pattern of the symbols it owns: torch asks for some
# symbols without naming a version, and thereby without naming the library.
STUBBABLE = {
    "libcublas": r"cublas(?!Lt)",
    "libcublasLt": r"cublasLt",
    "libcudnn": r"cudnn",
    "libcufft": r"cufft",
    "libcufile": r"cuFile",
    "libcurand": r"curand",
    "libcusparse": r"cusparse(?!Lt)",
    "libcusparseLt": r"cusparseLt",
    "libnccl": r"p?nccl",
    "libnvrtc": r"nvrtc",
    "libnvshmem_host": r"nvshmem",
}
MARK = b"kvlane stub"  # in every stub, so that a real library is never replaced
RETURN_1 = bytes.fromhex("b801000000c3")  # mov eax, 1; ret

# The parts of the ELF format that are used here, 64 bit and little-endian (man 5 elf).
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
DYNAMIC = struct.Struct("<qQ")
PAGE = 4096
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 1, 4, 5, 6, 10, 11, 14
DT_VERSYM, DT_VERDEF, DT_VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
READ, WRITE, EXECUTE = 4, 2, 1
GLOBAL_FUNCTION = 0x12
VERSION_NUMBER = 0x7FFF  # without the topmost bit, set if the version is hidden

Versions = dict[str, str | None]  # symbol → version, None where the symbol has none


class Section(NamedTuple):
    """Offset and size of a section in its file, in bytes."""

    offset: int
    size: int
    entries: int  # sh_info, which counts the entries of the version section


class Wanted(NamedTuple):
    """A symbol that a library expects elsewhere; from which library only if it has a version."""

    symbol: str
    library: str | None
    version: str | None


@dataclass(frozen=True)
class SharedObject:
    """Requirements of one shared object: libraries, versions and symbols of others."""

    needed: list[str]
    wanted: list[Wanted]

    @classmethod
    def read(cls, path: Path) -> SharedObject:
        """Read it from its file, which must be ELF, 64 bit and little-endian."""
        data = path.read_bytes()
        sections = _sections(data)
        strings = sections[".dynstr"].offset
        versions = dict(_versions(data, sections, strings))
        return cls(
            needed=list(_needed(data, sections[".dynamic"], strings)),
            wanted=list(_wanted(data, sections, strings, versions)),
        )


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def _sections(data: bytes) -> dict[str, Section]:
    header = FILE_HEADER.unpack_from(data)
    table, size, count, names_index = header[6], header[11], header[12], header[13]
    rows = [SECTION.unpack_from(data, table + i * size) for i in range(count)]
    names = rows[names_index][4]
    return {_text(data, names + row[0]): Section(row[4], row[5], row[7]) for row in rows}


def _needed(data: bytes, dynamic: Section, strings: int) -> Iterator[str]:
    for offset in range(dynamic.offset, dynamic.offset + dynamic.size, DYNAMIC.size):
        tag, value = DYNAMIC.unpack_from(data, offset)
        if tag == DT_NEEDED:
            yield _text(data, strings + value)


def _versions(
    data: bytes, sections: dict[str, Section], strings: int
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Number of each required version → library and name of the version."""
    if ".gnu.version_r" not in sections:
        return
    offset = sections[".gnu.version_r"].offset
    for _ in range(sections[".gnu.version_r"].entries):
        _, count, library, first, step = struct.unpack_from("<HHIII", data, offset)
        at = offset + first
        for _ in range(count):
            _, _, number, name, aux_step = struct.unpack_from("<IHHII", data, at)
            yield number, (_text(data, strings + library), _text(data, strings + name))
            at += aux_step
        offset += step


def _wanted(
    data: bytes, sections: dict[str, Section], strings: int, versions: dict[int, tuple[str, str]]
) -> Iterator[Wanted]:
    symbols, numbers = sections[".dynsym"], sections.get(".gnu.version")
    for i in range(1, symbols.size // SYMBOL.size):
        name, _, _, section, _, _ = SYMBOL.unpack_from(data, symbols.offset + i * SYMBOL.size)
        if section:
            continue  # defined here
        number = 0
        if numbers is not None:
            (number,) = struct.unpack_from("<H", data, numbers.offset + i * 2)
        library, version = versions.get(number & VERSION_NUMBER, (None, None))
        yield Wanted(_text(data, strings + name), library, version)


def _hash(name: str) -> int:
    """The hash of the ELF symbol table (System V)."""
    h = 0
    for byte in name.encode():
        h = (h << 4) + byte
        high = h & 0xF0000000
        h = (h ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return h


class Strings:
    """A string table: each text once, found by its offset."""

    def __init__(self) -> None:
        self.blob = bytearray(b"\0")
        self._offsets: dict[str, int] = {}

    def offset(self, text: str) -> int:
        """Offset of this text, in bytes; added if it is new."""
        if text not in self._offsets:
            self._offsets[text] = len(self.blob)
            self.blob += text.encode() + b"\0"
        return self._offsets[text]


def build_stub(soname: str, versions: Versions) -> bytes:
    """A shared object of this name in which every symbol is one function that returns 1.

    Layout: headers, then a page-aligned segment to read and execute (tables, code), then one to
    write, which holds the dynamic section, as the loader relocates that in place.
    """
    names = sorted(versions)
    defined = sorted({version for version in versions.values() if version})
    strings = Strings()
    version_table = _version_definitions(soname, defined, strings)
    name_offsets = [strings.offset(name) for name in names]
    soname_offset = strings.offset(soname)
    strings.blob += MARK + b"\0"

    # Version 0 is local, 1 the library itself; ours are counted from 2.
    number = {version: i for i, version in enumerate(defined, 2)}
    numbers = [0, *(number.get(versions[name] or "", 1) for name in names)]
    blob = bytearray(FILE_HEADER.size + 4 * SEGMENT.size)
    at: dict[str, int] = {}
    for part, content in {
        "hash": _hash_table(names),
        "symbols": bytes(SYMBOL.size * (len(names) + 1)),
        "strings": bytes(strings.blob),
        "versions": struct.pack(f"<{len(numbers)}H", *numbers),
        "definitions": version_table,
        "code": RETURN_1,
    }.items():
        blob += bytes(-len(blob) % 16)
        at[part] = len(blob)
        blob += content
    for i, offset in enumerate(name_offsets, 1):
        where = at["symbols"] + i * SYMBOL.size
        SYMBOL.pack_into(blob, where, offset, GLOBAL_FUNCTION, 0, 1, at["code"], len(RETURN_1))

    read_size = len(blob)
    blob += bytes(-len(blob) % PAGE)
    dynamic_at = len(blob)
    dynamic = [
        (DT_SONAME, soname_offset),
        (DT_HASH, at["hash"]),
        (DT_STRTAB, at["strings"]),
        (DT_SYMTAB, at["symbols"]),
        (DT_STRSZ, len(strings.blob)),
        (DT_SYMENT, SYMBOL.size),
    ]
    if defined:
        dynamic += [
            (DT_VERSYM, at["versions"]),
            (DT_VERDEF, at["definitions"]),
            (DT_VERDEFNUM, len(defined) + 1),
        ]
    blob += b"".join(DYNAMIC.pack(*entry) for entry in [*dynamic, (0, 0)])
    _write_headers(blob, read_size, dynamic_at)
    return bytes(blob)


def _hash_table(names: list[str]) -> bytes:
    buckets = max(1, len(names))
    first, following = [0] * buckets, [0] * (len(names) + 1)
    for i, name in enumerate(names, 1):
        bucket = _hash(name) % buckets
        following[i], first[bucket] = first[bucket], i
    return struct.pack(
        f"<II{buckets}I{len(following)}I", buckets, len(following), *first, *following
    )


def _version_definitions(soname: str, defined: list[str], strings: Strings) -> bytes:
    table = b""
    names = [soname, *defined]
    for i, name in enumerate(names, 1):
        is_base, to_next = int(i == 1), 0 if i == len(names) else 28
        table += struct.pack("<HHHHIII", 1, is_base, i, 1, _hash(name), 20, to_next)
        table += struct.pack("<II", strings.offset(name), 0)
    return table


def _write_headers(blob: bytearray, read_size: int, dynamic_at: int) -> None:
    dynamic_size = len(blob) - dynamic_at
    identity = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)  # 64 bit, little-endian
    FILE_HEADER.pack_into(
        blob, 0, identity, 3, 62, 1, 0, FILE_HEADER.size, 0, 0,  # a shared object for x86-64
        FILE_HEADER.size, SEGMENT.size, 4, 64, 0, 0,
    )  # fmt: skip
    segments = [
        (PT_LOAD, READ | EXECUTE, 0, read_size, PAGE),
        (PT_LOAD, READ | WRITE, dynamic_at, dynamic_size, PAGE),
        (PT_DYNAMIC, READ | WRITE, dynamic_at, dynamic_size, 8),
        (PT_GNU_STACK, READ | WRITE, 0, 0, 16),  # without it the stack would be executable
    ]
    for i, (kind, flags, start, size, align) in enumerate(segments):
        where = FILE_HEADER.size + i * SEGMENT.size
        SEGMENT.pack_into(blob, where, kind, flags, start, start, start, size, size, align)


def missing_symbols(lib: Path) -> dict[str, Versions]:
    """Symbols that the torch in this folder imports from each library that may be stubbed."""
    files = sorted([*lib.glob("lib*torch*.so"), *lib.glob("libc10*.so")])
    objects = [SharedObject.read(f) for f in files if f.name != "libtorch_cuda_linalg.so"]
    stems = {soname.split(".so")[0]: soname for obj in objects for soname in obj.needed}
    owners = {stem: soname for stem, soname in stems.items() if stem in STUBBABLE}
    symbols: dict[str, Versions] = {soname: {} for soname in owners.values()}
    for wanted in (w for obj in objects for w in obj.wanted):
        if wanted.library is not None:
            if wanted.library in symbols:
                symbols[wanted.library][wanted.symbol] = wanted.version
            continue
        for stem, soname in owners.items():
            if re.match(STUBBABLE[stem], wanted.symbol):
                symbols[soname].setdefault(wanted.symbol, None)
    return symbols


def install(lib: Path, soname: str, versions: Versions) -> str:
    """Write the stub unless a real library is there; returns a line for the report."""
    if any(lib.parent.parent.glob(f"nvidia/*/lib/{soname}")):
        return "installed, kept"
    target = lib / soname
    if target.exists() and MARK not in target.read_bytes():
        return "in torch/lib, kept"
    stub = build_stub(soname, versions)
    if target.exists() and target.read_bytes() == stub:
        return "stub is there"
    fresh = target.with_suffix(".new")  # renamed: a process that maps the old file lives on
    fresh.write_bytes(stub)
    fresh.replace(target)
    return f"stub written, {len(versions)} symbols"


def main() -> int:
    """Stub the missing libraries of this environment's torch; returns the exit status."""
    spec = importlib.util.find_spec("torch")  # finds without importing
    if spec is None or spec.origin is None:
        print("torch is not installed in this environment: run install.sh", file=sys.stderr)
        return 1
    lib = Path(spec.origin).parent / "lib"
    if not (lib / "libtorch_cuda.so").exists():
        print("this torch is built for CPUs: nothing to do")
        return 0
    if ctypes.util.find_library("cuda"):
        print("there is a CUDA driver: install the extra `vllm` instead", file=sys.stderr)
        return 1
    for soname, versions in sorted(missing_symbols(lib).items()):
        print(f"{soname}: {install(lib, soname, versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
