"""Comparison of answers with those of a rehearsal, pair by pair, and its summary. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from kvlane.app.rehearsal.recorded_answers import WHOLE_ENDS, RecordedAnswer

Verdict = Literal["equal", "differs", "sampled", "failed"]
"""sampled: its tokens are drawn without a seed, so they say nothing of a single pair."""
PERCENTS = (50, 90, 99)
FIGURES = ("output_tokens", "ttft_ms", "itl_ms", "cached_share")


class AnswerFigures(msgspec.Struct, frozen=True, gc=False):
    """Numbers of one answer; None: unknown. `cached_share`: of its prompt, from 0 to 1."""

    code: str
    output_tokens: int
    ttft_ms: float | None
    itl_ms: float | None
    cached_share: float | None


class AnswerPair(msgspec.Struct, frozen=True, gc=False):
    """The comparison of one request. `first_difference`: the number of equal tokens (`unit`
    "token") or characters before it; None without one."""

    id: str
    rehearsal_id: str
    verdict: Verdict
    unit: Literal["token", "character"]
    first_difference: int | None
    original: AnswerFigures
    rehearsal: AnswerFigures


def compare_answers(
    original_answer: RecordedAnswer,
    answer: RecordedAnswer,
    *,
    is_exact: bool,
    has_same_tokens: bool,
) -> AnswerPair:
    """Compare two answers by their tokens, or by their texts for different tokenizers and engines
    without tokens. `is_exact`: see `Verdict`."""
    by_tokens = has_same_tokens and bool(original_answer.tokens or answer.tokens)
    left: Sequence[Any] = original_answer.tokens if by_tokens else original_answer.text
    right: Sequence[Any] = answer.tokens if by_tokens else answer.text
    at = first_difference(left, right)
    verdict: Verdict = "equal" if at is None else "differs"
    if answer.code not in WHOLE_ENDS:
        verdict, at = "failed", None
    elif not is_exact:
        verdict, at = "sampled", None
    return AnswerPair(
        original_answer.id, answer.id, verdict, "token" if by_tokens else "character", at,
        _figures_of(original_answer), _figures_of(answer),
    )  # fmt: skip


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first index at which two sequences differ; None if they are equal."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _figures_of(answer: RecordedAnswer) -> AnswerFigures:
    prompt = answer.prompt_tokens
    return AnswerFigures(
        answer.code, answer.output_tokens, answer.ttft_ms, answer.itl_ms,
        min(answer.cached_tokens / prompt, 1.0) if prompt else None,
    )  # fmt: skip


def summarize_pairs(pairs: Sequence[AnswerPair]) -> dict[str, Any]:
    """Counts by verdict, finish reasons and percentiles of both sides, and the pairs that differ,
    earliest difference first. Figures are of pairs with two whole answers and both values."""
    whole = [pair for pair in pairs if pair.verdict != "failed"]
    counts = Counter(pair.verdict for pair in pairs)
    sides = ("original", "rehearsal")
    figures: dict[str, Any] = {}
    for name in FIGURES:
        both = [(getattr(pair.original, name), getattr(pair.rehearsal, name)) for pair in whole]
        known = [(left, right) for left, right in both if left is not None and right is not None]
        columns = zip(*known, strict=True) if known else ((), ())
        figures[name] = {"pairs": len(known)} | dict(
            zip(sides, map(_percentiles, columns), strict=True)
        )
    differing = [pair for pair in pairs if pair.verdict == "differs"]
    return {
        "pairs": len(pairs),
        "verdicts": {name: counts[name] for name in ("equal", "differs", "sampled", "failed")},
        "finish_reasons": {
            side: dict(Counter(getattr(pair, side).code for pair in pairs)) for side in sides
        },
        "changed_finish_reasons": sum(p.original.code != p.rehearsal.code for p in whole),
        "figures": figures,
        "differences": sorted(differing, key=lambda pair: (pair.first_difference or 0, pair.id)),
        "failures": [pair for pair in pairs if pair.verdict == "failed"],
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(values, PERCENTS, method="inverted_cdf").tolist()
    return {"mean": float(np.mean(values))} | {
        f"p{percent}": value for percent, value in zip(PERCENTS, found, strict=True)
    }
