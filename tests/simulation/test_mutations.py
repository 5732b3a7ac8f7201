"""The simulation misses every rule that is taken away."""

from __future__ import annotations

import pytest

from app.faults.mutations import MUTATIONS, applied, of_take_overs
from app.faults.simulation import simulate
from app.routing import load, obligations
from streams.intake import Claim

# Seeds that find it quickly. Any change of the product may make others of them; when none of
# these does any more, the search finds new ones, and they belong here.
FOUND_BY = {
    "edge": (0, 2, 3, 4, 5, 6),
    "newest-run+no-barrier": (13, 72, 74, 116, 191, 234),
    "no-verify": (19, 39, 44, 55, 80, 82),
    "count-refusals": (3, 7, 9, 13, 25, 29),
    "cancel-early": (191, 208, 388, 468, 732, 956),
    "no-fencing": (0, 1, 2, 3, 4, 5),
    "no-fence": (0, 1, 2, 3, 4, 5),
    "no-started": (4, 65, 95, 191, 201, 333),
    "started-unknown": (60, 318, 384, 454, 468, 577),
    "finished-once+no-verify": (19, 44, 47, 49, 55, 61),
    "ended-first": (11, 32, 36, 52, 53, 56),
    "no-barrier+newest-run": (13, 72, 74, 116, 191, 234),
    "commit-early": (0, 13, 17, 22, 34, 47),
    "highest-from+no-barrier": (6, 132, 383, 433, 583, 644),
    "past-fence": (0, 3, 20, 23, 24, 25),
    "finished-early": (9, 18, 20, 28, 42, 48),
    "go-on": (3, 6, 10, 20, 28, 31),
    "last-words": (24, 53, 64, 69, 71, 115),
    "card-first+no-verify": (0, 1, 5, 6, 8, 9),
    "same-epoch": (1, 12, 15, 31, 34, 43),
    "zombies": (24, 147, 250, 316, 471, 497),
}
SEARCH = 1000
"""How many seeds are tried before a rule counts as not checked; the rarest shows in one of 150."""


def notices(seed: int, mutation: str) -> bool:
    with applied(mutation):
        return bool(simulate(seed, take_overs=of_take_overs(mutation)).problems)


@pytest.mark.timeout(300)  # the search is long, but most often unnecessary
@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_rule_is_noticed(name: str) -> None:
    mutation = MUTATIONS[name].to_be_found
    known = FOUND_BY[mutation]
    found = next((s for s in (*known, *range(SEARCH)) if notices(s, mutation)), None)
    assert found is not None, f"{SEARCH} seeds do not miss: {MUTATIONS[name].without}"
    clean = simulate(found, take_overs=of_take_overs(mutation))
    assert not clean.problems, "the seed fails with the rule in place, too"


def test_cover_is_a_rule_that_is_checked_itself() -> None:
    covers = {m.covered.by for m in MUTATIONS.values() if m.covered}
    assert covers <= MUTATIONS.keys()


def test_rules_are_back_afterwards() -> None:
    def rules() -> list[object]:
        watched = (load.Story, load, obligations, Claim)
        return [dict(vars(owner)) for owner in watched]

    before = rules()
    with applied("+".join(MUTATIONS)):
        assert rules() != before
    assert rules() == before


def test_unknown_rule_is_an_error() -> None:
    with pytest.raises(KeyError), applied("no-such-rule"):
        pass
