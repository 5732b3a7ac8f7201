"""Tests of the search for seeds that notice a mutation."""

from __future__ import annotations

import pytest

from tests.simulation.find_seeds import find_seeds, main
from tests.simulation.test_mutations import SEARCH, notices


def test_found_seed_detects_the_mutation() -> None:
    found = find_seeds("any-model", wanted=1, most=SEARCH)
    assert [notices(seed, "any-model") for seed in found.seeds] == [True]


def test_unknown_mutation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-rule"])
    assert "no mutations: no-such-rule" in capsys.readouterr().err
