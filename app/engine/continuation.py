"""What an engine without a model says: a function of the sequence so far, and of nothing else.

So a request that was interrupted continues the same text on any worker, and every test can tell
what the text must be. A `Continuation` gives an answer's tokens one after the other, from a
sequence that ends where it is to go on; giving some of them first and asking again with those
appended must give the same rest. It may end by itself; then the model has ended its answer.

`Speaker` says readable things in the tokens of any model, `echo` is for models of bytes. What of it
a client gets to see, with its limits and stops, is `due`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from importlib.resources import files
from itertools import count, pairwise
from typing import NamedTuple

from app.engine.echo import turn_of
from app.preprocess.stops import TextStream
from streams.codecs import TOKEN_BYTES, pack_tokens, unpack_tokens
from streams.records import FinishReason, Request

Continuation = Callable[[Sequence[int], int | None], Iterator[int]]
"""(sequence, most tokens that are wanted, None for as many as the model likes) → tokens."""

SENTENCES = 4
"""After one in so many sentences an answer ends."""


class Due(NamedTuple):
    """A whole answer, as it must be whatever happened to the workers that gave it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None


def due(
    request: Request,
    continuation: Continuation,
    text: TextStream,
    context_length: int | None = None,
) -> Due:
    """The answer to a request. `text`: its stream of text, new; it knows the stops and limits.

    `context_length`: that of the engine, for requests without a limit.
    """
    sequence = unpack_tokens(request.token_ids)
    room = None if context_length is None else max(context_length - len(sequence), 0)
    said: list[int] = []
    parts: list[str] = []
    for token in continuation(sequence, request.stop.max_tokens):
        if len(said) == room:
            return Due(tuple(said), "".join(parts) + text.end(), "length")
        piece = text.feed([token])
        said.append(token)
        parts.append(piece.text)
        if piece.finish_reason is not None:
            return Due(tuple(said), "".join(parts), piece.finish_reason, piece.stop_reason)
    return Due(tuple(said), "".join(parts) + text.end(), "stop")


def echo(sequence: Sequence[int], max_tokens: int | None) -> Iterator[int]:
    """The last turn again, as the echo engine says it: once, or over and over up to a limit."""
    body, said = turn_of(sequence)
    if not body:
        return
    for k in count(said):
        if max_tokens is None and k >= len(body):
            return
        yield body[k % len(body)]


def corpus() -> list[str]:
    """The sentences that come with kvlane, for a `Speaker` to speak like."""
    text = files("app").joinpath("data/sentences.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


class Speaker:
    """Speaks like its sentences: a token is one that follows the last two somewhere in them.

    Which one is drawn by a digest of the whole sequence, so a single wrong token of a prompt makes
    another answer. After a sentence the answer may end, with `end`, a token that ends answers; a
    sequence that goes on behind it begins another sentence.
    """

    def __init__(
        self, sentences: Sequence[str], encode: Callable[[str], Sequence[int]], end: int | None
    ) -> None:
        """`encode`: text to tokens, without special ones. Raises ValueError for no sentences."""
        if not sentences:
            raise ValueError("there are no sentences to speak like")
        self._end = end
        self._first: list[int] = []
        self._later: list[int] = []
        self._after_one: dict[int, list[int | None]] = defaultdict(list)
        self._after_two: dict[tuple[int, int], list[int | None]] = defaultdict(list)
        for sentence in sentences:
            first, later = encode(sentence), encode(f" {sentence}")
            self._first.append(first[0])
            self._later.append(later[0])
            self._learn(first)
            self._learn(later)

    def __call__(self, sequence: Sequence[int], _max_tokens: int | None) -> Iterator[int]:
        """As `Continuation`; ends by itself only where there is no token to end with."""
        digest = blake2b(pack_tokens(sequence), digest_size=16)
        before, last = ([-1, -1, *sequence[-2:]])[-2:]
        while True:
            token = self._next(before, last, int.from_bytes(digest.digest(), "little"))
            if token is None:
                return
            yield token
            digest.update(token.to_bytes(TOKEN_BYTES, "little"))
            before, last = last, token

    def _learn(self, tokens: Sequence[int]) -> None:
        followed: list[int | None] = [*tokens[1:], None]
        for token, following in zip(tokens, followed, strict=True):
            self._after_one[token].append(following)
        for pair, following in zip(pairwise(tokens), followed[1:], strict=True):
            self._after_two[pair].append(following)

    def _next(self, before: int, last: int, drawn: int) -> int | None:
        following = self._after_two.get((before, last)) or self._after_one.get(last)
        if following is None:
            return self._first[drawn % len(self._first)]
        drawn, choice = divmod(drawn, len(following))
        if (token := following[choice]) is not None:
            return token
        drawn, ends = divmod(drawn, SENTENCES)
        return self._end if ends == 0 else self._later[drawn % len(self._later)]
