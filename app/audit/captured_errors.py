"""Errors of predicted times in a capture, by model and worker.

Worker     names the model of an epoch
Decided    predicted: time to first token, time between tokens
Ran        measured: the same two
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from typing import NamedTuple

from kvlane.app.audit.drift import (
    COMPLETE,
    MAX_OPEN_DECISIONS,
    ErrorShares,
    error_share,
    error_shares,
)
from kvlane.app.traces.capture_format import (
    AnyCaptureLine,
    CapturedDecision,
    CapturedRun,
    CapturedWorker,
)
from kvlane.streams.records import Finished, RunKey


class ErrorSummary(NamedTuple):
    """The errors of some runs, None with too few of them. `worker`: "" for all of the model."""

    model: str
    worker: str
    runs: int
    ttft: ErrorShares | None
    itl: ErrorShares | None


class _Predicted(NamedTuple):
    worker: str
    epoch: int
    ttft_ms: float
    itl_ms: float


class _Errors:
    """The errors of a worker, as shares of the measured times."""

    def __init__(self) -> None:
        self.runs = 0
        self.ttft, self.itl = array("d"), array("d")

    def add(self, predicted: _Predicted, end: Finished) -> None:
        self.runs += 1
        for found, share in (
            (self.ttft, error_share(predicted.ttft_ms, end.ttft_ms)),
            (self.itl, error_share(predicted.itl_ms, end.itl_ms)),
        ):
            if share is not None:
                found.append(share)

    def extend(self, other: _Errors) -> None:
        self.runs += other.runs
        self.ttft.extend(other.ttft)
        self.itl.extend(other.itl)

    def summary(self, model: str, worker: str) -> ErrorSummary:
        return ErrorSummary(
            model, worker, self.runs, error_shares(self.ttft), error_shares(self.itl)
        )


class CapturedErrors:
    """Compares the decisions of a capture with their runs, line by line."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, int], str] = {}
        self._open: OrderedDict[RunKey, _Predicted] = OrderedDict()
        self._found: defaultdict[tuple[str, str], _Errors] = defaultdict(_Errors)

    def add_line(self, line: AnyCaptureLine) -> None:
        """Take a line, in the order of the capture."""
        if isinstance(line, CapturedWorker):
            self._models[line.id, line.epoch] = line.model
        elif isinstance(line, CapturedDecision):
            made = line.decision
            # The first token of a decode comes after a transfer, which is not predicted.
            if made.phase != "decode" and made.ttft_ms_predicted:
                self._open[made.run_key] = _Predicted(
                    made.worker, made.epoch, made.ttft_ms_predicted, made.itl_ms_predicted
                )
                while len(self._open) > MAX_OPEN_DECISIONS:
                    self._open.popitem(last=False)
        elif isinstance(line, CapturedRun):
            self._end(line.end)

    def _end(self, end: Finished) -> None:
        predicted, place = self._open.pop(end.run_key, None), (end.worker, end.epoch)
        if predicted is not None and end.code in COMPLETE and place == predicted[:2]:
            self._found[self._models.get(place, ""), end.worker].add(predicted, end)

    def summaries(self) -> list[ErrorSummary]:
        """Of each model: all its workers together, then each of them."""
        found: list[ErrorSummary] = []
        for model in sorted({model for model, _ in self._found}):
            all_of, each = _Errors(), []
            for (of, worker), errors in sorted(self._found.items()):
                if of == model:
                    all_of.extend(errors)
                    each.append(errors.summary(model, worker))
            found += [all_of.summary(model, ""), *each]
        return found
