"""Logs drawn at random: several attempts, twin runs, repeats, zombies and losses in one stream.

All runs compute the same answer and continue where the text before their attempt's Fence ends, as
workers and routers do. What a reader shows of them is computed by
`streams/responses/transcript.py`; the tests hold it against a second reading of the rule.
"""

from __future__ import annotations

import random

from streams.records import Chunk
from streams.responses.transcript import Transcript, transcript_before
from streams.vectors.cases import REQUEST, Case, Line, end, fence

MAX_LINES = 30
ATTEMPTS = 3
LETTERS = "abcdefgh é😀"


def stray(seed: int) -> Case:
    """The case of a seed: the same log and the same answer on every machine."""
    log = _log(random.Random(seed))
    seen = Transcript()
    for line in log:
        seen.apply(line)
    return Case(
        f"strays {seed}",
        "drawn at random: twin runs, repeats, zombies, losses",
        log,
        text=seen.text,
        tokens=tuple(seen.tokens),
        finish_reason=seen.finish_reason,
        end=seen.end.code if seen.end else None,
        attempt=seen.attempt,
        holes=seen.gaps,
    )


def _log(rng: random.Random) -> tuple[Line, ...]:
    answer = "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 12)))
    log: list[Line] = []
    runs = [_run(rng, answer, 0, 0)]
    attempt = 0
    while runs and len(log) < MAX_LINES:
        draw = rng.random()
        if draw < 0.12 and attempt < ATTEMPTS:
            attempt += 1
            log.append(fence(attempt))
            runs.append(_run(rng, answer, attempt, transcript_before(log, attempt).shown_tokens))
        elif draw < 0.18:
            runs.append(
                _run(
                    rng,
                    answer,
                    attempt,
                    transcript_before(log, attempt).shown_tokens if attempt else 0,
                )
            )
        elif draw < 0.21:
            rng.choice(runs).pop(0)
        elif draw < 0.22:
            log.append(end("cancelled"))
        else:
            log += [rng.choice(runs).pop(0)] * (2 if rng.random() < 0.1 else 1)
        runs = [run for run in runs if run]
    return tuple(log)


def _run(rng: random.Random, answer: str, attempt: int, base: int) -> list[Chunk]:
    """The Chunks of a run from token `base` on; a token is a character, the last one finishes."""
    run, chunks, at = str(rng.getrandbits(64)), list[Chunk](), base
    while at < len(answer) or not chunks:
        part = answer[at : at + rng.randint(1, 3)]
        whole = at + len(part)
        chunks.append(
            Chunk(
                id=REQUEST,
                attempt=attempt,
                run=run,
                seq=len(chunks),
                index=at,
                token_ids=tuple(ord(c) for c in part),
                text=part,
                chars=whole,
                finish_reason="stop" if whole == len(answer) else None,
            )
        )
        at = whole
    return chunks
