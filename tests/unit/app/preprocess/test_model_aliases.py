"""Tests of the model that serves a request for an alias."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.http.openai.served_models import ServedModels
from kvlane.app.preprocess.models.model_aliases import ModelAliases, choice_key, choose_target
from kvlane.app.preprocess.models.model_names import ModelNames
from kvlane.app.preprocess.prompt_errors import UnknownModel
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.preprocess.requests.passthrough import read_passthrough
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import InternalRecord
from kvlane.streams.records import (
    AliasTarget,
    Cordon,
    EngineConfig,
    LogRecord,
    ModelAlias,
    ModelCard,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.topics import REGISTRY

KEYS = [f"id\0{number}" for number in range(20_000)]
FEW_KEYS = KEYS[:300]
WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1)


def targets(**weights: int) -> list[AliasTarget]:
    return [AliasTarget(model=model, weight=weight) for model, weight in weights.items()]


def chosen(**weights: int) -> list[str]:
    found = targets(**weights)
    return [choose_target("chat", found, key) for key in FEW_KEYS]


def fleet_of(*records: InternalRecord) -> Fleet:
    """A fleet with a worker for each of the models a, b and c, and these records."""
    fleet = Fleet()
    config = EngineConfig(model="-")
    cards = [WorkerCard(id=f"w-{m}", slot=0, model=m, config=config, epoch=0) for m in "abc"]
    log_records = [LogRecord(offset, 0, each) for offset, each in enumerate((*cards, *records))]
    fleet.apply(Partition(REGISTRY, 0), log_records, len(log_records))
    return fleet


def alias(**weights: int) -> ModelAlias:
    return ModelAlias(name="chat", targets=tuple(targets(**weights)))


def models_of(*records: InternalRecord) -> set[str]:
    aliases = ModelAliases(fleet_of(*records))
    return {aliases.model("chat", key) for key in FEW_KEYS}


def test_requests_are_shared_by_the_weights() -> None:
    found = targets(a=90, b=9, c=1)
    counts = Counter(choose_target("chat", found, key) for key in KEYS)
    for target in found:
        assert counts[target.model] / len(KEYS) == pytest.approx(target.weight / 100, abs=0.01)


def test_choice_is_the_same_in_every_process() -> None:
    """A change of the hash would move requests in an upgrade: these are its present values."""
    assert (
        "".join(choose_target("chat", targets(a=2, b=1), key) for key in KEYS[:12])
        == "bababaaabbaa"
    )


@given(WEIGHTS, st.data())
def test_a_changed_weight_moves_requests_only_to_or_from_its_model(
    weights: dict[str, int], data: st.DataObject
) -> None:
    changed = data.draw(st.sampled_from(sorted(weights)))
    weight = data.draw(st.integers(1, 1000))
    before, after = chosen(**weights), chosen(**weights | {changed: weight})
    moved = {pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]}
    if weight >= weights[changed]:
        assert all(new == changed for _, new in moved)
    else:
        assert all(old == changed for old, _ in moved)


@given(WEIGHTS, st.integers(2, 9))
def test_only_the_relation_of_weights_counts(weights: dict[str, int], factor: int) -> None:
    scaled = {model: factor * weight for model, weight in weights.items()}
    assert chosen(**scaled) == chosen(**weights)


def test_changed_weight_moves_its_share_and_no_more() -> None:
    before, after = targets(a=90, b=10), targets(a=70, b=30)
    moved = sum(choose_target("chat", before, k) != choose_target("chat", after, k) for k in KEYS)
    assert moved / len(KEYS) == pytest.approx(0.2, abs=0.01)


def test_aliases_divide_users_independently() -> None:
    found = targets(a=1, b=1)
    same = sum(choose_target("chat", found, k) == choose_target("code", found, k) for k in KEYS)
    assert same / len(KEYS) == pytest.approx(0.5, abs=0.02)


def test_share_of_a_model_without_workers_goes_to_the_others() -> None:
    assert models_of(alias(a=1, b=1)) == {"a", "b"}
    assert models_of(alias(a=1, b=1), Tombstone(key="worker/w-b", epoch=0)) == {"a"}
    assert models_of(alias(a=1, b=1), Cordon(worker="w-a")) == {"b"}


def test_model_of_weight_0_serves_while_no_other_can() -> None:
    given = alias(a=1, b=0, c=0)
    assert models_of(given) == {"a"}
    assert models_of(given, Cordon(worker="w-a")) == {"b"}
    assert models_of(given, Cordon(worker="w-a"), Cordon(worker="w-b")) == {"c"}


def test_requests_wait_for_models_with_a_weight_while_none_has_a_worker() -> None:
    cordons = [Cordon(worker=f"w-{model}") for model in "abc"]
    assert models_of(alias(a=1, b=1, c=0), *cordons) == {"a", "b"}


def test_alias_is_listed_as_its_models_are_while_all_their_workers_are_cordoned() -> None:
    cordons = [Cordon(worker=f"w-{model}") for model in "abc"]
    served = ServedModels(fleet_of(alias(a=1, b=1, c=0), *cordons))
    assert [each.name for each in served.models()] == ["a", "b", "c", "chat"]


def test_alias_precedes_the_model_of_its_name_and_may_list_it() -> None:
    model = ModelCard(name="chat")
    assert models_of(model, alias(a=1)) == {"a"}
    assert models_of(model, alias(chat=1)) == {"chat"}
    assert models_of(model, alias(a=1), Tombstone(key="alias/chat")) == {"chat"}


def test_target_is_a_model_even_if_an_alias_has_its_name() -> None:
    own = ModelAlias(name="a", targets=tuple(targets(b=1, a=0)))
    kinds = [ModelCard(name="a", kind="chat"), ModelCard(name="b", kind="chat")]
    aliases = ModelAliases(fleet_of(own, alias(a=1, c=1), *kinds))
    assert {aliases.model("chat", key) for key in FEW_KEYS} == {"a"}, "c takes another kind"
    assert aliases.model("a", "key") == "b"


def test_alias_of_a_model_name_is_listed_once_and_hides_no_card() -> None:
    own = ModelAlias(name="a", targets=tuple(targets(b=1, a=1)))
    served = ServedModels(fleet_of(own, ModelCard(name="a", checksum="x")))
    assert [each.name for each in served.models()] == ["a", "b", "c"]
    card = served.model("a").card
    assert card is not None
    assert card.checksum == "x"
    assert served.listed("a").card is None


@pytest.mark.parametrize(
    "bad",
    [
        ModelAlias(name="chat"),
        ModelAlias(name="chat", targets=(AliasTarget(model="chat", weight=1),)),
        ModelAlias(name="chat", targets=(AliasTarget(model="none", weight=1),)),
        ModelAlias(name="chat", targets=(AliasTarget(model="other", weight=-3),)),
    ],
)
def test_record_that_no_command_writes_names_no_model(bad: ModelAlias) -> None:
    """An alias without models, of itself, of nothing, and of another alias."""
    names = ModelNames(fleet_of(bad, ModelAlias(name="other", targets=tuple(targets(a=1)))))
    with pytest.raises(UnknownModel):
        names.find("chat", names.aliases.model("chat", "key"))


def test_models_of_another_kind_than_the_first_get_no_requests() -> None:
    kinds = [ModelCard(name="b", kind="chat"), ModelCard(name="c", kind="chat")]
    aliases = ModelAliases(fleet_of(*kinds, alias(b=1, a=9, c=1)))
    assert aliases.kind("chat") == "chat"
    assert {aliases.model("chat", key) for key in FEW_KEYS} == {"b", "c"}


def test_removed_alias_names_no_model() -> None:
    assert models_of(alias(a=1), Tombstone(key="alias/chat")) == {"chat"}


def test_key_of_a_request_is_its_session_then_its_user_then_its_id() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    user, session = {"user": "u"}, {"nvext": {"session_control": {"session_id": "s"}}}
    for read in (read_openai, read_passthrough):
        keys = [
            choice_key(read("chat", body | more), tenant, "r1")
            for more in ({}, user, session, user | session) for tenant in ("t1", "t2")
        ]  # fmt: skip
        assert keys[0] == keys[1]
        assert len(set(keys)) == 5, "users and sessions belong to a tenant"
        assert keys[4:6] == keys[6:8]
