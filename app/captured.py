"""Captures: a period of the log in a file, with all that its decisions can be taken again from.

JSON, one object a line, its kind in field `t`; compressed with zstd where the name ends in `.zst`.
Times are the broker's, in ms since 1970. In this order, each kind in the order of its lane:

    Capture    the period and the version of the format, first of all
    Worker     a life of a worker that there was in the period, by its card
    Asked      a request that came in the period: its length and the names of its blocks
    Decided    a decision of the period, whole: with the inputs of its candidates' costs
    Prefilled  a run got its first token         Ran      a run ended: what its engine found
    Ended      a router ended the request        Counted  how many of each there are, last of all

Of a decision of the period everything follows, as far as it is in the log, also what came after the
period. `Asked` of a decision may be missing: requests are kept for an hour, decisions for a day.

What a file does not hold: prompts, answers, tokens, texts of errors, tenants, cache salts, keys or
other secrets. Names of blocks are keyed hashes under a secret that is drawn for each file and then
forgotten: equal names in one file are equal prefixes, and that is all they tell; nobody can try
out prompts on them. What it does hold besides figures: ids of requests and sessions, names of
models, adapters, workers and taints. So it may be given to those who may see a log file.

Fields are only added, optional, at the end; lines of an unknown kind are skipped by readers of the
same format. Pure but for the file; who makes a capture is `app/audit/capture.py`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec
import numpy as np
import zstandard
from msgspec.structs import replace
from numpy.typing import NDArray

from streams.records import (
    Assigned,
    EngineConfig,
    Finished,
    Hints,
    PrefillDone,
    Role,
    RouterConfigOverride,
)

FORMAT = 1
BLOCK_NAME = np.dtype("<u8")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 6
_SAY_EVERY = 500


class BadCapture(Exception):
    """Not a capture, or not a whole one; the message names the file, the line, and what to do."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="t", tag=True):
    """A line of a capture."""


class Capture(Line, frozen=True):
    """What follows is of [from_ms, to_ms)."""

    format: int
    from_ms: int
    to_ms: int
    lanes: int = 0


class Worker(Line, frozen=True):
    """A life of a worker, from its first card on. `config` without its addresses."""

    id: str
    epoch: int
    since_ms: int
    model: str
    config: EngineConfig
    role: Role = "aggregated"
    ranks: int = 1
    taints: tuple[str, ...] = ()


class Asked(Line, frozen=True):
    """A request. `blocks`: the names of its whole blocks (u64, little endian), in base64."""

    id: str
    at_ms: int
    prompt_tokens: int
    block_size: int
    blocks: bytes = b""
    model: str = ""
    max_tokens: int | None = None
    hints: Hints = Hints()
    router_config_override: RouterConfigOverride | None = None

    @property
    def block_names(self) -> NDArray[np.uint64]:
        """`blocks` as numbers. Raises ValueError if they are none."""
        return np.frombuffer(self.blocks, BLOCK_NAME).astype(np.uint64)

    @property
    def session(self) -> str:
        """The id of its session, "" for none."""
        control = self.hints.session_control
        return control.session_id if control else ""


class Decided(Line, frozen=True):
    """A decision, as the ledger has it at `offset` of `lane`.

    JSON has no infinity: `endless` names the params, and the candidates by their place among them
    for their costs, that are infinite, and have 0 in the file. `lines_of` puts it back.
    """

    at_ms: int
    lane: int
    offset: int
    decision: Assigned
    endless: tuple[str | int, ...] = ()


class Prefilled(Line, frozen=True):
    """`done` without what prefill hands to decode."""

    at_ms: int
    done: PrefillDone


class Ran(Line, frozen=True):
    """`end` without its message."""

    at_ms: int
    end: Finished


class Ended(Line, frozen=True):
    """A router ended the request with a code of its own."""

    at_ms: int
    id: str
    code: str


class Counted(Line, frozen=True):
    """Lines by kind. `unread`: records that no codec reads; `without_request`: decisions whose
    request was not kept any more.
    """

    lines: dict[str, int]
    unread: int = 0
    without_request: int = 0


