"""Models and aliases of a deployment as rows of `--json`, from a `FleetView`. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.app.audit.fleet.worker_rows import WorkerRow
from kvlane.app.preprocess.models.model_aliases import ModelAliases


class ModelRow(msgspec.Struct, frozen=True):
    """A model. `tokenizer`: SHA-256 of its file; `checksum`: of the card; "": none. `versions`: of
    the engines of its workers."""

    name: str
    kind: str
    workers: int
    ready: int
    open: int
    queued: int
    context_length: int | None
    tokenizer: str
    checksum: str
    versions: list[str]


class AliasRow(msgspec.Struct, frozen=True):
    """A target of an alias. `share`: of the requests that name the alias now; `ready`: workers."""

    name: str
    model: str
    weight: int
    share: float
    ready: int


def model_rows(
    view: FleetView, workers: Sequence[WorkerRow], open_requests: Sequence[RequestRow]
) -> list[ModelRow]:
    """The models that have a card, one of all `workers`, or one of all `open_requests`."""
    present, ready, versions = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
    for worker in workers:
        if worker.state != "lost":
            present[worker.model] += 1
            can_answer = worker.state == "ready" and not worker.order and worker.role != "prefill"
            ready[worker.model] += can_answer
            versions[worker.model] |= {f"{name} {of}" for name, of in worker.versions.items()}
    counts, queued = Counter[str](), Counter[str]()
    for row in open_requests:
        counts[row.model] += 1
        queued[row.model] += row.phase == "queued"
    cards = view.fleet.models
    rows = []
    for name in sorted(cards.keys() | present.keys() | {n for n in counts if n}):
        card = cards.get(name)
        tokenizer = None if card is None else card.tokenizer
        rows.append(
            ModelRow(
                name, "" if card is None else card.kind, present[name], ready[name],
                counts[name], queued[name], None if card is None else card.context_length,
                "" if tokenizer is None else tokenizer.sha256,
                "" if card is None else card.checksum, sorted(versions[name]),
            )
        )  # fmt: skip
    return rows


def alias_rows(view: FleetView, models: Sequence[ModelRow]) -> list[AliasRow]:
    """The targets of the aliases in effect, in the order of their records."""
    aliases, ready = ModelAliases(view.fleet), {row.name: row.ready for row in models}
    rows = []
    for alias in aliases.present():
        serving = aliases.serving(alias)
        total = sum(max(each.weight, 1) for each in serving) or 1
        for target in alias.targets:
            share = max(target.weight, 1) / total if target in serving else 0.0
            rows.append(
                AliasRow(
                    alias.name, target.model, target.weight, round(share, 4),
                    ready.get(target.model, 0),
                )
            )  # fmt: skip
    return rows
