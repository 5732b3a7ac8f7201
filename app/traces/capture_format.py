"""The capture file format: a period of the log, with all inputs of its routing decisions.

JSON, one object a line, its kind in field `t`; compressed with zstd where the name ends in `.zst`.
Times are the broker's, in ms since 1970. In this order, each kind in the order of its lane:

    Capture    the period and the version of the format; the first line
    Worker     an epoch of a worker that existed in the period, by its card
    Asked      a request of the period: its length and the hashes of its blocks
    Decided    a decision of the period, with the inputs of its candidates' costs
    Prefilled  a run produced its first token    Ran      a run ended: the engine's figures
    Ended      a router ended the request        Counted  the number of lines; the last line

Runs and ends after the period are included. The request of a decision may be missing, since
requests are kept for an hour, decisions for a day.

A file contains no prompts, answers, tokens, error texts, tenants, cache salts or keys. Block names
are keyed hashes under a secret that is drawn for each file and discarded. It does contain ids of
requests and sessions, and names of models, adapters, workers and taints.

New fields are optional and come at the end; readers skip lines of unknown kinds.
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

from kvlane.app.operator_error import OperatorError
from kvlane.streams.records import Assigned, EngineConfig, Finished, PrefillDone, Role
from kvlane.streams.request import Hints, RouterConfigOverride

CAPTURE_FORMAT = 1
BLOCK_HASH = np.dtype("<u8")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 6
_PROGRESS_EVERY = 500


class InvalidCapture(OperatorError):
    """An invalid or incomplete capture; the message names the file, the line, and the remedy."""


class CaptureLine(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="t", tag=True
):
    """A line of a capture."""


class CaptureHeader(CaptureLine, frozen=True, tag="Capture"):
    """The header: the period [from_ms, to_ms)."""

    format: int
    from_ms: int
    to_ms: int
    lanes: int = 0


class CapturedWorker(CaptureLine, frozen=True, tag="Worker"):
    """An epoch of a worker, from its first card on. `config` without its addresses."""

    id: str
    epoch: int
    since_ms: int
    model: str
    config: EngineConfig
    role: Role = "aggregated"
    ranks: int = 1
    taints: tuple[str, ...] = ()


class CapturedRequest(CaptureLine, frozen=True, tag="Asked"):
    """A request. `blocks`: the hashes of its full blocks (u64, little endian), in base64."""

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
    def block_hashes(self) -> NDArray[np.uint64]:
        """`blocks` as numbers. Raises ValueError if malformed."""
        return np.frombuffer(self.blocks, BLOCK_HASH).astype(np.uint64)

    @property
    def session(self) -> str:
        control = self.hints.session_control
        return control.session_id if control else ""


class CapturedDecision(CaptureLine, frozen=True, tag="Decided"):
    """A decision, from `offset` of `lane` of the ledger.

    JSON has no infinity: `endless` lists the infinite params by name, and the candidates with
    infinite costs by position; they are 0 in the file.
    """

    at_ms: int
    lane: int
    offset: int
    decision: Assigned
    endless: tuple[str | int, ...] = ()


class CapturedPrefill(CaptureLine, frozen=True, tag="Prefilled"):
    """A first token. `done` without the data that prefill hands to decode."""

    at_ms: int
    done: PrefillDone


class CapturedRun(CaptureLine, frozen=True, tag="Ran"):
    at_ms: int
    end: Finished


class CapturedEnd(CaptureLine, frozen=True, tag="Ended"):
    at_ms: int
    id: str
    code: str


class CaptureTotals(CaptureLine, frozen=True, tag="Counted"):
    """The number of lines by kind. `unread`: malformed records; `without_request`: decisions whose
    request is no longer retained."""

    lines: dict[str, int]
    unread: int = 0
    without_request: int = 0


# The tags are part of the format, the names of the classes are not.
AnyCaptureLine: TypeAlias = (
    CaptureHeader
    | CapturedWorker
    | CapturedRequest
    | CapturedDecision
    | CapturedPrefill
    | CapturedRun
    | CapturedEnd
    | CaptureTotals
)
LINE_KINDS = frozenset(kind.__struct_config__.tag for kind in AnyCaptureLine.__args__)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyCaptureLine)


class _LineType(msgspec.Struct):
    t: str


_kinds = msgspec.json.Decoder(_LineType)


@contextmanager
def created_capture(file: Path) -> Iterator[CaptureWriter]:
    """Write a file that appears when it is complete. Raises InvalidCapture."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as out:
            yield from _written(out, compress=file.suffix == ".zst")
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError as e:
        raise InvalidCapture(f"{file} cannot be written: {e.strerror}") from e
    finally:
        with suppress(OSError):
            part.unlink()


