"""The objective of a deployment: how much decode counts beside the time to a first token.

    first-token   the time to the first token, and a hundredth of the time of decode
    balanced      relative losses of both count alike: 1 % of the mean time to a first token as much
                  as 1 % of the mean time to the end
    throughput    the time to the end, with a fifth of the time of decode

With T the mean time to a first token and E that to the end, balanced costs TTFT / T + E2E / E, in
proportion to TTFT + T / (T + E) · decode. T and E follow from the ledger.
"""

from __future__ import annotations

from typing import Final

from kvlane.app.routing.policy_names import Objective
from kvlane.streams.records import Assigned, Finished, LogRecord

FIRST_TOKEN_WEIGHT: Final = 0.01
THROUGHPUT_WEIGHT: Final = 0.2
WINDOW = 1000
"""Answers over which the means are taken."""
LONGEST_MS = 3.6e6
"""An hour; a time beyond it, or one that is no number, is not of an answer."""
INITIAL_TTFT_MS, INITIAL_DECODE_MS, INITIAL_ANSWERS = 100.0, 4800.0, 50
"""The means before an answer was seen, which count as so many."""


class DecodeWeight:
    """The value of a millisecond of decode, in milliseconds to a first token, by an objective."""

    def __init__(self, objective: Objective) -> None:
        self._ttft_ms, self._decode_ms = INITIAL_TTFT_MS, INITIAL_DECODE_MS
        self._held_ms = 0.0
        self._answers = INITIAL_ANSWERS
        self.set_objective(objective)

    def set_objective(self, objective: Objective) -> None:
        """Weigh by another objective from now on; the means stay."""
        self._objective = objective
        self.value = THROUGHPUT_WEIGHT if objective == "throughput" else FIRST_TOKEN_WEIGHT
        if objective == "balanced":
            self._update()

    def on_record(self, log_record: LogRecord) -> None:
        record = log_record.record
        if type(record) is Assigned:
            is_first = record.phase != "decode" and not record.attempt
            if is_first and record.service_class != "batch" and 0 <= record.held_ms <= LONGEST_MS:
                self._held_ms += (record.held_ms - self._held_ms) / self._answers
        elif type(record) is Finished and record.output_tokens > 1:
            decode_ms = record.itl_ms * (record.output_tokens - 1)
            if not (0 < record.ttft_ms <= LONGEST_MS and 0 <= decode_ms <= LONGEST_MS):
                return
            self._answers = min(self._answers + 1, WINDOW)
            self._ttft_ms += (record.ttft_ms - self._ttft_ms) / self._answers
            self._decode_ms += (decode_ms - self._decode_ms) / self._answers
            if self._objective == "balanced":
                self._update()

    def _update(self) -> None:
        ttft_ms = self._held_ms + self._ttft_ms
        self.value = float(f"{ttft_ms / (2 * ttft_ms + self._decode_ms):.2g}")
