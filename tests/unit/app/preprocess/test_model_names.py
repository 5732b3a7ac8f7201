"""Tests of the model of a prompt, by the records of the registry."""

from __future__ import annotations

import pytest

from kvlane.app.preprocess.models.model_names import ModelNames
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, UnknownModel
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import InternalRecord
from kvlane.streams.records import (
    Artifact,
    EngineConfig,
    LogRecord,
    ModelCard,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.topics import REGISTRY

FILE = Artifact(sha256="0" * 64, size=1)


def worker(name: str, model: str, context: int | None = None) -> WorkerCard:
    config = EngineConfig(model=model, context_length=context)
    return WorkerCard(id=name, slot=0, model=model, config=config)


def models(*records: InternalRecord) -> ModelNames:
    fleet = Fleet()
    log_records = [LogRecord(offset, 0, record) for offset, record in enumerate(records)]
    fleet.apply(Partition(REGISTRY, 0), log_records, len(log_records))
    return ModelNames(fleet)


def test_only_the_models_own_workers_count() -> None:
    known = models(worker("a", "small", 5), worker("b", "large", 100), worker("c", "large", 90))
    assert known.find("chat", "small").context_length == 5
    assert known.find("chat", "large").context_length == 90


def test_model_of_bytes_leaves_with_its_last_worker() -> None:
    known = models(worker("a", "m", 5), Tombstone(key="worker/a", epoch=0))
    assert not known.cards()


def test_tombstone_of_an_older_epoch_is_ignored() -> None:
    known = models(worker("x", "other"), worker("a", "m", 5), Tombstone(key="worker/a", epoch=0))
    assert known.find("chat", "m").context_length == 5


def test_model_with_files_stays_when_its_workers_leave() -> None:
    card = ModelCard(name="m", tokenizer=FILE, context_length=7)
    known = models(card, worker("a", "m", 5), Tombstone(key="worker/a", epoch=1))
    assert known.find("chat", "m") == card
    assert list(known.with_files()) == [card]


def test_card_without_a_context_has_that_of_its_workers() -> None:
    known = models(ModelCard(name="m", tokenizer=FILE), worker("a", "m", 5))
    assert known.find("chat", "m").context_length == 5


def test_no_name_means_the_only_model() -> None:
    assert models(worker("a", "m"), worker("b", "m")).find("chat", "").name == "m"
    with pytest.raises(InvalidPrompt, match="model: is needed; available: m, n"):
        models(worker("a", "m"), worker("b", "n")).find("chat", "")


def test_unknown_model_error_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match=r"model: the model 'n' does not exist; available: m$"):
        models(worker("a", "m")).find("chat", "n")


def test_long_name_is_truncated_in_an_error() -> None:
    with pytest.raises(InvalidPrompt, match=f"the model '{'x' * 64}…' does not exist"):
        models(worker("a", "m")).find("chat", "x" * 9000)


def test_model_of_another_kind_is_named() -> None:
    with pytest.raises(InvalidPrompt, match="model: 'm' is for chats and completions"):
        models(worker("a", "m")).find("embedding", "m")


def test_long_list_of_names_is_cut() -> None:
    known = models(*(worker(f"w{n}", f"m{n}") for n in range(9)))
    with pytest.raises(InvalidPrompt, match=r"m0, m1, m2, m3, m4, …$"):
        known.find("chat", "x")


def test_bodies_are_passed_on_to_models_that_take_them() -> None:
    known = models(worker("a", "m"), ModelCard(name="c", kind="chat"))
    assert known.is_passthrough("c")
    for name in ("m", "nobody", "", None, 3, ["c"]):
        assert not known.is_passthrough(name)
    assert models(ModelCard(name="c", kind="chat")).is_passthrough("")


def test_model_serves_its_endpoints_only() -> None:
    known = models(ModelCard(name="m", kind="embedding"))
    with pytest.raises(InvalidPrompt, match="model: 'm' is for embedding requests"):
        known.find("chat", "m")


def test_no_name_means_the_only_served_model_whatever_the_history() -> None:
    gone = ModelCard(name="old", tokenizer=FILE)
    kept = ModelCard(name="new", kind="chat")
    known = models(gone, kept, worker("a", "new"))
    assert known.find("chat", "") == kept
    assert known.is_passthrough("")
    assert models(gone).find("chat", "") == gone
