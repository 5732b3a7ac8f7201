"""Choices of other routing settings beside the recorded decisions, from the same inputs. Pure."""

from __future__ import annotations

import msgspec

from kvlane.app.routing.queueing.objective import DecodeWeight
from kvlane.app.routing.selection.policies.registry import POLICIES
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import choose_otherwise
from kvlane.streams.records import Assigned, LogRecord

SHADOWED = ("predictive", "dynamo", "least_loaded")
"""Policies whose choice follows from recorded inputs alone, by costs that are amounts."""


class ShadowRow(msgspec.Struct):
    """The decisions for a model by a policy, `others` of which go to another worker by the settings
    of the shadow. `regret`: mean cost of the taken place, by the shadow, above that of its own
    choice; `extra_cost`: of the shadow's choice, by the router, above the taken place; None where
    costs are no amounts. `unknown`: decisions without the inputs of the shadow's policy."""

    model: str
    policy: str
    decisions: int = 0
    others: int = 0
    unknown: int = 0
    regret: float = 0.0
    extra_cost: float | None = None


class Shadow:
    """The choices of other settings beside the decisions of routers, by model and policy."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._decode_weight = DecodeWeight(config.objective)
        self._rows: dict[tuple[str, str], ShadowRow] = {}

    @property
    def rows(self) -> list[ShadowRow]:
        return [self._rows[key] for key in sorted(self._rows)]

    def add(self, log_record: LogRecord) -> None:
        """Apply the next record of the ledger."""
        decision = log_record.record
        self._decode_weight.on_record(log_record)
        if (
            isinstance(decision, Assigned)
            and decision.phase != "decode"
            and decision.policy in POLICIES
        ):
            self._compare(decision)

    def _compare(self, decision: Assigned) -> None:
        model = "" if decision.account is None else decision.account.model
        key = model, decision.policy
        if (row := self._rows.get(key)) is None:
            row = self._rows[key] = ShadowRow(*key)
        weights = self._config.predictive_weights._replace(decode_weight=self._decode_weight.value)
        choice = choose_otherwise(decision, self._config._replace(predictive_weights=weights))
        candidates, place = decision.candidates, (decision.worker, decision.epoch, decision.rank)
        taken = [i for i, c in enumerate(candidates) if (c.worker, c.epoch, c.rank) == place]
        if choice is None or not taken:
            row.unknown += 1
            return
        row.decisions += 1
        row.others += choice.position != taken[0]
        regret = float(choice.costs[taken[0]] - choice.costs[choice.position])
        row.regret += (regret - row.regret) / row.decisions
        if decision.policy in SHADOWED:
            extra, before = (
                candidates[choice.position].cost - candidates[taken[0]].cost,
                row.extra_cost or 0.0,
            )
            row.extra_cost = before + (extra - before) / row.decisions
