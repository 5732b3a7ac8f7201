"""Tests of mutations: the simulation misses every rule that is taken away."""

from __future__ import annotations

import pytest

from kvlane.app.routing import reconcile
from kvlane.app.routing.state import ledger, request_state
from kvlane.streams.reading.group_consumer import PartitionClaim
from tests.simulation.mutations import MUTATIONS, apply_mutations, scenarios_of
from workbench.testing.seed_simulation import simulate_seed

# Seeds that find it quickly. Any change of the product may make others of them; when none of
# these does any more, the search finds new ones, and they belong here.
FOUND_BY = {
    "edge": (1,),
    "newest-run+no-barrier": (176, 185),
    "no-verify": (6, 30),
    "count-refusals": (2, 24),
    "cancel-early": (209, 323),
    "no-fencing": (1,),
    "no-fence": (1,),
    "no-started": (100, 102),
    "started-unknown": (100, 169),
    "finished-once+no-verify": (6, 30),
    "ended-first": (1,),
    "no-barrier+newest-run": (176, 185),
    "commit-early": (3, 5),
    "highest-from+no-barrier": (274, 349),
    "old-attempts": (10, 12),
    "past-fence": (13,),
    "finished-early": (3, 20),
    "go-on": (3, 10),
    "last-words": (24, 47),
    "card-first+no-verify": (6, 19),
    "same-epoch": (31,),
    "zombies": (2, 10),
    "own-clock": (0, 2),
    "ask-once": (4,),
    "prompts-early": (0,),
    "prompts-by-poll+ended-forgotten": (2,),
    "prompts-refused": (3,),
    "paused": (7, 28),
    "credit-acknowledged": (3,),
    "credit-late": (110, 119),
    "room-unshared": (0,),
    "from-start": (8,),
    "from-now": (8,),
    "events-once": (13, 24),
    "snapshot-ahead": (25,),
    "join-ahead": (3, 22),
    "preempt-unfenced": (3,),
    "renewal-blank": (2,),
    "result-early": (8,),
    "result-open": (10,),
    "prefill-chunks": (0, 1),
    "decode-early": (14,),
    "handover-twice": (5,),
    "handover-late": (105, 396),
    "decode-lost": (2,),
    "prefill-failed+transfer-endless": (10, 37),
    "transfer-endless+prefill-failed": (10, 37),
    "transfer-cancelled": (97, 206),
    "merge-across": (4,),
    "results-unseen": (2, 13),
    "results-unread": (2, 17),
    "ended-forgotten": (22, 24),
    "start-late": (0, 31),
    "revoked-kept": (1,),
    "any-tenant": (4,),
    "tenants-meet": (4,),
    "limits-kept": (3,),
    "limits-apart": (0,),
    "files-apart": (0, 8),
    "batches-apart": (78,),
    "replies-awaited": (7,),
    "reply-early": (181, 274),
    "reply-again": (17,),
    "any-model": (0,),
    "any-lane": (1, 83),
    "no-objections": (8,),
    "grammar-at-root": (2,),
    "ids-drawn": (0,),
    "delta-dropped": (1,),
    "data-again": (1,),
    "evacuate-unfenced": (0, 2),
    "cordon-forgotten": (1, 8),
}
SEARCH = 1000
"""How many seeds are tried before a rule counts as not checked; the rarest shows in one of 200."""


TO_DETECT = {frozenset(m.to_detect.split("+")): name for name, m in MUTATIONS.items()}
"""Names of mutations; one name where two rules mask each other and are disabled together."""


def notices(seed: int, mutation: str) -> bool:
    """Whether the seed shows the harm that the loss of these rules does, and no other alone."""
    shows = {
        kind for name in mutation.split("+") for kind in MUTATIONS[name].expected_kinds.split()
    }
    with apply_mutations(mutation):
        return bool(simulate_seed(seed, scenarios_of(mutation)).kinds & shows)


@pytest.mark.parametrize("name", TO_DETECT.values())
def test_missing_rule_is_detected(name: str) -> None:
    mutation = MUTATIONS[name].to_detect
    known = FOUND_BY[mutation]
    found = next((s for s in (*known, *range(SEARCH)) if notices(s, mutation)), None)
    assert found is not None, f"{SEARCH} seeds do not miss: {MUTATIONS[name].rule}"
    clean = simulate_seed(found, scenarios_of(mutation))
    assert not clean.violations, "the seed fails with the rule in place, too"


def test_cover_is_a_rule_that_is_checked_itself() -> None:
    covers = {m.covered.by for m in MUTATIONS.values() if m.covered}
    assert covers <= MUTATIONS.keys()


def test_rules_are_restored_afterwards() -> None:
    def rules() -> list[object]:
        watched = (request_state.RequestState, ledger, request_state, reconcile, PartitionClaim)
        return [dict(vars(owner)) for owner in watched]

    before = rules()
    with apply_mutations("+".join(MUTATIONS)):
        assert rules() != before
    assert rules() == before


def test_unknown_rule_is_an_error() -> None:
    with pytest.raises(KeyError), apply_mutations("no-such-rule"):
        pass
