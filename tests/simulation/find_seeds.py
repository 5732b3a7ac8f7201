"""Search for the seeds in `FOUND_BY` (tests/simulation/test_mutations.py), after a change of the
product made others of them.

    python -m tests.simulation.find_seeds [NAME ...] [--jobs N] [--wanted N] [--seeds N]

A good seed notices the loss of the rule, and is clean with the rule in place. The known seeds are
tried first, then all from 0. The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvlane.app.runtime.process import tune_interpreter
from tests.simulation.mutations import MUTATIONS, scenarios_of
from tests.simulation.test_mutations import FOUND_BY, SEARCH, notices
from workbench.testing.seed_simulation import simulate_seed


class FoundSeeds(NamedTuple):
    """The good seeds for mutations that are applied together (names joined by "+")."""

    mutation: str
    seeds: tuple[int, ...]


def good_seeds(mutation: str, seeds: Iterable[int]) -> Iterator[int]:
    """Those of the seeds that notice the mutation and are clean without it."""
    for seed in seeds:
        if notices(seed, mutation):
            clean = simulate_seed(seed, scenarios_of(mutation))
            if not clean.violations:
                yield seed


def find_seeds(mutation: str, wanted: int, most: int) -> FoundSeeds:
    """The first `wanted` good seeds, the known ones before those below `most`."""
    order = dict.fromkeys((*FOUND_BY.get(mutation, ()), *range(most)))
    return FoundSeeds(mutation, tuple(islice(good_seeds(mutation, order), wanted)))


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 when a mutation has fewer seeds than wanted."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.find_seeds")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; by default all")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--wanted", type=int, default=2, help="seeds of each mutation (2)")
    parser.add_argument("--seeds", type=int, default=SEARCH, help=f"seeds tried ({SEARCH})")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - MUTATIONS.keys():
        parser.error(
            f"no mutations: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}"
        )
    mutations = list(
        dict.fromkeys(MUTATIONS[name].to_detect for name in options.names or MUTATIONS)
    )
    find = partial(find_seeds, wanted=options.wanted, most=options.seeds)
    table: dict[str, tuple[int, ...]] = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs, tune_interpreter) as pool:
        for done, found in enumerate(pool.imap_unordered(find, mutations), 1):
            table[found.mutation] = found.seeds
            line = f"{done}/{len(mutations)} {found.mutation}: {found.seeds or 'none found'}\n"
            sys.stderr.write(line)
            sys.stderr.flush()
    rows = "".join(f'    "{mutation}": {table[mutation]},\n' for mutation in mutations)
    sys.stdout.write(f"FOUND_BY = {{\n{rows}}}\n")
    return int(any(len(seeds) < options.wanted for seeds in table.values()))


if __name__ == "__main__":
    sys.exit(main())
