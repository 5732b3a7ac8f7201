"""Text of engines without a model: a function of the token sequence alone.

So an interrupted request continues with the same text on any worker, and a test can compute it. A
`Continuation` yields the tokens that follow a sequence; if it ends, the model has ended its answer.
`TextGenerator` is for the tokens of any model, `echo_continuation` for models of bytes;
`expected_answer` is the part that a client receives, within limits and stop conditions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from importlib.resources import files
from itertools import count, pairwise
from typing import NamedTuple

from kvlane.app.engine.echo import current_turn
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.codecs import TOKEN_BYTES, pack_tokens, unpack_tokens
from kvlane.streams.records import FinishReason
from kvlane.streams.request import Request

Continuation = Callable[[Sequence[int], int | None], Iterator[int]]
"""(sequence, maximum number of tokens or None) → tokens."""

SENTENCES_PER_END = 4
"""An answer ends after one in this many sentences."""


class ExpectedAnswer(NamedTuple):
    """A whole answer, which must be the same after any failure of workers."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None


def expected_answer(
    request: Request,
    continuation: Continuation,
    text: TextStream,
    context_length: int | None = None,
) -> ExpectedAnswer:
    """The answer to a request. `text`: its text stream, new, with its stops and limits.
    `context_length`: of the engine, for requests without a limit."""
    sequence = unpack_tokens(request.token_ids)
    room = None if context_length is None else max(context_length - len(sequence), 0)
    visible: list[int] = []
    parts: list[str] = []
    for token in continuation(sequence, request.stop.max_tokens):
        if len(visible) == room:
            return ExpectedAnswer(tuple(visible), "".join(parts) + text.end().text, "length")
        piece = text.feed([token])
        visible.append(token)
        parts.append(piece.text)
        if piece.finish_reason is not None:
            return ExpectedAnswer(
                tuple(visible), "".join(parts), piece.finish_reason, piece.stop_reason
            )
    return ExpectedAnswer(tuple(visible), "".join(parts) + text.end().text, "stop")


def echo_continuation(sequence: Sequence[int], max_tokens: int | None) -> Iterator[int]:
    """The last turn, as the echo engine repeats it: once, or over and over up to a limit."""
    body, visible = current_turn(sequence)
    if not body:
        return
    for k in count(visible):
        if max_tokens is None and k >= len(body):
            return
        yield body[k % len(body)]


def demo_sentences() -> list[str]:
    text = files("kvlane.app").joinpath("data/sentences.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


class TextGenerator:
    """Generates text from sample sentences: a token is one that follows the last two in them.

    A digest of the whole sequence draws it, so a single wrong token of a prompt changes the answer.
    After a sentence the answer may end, with `end_token`.
    """

    def __init__(
        self,
        sentences: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        end_token: int | None,
    ) -> None:
        """`encode`: text to tokens, without special ones. Raises ValueError for no sentences."""
        if not sentences:
            raise ValueError("there are no sample sentences")
        self._end = end_token
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
        """As `Continuation`; ends by itself only without an end-of-sequence token."""
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
        drawn, ends = divmod(drawn, SENTENCES_PER_END)
        return self._end if ends == 0 else self._later[drawn % len(self._later)]
