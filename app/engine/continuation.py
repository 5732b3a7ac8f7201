"""What an engine without a model says: a function of the sequence so far, and of nothing else.

So a request that was interrupted continues the same text on any worker, and every test can tell
what the text must be. A `Continuation` gives an answer's tokens one after the other, from a
sequence that ends where it is to go on; giving some of them first and asking again with those
appended must give the same rest. It may end by itself; then the model has ended its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import count

from app.engine.echo import turn_of

Continuation = Callable[[Sequence[int], int | None], Iterator[int]]
"""(sequence, most tokens that are wanted, None for as many as the model likes) → tokens."""

CONTEXT = 8
"""Tokens that `from_table` looks back on; with the length they make each place its own."""


def echo(sequence: Sequence[int], max_tokens: int | None) -> Iterator[int]:
    """The last turn again, as the echo engine says it: once, or over and over up to a limit."""
    body, said = turn_of(sequence)
    if not body:
        return
    for k in count(said):
        if max_tokens is None and k >= len(body):
            return
        yield body[k % len(body)]


def from_next_token(next_token: Callable[[Sequence[int]], int | None]) -> Continuation:
    """Of a function that gives the next token of a sequence, or None where the model ends."""

    def continuation(sequence: Sequence[int], _max_tokens: int | None) -> Iterator[int]:
        so_far = list(sequence)
        while (token := next_token(so_far)) is not None:
            yield token
            so_far.append(token)

    return continuation


def from_table(table: Sequence[int]) -> Continuation:
    """Tokens out of a table, drawn by place and context; it never ends by itself.

    A table of tokens that are whole words makes readable text for any tokenizer. Raises ValueError
    for an empty table.
    """
    if not table:
        raise ValueError("an empty table of tokens")

    def next_token(sequence: Sequence[int]) -> int:
        context = f"{len(sequence)} {list(sequence[-CONTEXT:])}".encode()
        drawn = int.from_bytes(blake2b(context, digest_size=8).digest(), "little")
        return table[drawn % len(table)]

    return from_next_token(next_token)