class CaptureWriter:
    def __init__(self, out: Any) -> None:
        self._out = out

    def write_line(self, line: AnyCaptureLine) -> None:
        if isinstance(line, CapturedDecision):
            line = _finite(line)
        self._out.write(_encoder.encode(line) + b"\n")


def _written(out: IO[bytes], *, compress: bool) -> Iterator[CaptureWriter]:
    if not compress:
        yield CaptureWriter(out)
        return
    with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(out, closefd=False) as packed:
        yield CaptureWriter(packed)


def read_capture(
    file: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Iterator[AnyCaptureLine]:
    """The lines of a file. Raises InvalidCapture, for a truncated file at its end. `progress` is
    called now and then with the bytes read and the size of the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as raw:
            packed = raw.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
            raw.seek(0)
            text: Any = zstandard.ZstdDecompressor().stream_reader(raw) if packed else raw
            for number, line in enumerate(_lines(file, io.BufferedReader(text) if packed else raw)):
                if number % _PROGRESS_EVERY == 0:
                    progress(raw.tell(), size)
                yield line
            progress(size, size)
    except OSError as e:
        raise InvalidCapture(f"{file}: {e.strerror}") from e
    except zstandard.ZstdError as e:
        raise InvalidCapture(f"{file}: truncated or damaged ({e}); capture it again") from e


def _lines(file: Path, text: IO[bytes]) -> Iterator[AnyCaptureLine]:
    number, line = 0, None
    for number, raw in enumerate(text, 1):
        try:
            line = _decoder.decode(raw)
        except msgspec.DecodeError as e:
            if number > 1 and _kind(raw) not in LINE_KINDS | {""}:
                continue
            what = f"{file}, line {number}"
            raise InvalidCapture(f"{what}: not a line of a capture (`kvlane capture`): {e}") from e
        if number == 1:
            if not isinstance(line, CaptureHeader):
                raise InvalidCapture(f"{file}: not a capture (`kvlane capture` makes one)")
            if line.format != CAPTURE_FORMAT:
                raise InvalidCapture(
                    f"{file}: format {line.format}, this version reads {CAPTURE_FORMAT}"
                )
        yield _endless(line) if isinstance(line, CapturedDecision) and line.endless else line
    if not isinstance(line, CaptureTotals):
        raise InvalidCapture(f"{file}: truncated after line {number}; capture it again")


def _finite(line: CapturedDecision) -> CapturedDecision:
    """The line with 0 in place of infinity, and the names of these values in `endless`."""
    decision = line.decision
    names: list[str | int] = [name for name, x in decision.params.items() if math.isinf(x)]
    names += [i for i, each in enumerate(decision.candidates) if math.isinf(each.cost)]
    return replace(_with(line, names, 0.0), endless=tuple(names)) if names else line


def _endless(line: CapturedDecision) -> CapturedDecision:
    return replace(_with(line, line.endless, math.inf), endless=())


def _with(line: CapturedDecision, names: Sequence[str | int], value: float) -> CapturedDecision:
    params, candidates = dict(line.decision.params), list(line.decision.candidates)
    for name in names:
        if isinstance(name, str):
            params[name] = value
        elif name < len(candidates):
            candidates[name] = replace(candidates[name], cost=value)
    decision = replace(line.decision, params=params).with_candidates(candidates)
    return replace(line, decision=decision)


def _kind(raw: bytes) -> str:
    """The kind of a line; "" without one."""
    try:
        return _kinds.decode(raw).t
    except msgspec.DecodeError:
        return ""
