"""The simulation misses every rule that is taken away."""

from __future__ import annotations

import pytest

from app.faults.mutations import MUTATIONS, applied
from app.faults.simulation import simulate
from app.routing import load, obligations
from streams.intake import Claim

# Seeds that find it quickly. Any change of the product may make others of them; when none of
# these does any more, the search finds new ones, and they belong here.
FOUND_BY = {
    "edge": (0, 1, 3, 5),
    "no-verify": (7, 9, 11, 48),
    "count-refusals": (0, 3, 8, 13),
    "cancel-early": (65, 105, 159, 185),
    "no-fencing": (0, 1),
    "no-fence": (0, 1, 2, 3),
    "no-started": (25, 125, 152, 173),
    "ended-first": (15, 20, 33, 57),
    "commit-early": (5, 8, 16, 28),
    "past-fence": (1, 3, 11, 13),
    "finished-early": (5, 7, 10, 15),
    "go-on": (1, 2, 6, 9),
    "last-words": (25, 56, 64, 66),
    "same-epoch": (2, 3),
    "zombies": (13, 22, 53, 94),
    "highest-from+no-barrier": (96, 315, 349, 988),
    "newest-run+no-barrier": (26, 169, 316, 374),
    "no-barrier+newest-run": (26, 169, 316, 374),
    "finished-once+no-verify": (6, 7, 11, 26),
    "card-first+no-verify": (7, 8, 17, 19),
}
SEARCH = 1500
"""How many seeds are tried before a rule counts as not checked."""


def notices(seed: int, mutation: str) -> bool:
    with applied(mutation):
        return bool(simulate(seed).problems)


@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_rule_is_noticed(name: str) -> None:
    mutation = MUTATIONS[name].to_be_found
    known = FOUND_BY[mutation]
    found = next((s for s in (*known, *range(SEARCH)) if notices(s, mutation)), None)
    assert found is not None, f"{SEARCH} seeds do not miss: {MUTATIONS[name].without}"
    assert not simulate(found).problems, "the seed fails with the rule in place, too"


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
