"""Candidates for a request: the eligible places, with the inputs of their costs in columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvlane.app.routing.selection.cost_kernels import Floats, Ints, Words
from kvlane.app.routing.worker_rank import WorkerRank

NO_MULTIPLIER: Floats = np.empty(0)
"""No factors on the costs."""


class Reservations(NamedTuple):
    """The reservations of the other requests in this router, in the order of their arrival: the
    option `rows` which each is planned, -1 for none of these, and its standalone prefill in
    `prefill_ms`.
    """

    rows: Ints
    prefill_ms: Floats


NO_RESERVATIONS = Reservations(np.empty(0, np.int64), np.empty(0))


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates for a request with all inputs of a policy; one row each.

    `hashes`: see `rank_hashes`; `curves`: see `recorded_curve`. `features`: load and speed;
    `blocks`: leading blocks of the prompt cached on the device, and those to load from host and
    disk; see `cost_kernels.py`. `taint_weights`: the sum of the weights of a place's preferred
    taints. Only policies with a forecast use `reservations`.
    """

    worker_ranks: Sequence[WorkerRank]
    hashes: Words
    curves: Sequence[tuple[float, ...]]
    features: Floats
    blocks: Floats
    taint_weights: Floats | None = None
    reservations: Reservations = NO_RESERVATIONS

    @property
    def taint_multiplier(self) -> Floats:
        """The factors of preferred taints on costs: exp(-tanh(Σ weights)); empty without any."""
        if self.taint_weights is None:
            return NO_MULTIPLIER
        return np.array([math.exp(-math.tanh(w)) for w in self.taint_weights.tolist()])

    def subset(self, numbers: Ints) -> Candidates:
        position = np.full(
            len(self.worker_ranks) + 1, -1
        )  # the last one is for places of other pools
        position[numbers] = np.arange(len(numbers))
        which = numbers.tolist()
        return Candidates(
            [self.worker_ranks[i] for i in which], self.hashes[numbers],
            [self.curves[i] for i in which],
            self.features[numbers], self.blocks[numbers],
            None if self.taint_weights is None else self.taint_weights[numbers],
            Reservations(position[self.reservations.rows], self.reservations.prefill_ms),
        )  # fmt: skip
