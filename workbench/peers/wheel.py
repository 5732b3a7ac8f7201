"""Dynamo's index as its Python wheel gives it: how long a match takes, called from Python.

    wheel.py FILE    FILE: npz of `local`, `chain` (sequences, blocks), `workers`, `sent` (numbers)

Runs in the environment that build.sh makes for the wheel, so it imports nothing of kvlane. Prints a
line of JSON: `us`, the time of each call, and `scores`, the blocks of each worker for each.
"""

import json
import sys
import time

import numpy as np
from dynamo._core import RadixTree


def main() -> None:
    given = np.load(sys.argv[1])
    local, chain, workers = given["local"], given["chain"], int(given["workers"])
    tree = RadixTree()
    for number, (hashes, names) in enumerate(zip(local.tolist(), chain.tolist(), strict=True)):
        blocks = [
            {"block_hash": name, "tokens_hash": tokens}
            for name, tokens in zip(names, hashes, strict=True)
        ]
        event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        tree.apply_event(number % workers, json.dumps(event).encode())
    took, scores = [], []
    for number in given["queries"].tolist():
        query = local[number].tolist()
        began = time.perf_counter()
        found = tree.find_matches(query)
        took.append(1e6 * (time.perf_counter() - began))
        scores.append(sorted([worker, blocks] for (worker, _), blocks in found.scores.items()))
    sys.stdout.write(json.dumps({"us": took, "scores": scores}) + "\n")


if __name__ == "__main__":
    main()