AnyLine: TypeAlias = Capture | Worker | Asked | Decided | Prefilled | Ran | Ended | Counted
KINDS = frozenset(kind.__name__ for kind in AnyLine.__args__)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


class _Kind(msgspec.Struct):
    t: str


_kinds = msgspec.json.Decoder(_Kind)


@contextmanager
def written(file: Path) -> Iterator[Writer]:
    """A file that is there, whole, when the block ends without an error, and else is not.

    Raises BadCapture where it cannot be written.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as out:
            yield from _written(out, compress=file.suffix == ".zst")
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError as e:
        raise BadCapture(f"{file} cannot be written: {e.strerror}") from e
    finally:
        with suppress(OSError):
            part.unlink()


class Writer:
    """Appends lines."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def write(self, line: AnyLine) -> None:
        """One more."""
        if isinstance(line, Decided):
            line = _finite(line)
        self._out.write(_encoder.encode(line) + b"\n")


def _written(out: IO[bytes], *, compress: bool) -> Iterator[Writer]:
    if not compress:
        yield Writer(out)
        return
    with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(out, closefd=False) as packed:
        yield Writer(packed)


def lines_of(
    file: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Iterator[AnyLine]:
    """The lines of a file in their order. Raises BadCapture, at the end for one that was cut.

    `progress` hears now and then how many of how many bytes are read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as raw:
            packed = raw.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
            raw.seek(0)
            text: Any = zstandard.ZstdDecompressor().stream_reader(raw) if packed else raw
            for number, line in enumerate(_lines(file, io.BufferedReader(text) if packed else raw)):
                if number % _SAY_EVERY == 0:
                    progress(raw.tell(), size)
                yield line
            progress(size, size)
    except OSError as e:
        raise BadCapture(f"{file}: {e.strerror}") from e
    except zstandard.ZstdError as e:
        raise BadCapture(f"{file}: cut or damaged ({e}): capture it again") from e


def _lines(file: Path, text: IO[bytes]) -> Iterator[AnyLine]:
    number, line = 0, None
    for number, raw in enumerate(text, 1):
        try:
            line = _decoder.decode(raw)
        except msgspec.DecodeError as e:
            if number > 1 and _kind(raw) not in KINDS | {""}:
                continue
            what = f"{file}, line {number}"
            raise BadCapture(f"{what}: no line of a capture (`kvlane capture`): {e}") from e
        if number == 1:
            if not isinstance(line, Capture):
                raise BadCapture(f"{file}: does not begin as a capture (`kvlane capture`) does")
            if line.format != FORMAT:
                raise BadCapture(f"{file}: of format {line.format}, this kvlane reads {FORMAT}")
        yield _endless(line) if isinstance(line, Decided) and line.endless else line
    if not isinstance(line, Counted):
        raise BadCapture(f"{file}: ends after line {number}, cut: capture it again")


def _finite(line: Decided) -> Decided:
    """The line with 0 for infinity, which it names."""
    decision = line.decision
    names: list[str | int] = [name for name, x in decision.params.items() if math.isinf(x)]
    names += [i for i, each in enumerate(decision.candidates) if math.isinf(each.cost)]
    return replace(_with(line, names, 0.0), endless=tuple(names)) if names else line


def _endless(line: Decided) -> Decided:
    """The inverse."""
    return replace(_with(line, line.endless, math.inf), endless=())


def _with(line: Decided, names: Sequence[str | int], value: float) -> Decided:
    params, candidates = dict(line.decision.params), list(line.decision.candidates)
    for name in names:
        if isinstance(name, str):
            params[name] = value
        elif name < len(candidates):
            candidates[name] = replace(candidates[name], cost=value)
    decision = replace(line.decision, params=params, candidates=tuple(candidates))
    return replace(line, decision=decision)


def _kind(raw: bytes) -> str:
    """What a line says it is, "" if it does not."""
    try:
        return _kinds.decode(raw).t
    except msgspec.DecodeError:
        return ""
