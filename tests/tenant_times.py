"""Guesses of one tenant about the texts of another one, by the time or the work of its own prompts:
`python -m tests.tenant_times [PAIRS] [--http]`.

A victim prepares a text. An attacker of another tenant prepares the same text and a new one of the
same kind, in random order, and takes the quicker one for the victim's. Without knowledge it is
right in half of the pairs. The same is done by a tenant for its own text, to show that the measure
sees a cache. The two counts of a pair are those of characters that the tokenizer library is given.
They are the measure in process: there also the processor's own caches can be seen, which make a
text that was just tokenised 1 to 2 % quicker (right in 57 to 60 % of pairs; with a second copy of
the tokenizer still in 56 %). Between requests over HTTP that is lost.

With `--http` both are clients with API keys of a deployment in a process of its own, whose engine
has the speed and the prefix cache of a GPU, and a time is that of a whole chat request: of one that
is answered, which the engine's cache and the tokenizer's share, and of one that is refused for its
length, which the tokenizer's shares alone. Usage and headers are compared, too.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import re
import string
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from kvlane.app.preprocess.models.model import LoadedModel, model_of_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, card_of, read_folder
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Artifact
from tests.harness.http_process import HttpProcess, http_process
from tests.harness.key_files import KeyFileHarness, auth_headers

PAIRS = 5000
CONTROL_PAIRS = 300
"""Over HTTP, of the tenant itself."""
WORDS = 400
"""Of a text. They are random, so that none was in an earlier text."""
REFUSED_WORDS = 6000
"""Of a text beyond CONTEXT_LENGTH."""
CONTEXT_LENGTH = 32_768
OWN_HEADERS = frozenset({"date", "x-request-id", "x-kvlane-id", "content-length"})
"""Headers that differ between any two responses."""


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
        costs = {text: await ask(attacker, text.encode().decode()) for text in order}
        right += costs[sent][0] < costs[fresh][0]
        equal_work += costs[sent][1] == costs[fresh][1]
    return Guesses(pairs, right, equal_work)


class Answer(NamedTuple):
    """Of a request: its time, and all else that its client sees of the work for it: cached tokens,
    or the error without numbers, and headers."""

    took_s: float
    seen: object


class HttpTenant:
    """A client with the key of its tenant."""

    def __init__(self, process: HttpProcess, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", process.gateway, timeout=20)
        self._headers = auth_headers(key, **{"content-type": "application/json"})

    def ask(self, text: str, status: int) -> Answer:
        """Send a chat of this text, which gets this status."""
        message = {"role": "user", "content": text}
        encoded = json.dumps({"model": "demo", "max_tokens": 1, "messages": [message]})
        began_at = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", encoded, self._headers)
        response = self._connection.getresponse()
        content = response.read()
        took_s = time.perf_counter() - began_at
        assert response.status == status, content
        body = json.loads(content)
        headers = {n: v for n, v in response.getheaders() if n.lower() not in OWN_HEADERS}
        if status == HTTPStatus.OK:
            return Answer(took_s, (body["usage"]["prompt_tokens_details"], headers))
        return Answer(took_s, (re.sub(r"\d+", "N", body["error"]["message"]), headers))


def guess_over_http(attacker: HttpTenant, victim: HttpTenant, pairs: int, words: int) -> Guesses:
    """`equal_work`: of pairs whose answers look alike. Texts of more than the context are
    refused."""
    status = HTTPStatus.OK if words == WORDS else HTTPStatus.BAD_REQUEST
    draw = random.Random()
    right = alike = 0
    for _ in range(pairs):
        sent, fresh = text_of(draw, words), text_of(draw, words)
        victim.ask(sent, status)
        answers = {text: attacker.ask(text, status) for text in draw.sample((sent, fresh), 2)}
        right += answers[sent].took_s < answers[fresh].took_s
        alike += answers[sent].seen == answers[fresh].seen
    return Guesses(pairs, right, alike)


def text_of(draw: random.Random, words: int = WORDS) -> str:
    """A text of unknown words; all texts have the same length."""
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(words))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tenant_times")
    parser.add_argument("pairs", nargs="?", type=int, default=PAIRS)
    parser.add_argument("--http", action="store_true", help="times of requests over HTTP")
    options = parser.parse_args()
    print_over_http(options.pairs) if options.http else print_in_process(options.pairs)


def print_in_process(pairs: int) -> None:
    pool = ThreadPool(threads=1)
    for name, attacker in (("another tenant", "evil"), ("the tenant itself", "acme")):
        found = asyncio.run(guess(attacker, "acme", pairs, pool))
        print(f"{name}: {described(found)}, equal work in {found.equal_work / pairs:.1%}")  # noqa: T201
    pool.close()


def print_over_http(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFileHarness(Path(folder))
        evil, acme = keys.add("evil"), keys.add("acme")
        settings = {"engine": "simulated", "context_length": CONTEXT_LENGTH, **keys.settings}
        with http_process(Path(folder) / "log", **settings) as process:
            other, victim = HttpTenant(process, evil), HttpTenant(process, acme)
            for what, words in (("answers", WORDS), ("refusals", REFUSED_WORDS)):
                for name, attacker, count in (
                    ("the tenant itself", victim, min(pairs, CONTROL_PAIRS)),
                    ("another tenant", other, pairs),
                ):
                    found = guess_over_http(attacker, victim, count, words)
                    alike = f"answers look alike in {found.equal_work / count:.1%}"
                    print(f"{what}, {name}: {described(found)}, {alike}", flush=True)  # noqa: T201


def described(found: Guesses) -> str:
    return f"right in {found.right / found.pairs:.1%} of {found.pairs} pairs"


if __name__ == "__main__":
    main()
