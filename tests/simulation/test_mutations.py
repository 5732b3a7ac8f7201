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
    "edge": (1, 2),
    "newest-run+no-barrier": (85, 135),
    "no-verify": (14, 26),
    "count-refusals": (5,),
    "cancel-early": (137,),
    "no-fencing": (0, 1),
    "no-fence": (0, 1),
    "no-started": (134, 195),
    "started-unknown": (76, 212),
    "finished-once+no-verify": (10, 14),
    "ended-first": (7,),
    "no-barrier+newest-run": (85, 135),
    "commit-early": (3,),
    "highest-from+no-barrier": (2,),
    "old-attempts": (12,),
    "past-fence": (9, 10),
    "finished-early": (0, 1),
    "go-on": (0,),
    "last-words": (38,),
    "card-first+no-verify": (6,),
    "same-epoch": (1, 20),
    "zombies": (20,),
    "own-clock": (3, 4),
    "ask-once": (0,),
    "prompts-early": (1,),
    "from-start": (10,),
    "from-now": (10,),
    "events-once": (46,),
    "snapshot-ahead": (4, 45),
    "any-lane": (1,),
    "any-model": (0, 1),
    "no-objections": (8, 12),
}
SEARCH = 1000
"""How many seeds are tried before a rule counts as not checked; the rarest shows in one of 200."""


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
