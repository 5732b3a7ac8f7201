"""Model availability: whether a model has workers, may get some, or has had none for too long."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from kvlane.app.routing.state.fleet import Fleet

MAX_MODELS = 10_000
"""Bound on the names of models; more than any registry has."""


class ModelAvailability:
    """The models of one router's fleet.

    `absence_ms`: how long requests wait for a model without workers. `needs_prefill`: no request is
    served without a prefill worker.
    """

    def __init__(self, fleet: Fleet, absence_ms: float, *, needs_prefill: bool = False) -> None:
        self._fleet = fleet
        self._absence_ms = absence_ms
        self._needs_prefill = needs_prefill
        self._known: OrderedDict[str, None] = OrderedDict()
        self._absent_since_ms: OrderedDict[str, int] = OrderedDict()
        """By model, the time of the first request that found no worker."""
        self._fleet_version = -1
        """The version of the fleet for which `_served` is right."""
        self._served: frozenset[str] = frozenset()

    def has_worker(self, model: str) -> bool:
        """Whether workers that are not lost serve this model; any worker serves ""."""
        if self._fleet_version != self._fleet.version:
            self._served = self._served_models()
            self._fleet_version = self._fleet.version
        return model in self._served

    def _served_models(self) -> frozenset[str]:
        models: dict[bool, set[str]] = {False: set(), True: set()}
        for _, member in self._fleet.live_members():
            models[member.card.role == "prefill"] |= {member.card.model, ""}
        return frozenset(models[False] & models[True] if self._needs_prefill else models[False])

    def is_known(self, model: str) -> bool:
        """Whether waiting for this model makes sense: it has workers, had some, or has a card.

        Without a single worker, a wrong name cannot be told from a model whose workers are to come.
        """
        return (
            not model
            or model in self._known
            or self.has_worker(model)
            or not any(self._fleet.live_members())
        )

    def is_timed_out(self, model: str, now_ms: int) -> bool:
        """Whether a model has had no worker for so long that requests no longer wait for one. From
        the first request that found none: an autoscaler on demand needs some time."""
        if self.has_worker(model):
            return False
        since_ms = self._absent_since_ms.setdefault(model, now_ms)
        _forget_first(self._absent_since_ms)
        return now_ms - since_ms > self._absence_ms

    def absent_until_ms(self, model: str) -> float:
        """The broker time at which requests that wait for a worker of this model are refused; inf
        if none has waited since it had one."""
        return self._absent_since_ms.get(model, math.inf) + self._absence_ms

    def on_card(self, model: str) -> None:
        """A card of a worker or of the model was read."""
        self._known[model] = None
        _forget_first(self._known)

    def on_fleet_changed(self) -> None:
        """Drop the absences that are over."""
        for model in [each for each in self._absent_since_ms if self.has_worker(each)]:
            del self._absent_since_ms[model]


def _forget_first(models: OrderedDict[str, Any]) -> None:
    while len(models) > MAX_MODELS:
        models.popitem(last=False)
