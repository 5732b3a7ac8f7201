"""The simulation misses every rule that is taken away."""

from __future__ import annotations

import pytest

from app.routing import reconcile
from app.routing.state import ledger
from app.testing.seed_simulation import simulate_seed
from streams.reading.group_consumer import PartitionClaim
from tests.simulation.mutations import MUTATIONS, apply_mutations, needs_take_overs

# Seeds that find it quickly. Any change of the product may make others of them; when none of
# these does any more, the search finds new ones, and they belong here.
FOUND_BY = {
    "edge": (1, 2),
    "newest-run+no-barrier": (84, 198),
    "no-verify": (15, 102),
    "count-refusals": (63, 92),
    "cancel-early": (522, 875),
    "no-fencing": (1, 2),
    "no-fence": (1, 2),
    "no-started": (15, 33),
    "started-unknown": (80, 119),
    "finished-once+no-verify": (15, 22),
    "ended-first": (1, 6),
    "no-barrier+newest-run": (84, 198),
    "commit-early": (5, 6),
    "highest-from+no-barrier": (305, 561),
    "old-attempts": (4, 20),
    "past-fence": (31, 35),
    "finished-early": (2, 10),
    "go-on": (1, 2),
    "last-words": (103, 154),
    "card-first+no-verify": (5, 10),
    "same-epoch": (4, 6),
    "zombies": (1, 15),
    "own-clock": (4, 5),
    "ask-once": (0, 4),
    "prompts-early": (14, 36),
    "prompts-refused": (3, 14),
    "paused": (10, 20),
    "from-start": (14, 20),
    "from-now": (14, 20),
    "events-once": (4, 35),
    "snapshot-ahead": (25, 46),
    "join-ahead": (31, 44),
    "any-model": (0, 1),
    "any-lane": (1, 140),
    "no-objections": (8, 12),
}
SEARCH = 1000
"""How many seeds are tried before a rule counts as not checked; the rarest shows in one of 200."""


def notices(seed: int, mutation: str) -> bool:
    """Whether the seed shows the harm that the loss of these rules does, and no other alone."""
    shows = {
        kind for name in mutation.split("+") for kind in MUTATIONS[name].expected_kinds.split()
    }
    with apply_mutations(mutation):
        return bool(simulate_seed(seed, take_overs=needs_take_overs(mutation)).kinds & shows)


@pytest.mark.timeout(300)  # the search is long, but most often unnecessary
@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_rule_is_noticed(name: str) -> None:
    mutation = MUTATIONS[name].to_detect
    known = FOUND_BY[mutation]
    found = next((s for s in (*known, *range(SEARCH)) if notices(s, mutation)), None)
    assert found is not None, f"{SEARCH} seeds do not miss: {MUTATIONS[name].rule}"
    clean = simulate_seed(found, take_overs=needs_take_overs(mutation))
    assert not clean.violations, "the seed fails with the rule in place, too"


def test_cover_is_a_rule_that_is_checked_itself() -> None:
    covers = {m.covered.by for m in MUTATIONS.values() if m.covered}
    assert covers <= MUTATIONS.keys()


def test_rules_are_back_afterwards() -> None:
    def rules() -> list[object]:
        watched = (ledger.RequestState, ledger, reconcile, PartitionClaim)
        return [dict(vars(owner)) for owner in watched]

    before = rules()
    with apply_mutations("+".join(MUTATIONS)):
        assert rules() != before
    assert rules() == before


def test_unknown_rule_is_an_error() -> None:
    with pytest.raises(KeyError), apply_mutations("no-such-rule"):
        pass
