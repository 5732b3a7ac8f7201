"""Guesses of one tenant about the texts of another one, by the time or the work of its own prompts:
`python -m tests.tenant_times [PAIRS] [--http]`.

A victim prepares a text. An attacker of another tenant prepares the same text and a new one of the
same kind, in random order, and takes the quicker one for the victim's. Without knowledge it is
right in half of the pairs. The same is done by a tenant for its own text, to show that the measure
sees a cache. The two counts of a pair are those of characters that the tokenizer library is given.

With `--http` both are clients with API keys of a deployment in a process of its own, and a time is
that of a whole chat request. It needs an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvlane.app.preprocess.models.model import LoadedModel, model_of_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, card_of, read_folder
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Artifact
from tests.harness.http_process import http_process
from tests.harness.key_files import KeyFileHarness, auth_headers

PAIRS = 5000
WORDS = 400
"""Of a text. They are random, so that none was in an earlier text."""


class Guesses(NamedTuple):
    """Of some pairs: right guesses by time, and pairs whose two counts of work are equal."""

    pairs: int
    right: int
    equal_work: int


class CountingLibrary:
    """The tokenizer library of a model, with the characters that it is given."""

    def __init__(self, model: LoadedModel) -> None:
        self.chars = 0
        self._library = model.tokenizer._tokenizer
        model.tokenizer._tokenizer = self

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._library.encode_batch_fast(texts, **options)


async def guess(attacker: str, victim: str, pairs: int, pool: WorkPool) -> Guesses:
    files = read_folder(DEMO_MODEL_FOLDER)
    artifact = Artifact(sha256="", size=0)
    card = card_of("demo", files, artifact, artifact, context_length=100_000)
    model = await model_of_files(card, files, pool, SystemClock())
    library = CountingLibrary(model)
    draw = random.Random(attacker + victim)

    async def ask(tenant: str, text: str) -> tuple[float, int]:
        library.chars = 0
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        request = read_openai("chat", body)
        began_at = time.perf_counter()
        await model.prepare(request, tenant)
        return time.perf_counter() - began_at, library.chars

    right = equal_work = 0
    for _ in range(pairs):
        sent, fresh = text_of(draw), text_of(draw)
        await ask(victim, sent)
        order = draw.sample((sent, fresh), 2)
        costs = {text: await ask(attacker, text) for text in order}
        right += costs[sent][0] < costs[fresh][0]
        equal_work += costs[sent][1] == costs[fresh][1]
    return Guesses(pairs, right, equal_work)


def guess_over_http(attacker: str, victim: str, pairs: int) -> float:
    """The share of right guesses."""
    draw = random.Random(attacker + victim)
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFileHarness(Path(folder))
        tokens = {tenant: keys.add(tenant) for tenant in (attacker, victim)}
        with http_process(Path(folder) / "log", **keys.settings) as process:
            connection = http.client.HTTPConnection("127.0.0.1", process.gateway, timeout=20)

            def ask(tenant: str, text: str) -> float:
                body = {
                    "model": "demo",
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": text}],
                }
                headers = auth_headers(tokens[tenant], **{"content-type": "application/json"})
                encoded = json.dumps(body)
                began_at = time.perf_counter()
                connection.request("POST", "/v1/chat/completions", encoded, headers)
                response = connection.getresponse()
                content = response.read()
                took_s = time.perf_counter() - began_at
                assert response.status == 200, content
                return took_s

            right = 0
            for _ in range(pairs):
                sent, fresh = text_of(draw), text_of(draw)
                ask(victim, sent)
                times = {text: ask(attacker, text) for text in draw.sample((sent, fresh), 2)}
                right += times[sent] < times[fresh]
            connection.close()
    return right / pairs


def text_of(draw: random.Random) -> str:
    """A text of unknown words; all texts have the same length."""
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(WORDS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tenant_times")
    parser.add_argument("pairs", nargs="?", type=int, default=PAIRS)
    parser.add_argument("--http", action="store_true", help="times of requests over HTTP")
    options = parser.parse_args()
    pool = ThreadPool(threads=1)
    for name, attacker in (("another tenant", "evil"), ("the tenant itself", "acme")):
        if options.http:
            right, more = guess_over_http(attacker, "acme", options.pairs), ""
        else:
            found = asyncio.run(guess(attacker, "acme", options.pairs, pool))
            right = found.right / found.pairs
            more = f", equal work in {found.equal_work / found.pairs:.1%}"
        print(f"{name}: right in {right:.1%} of {options.pairs} pairs{more}")  # noqa: T201
    pool.close()


if __name__ == "__main__":
    main()
