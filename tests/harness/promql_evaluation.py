"""Values of PromQL over recorded series: the part of the language that the alert rules use."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
Series = Mapping[tuple[str, Labels], Sequence[tuple[float, float]]]
"""By name and labels, the samples: times in seconds and values, in order."""
STALE_S = 300.0
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "count": len}


def evaluate(expression: promql.Expr, series: Series, at_s: float) -> dict[Labels, float]:
    """The samples of an expression at a time, by labels. Raises NotImplementedError."""
    match expression:
        case promql.ParenExpr():
            return evaluate(expression.expr, series, at_s)
        case promql.VectorSelector():
            return {
                labels: samples[-1][1]
                for labels, samples in _window(expression, series, at_s, STALE_S).items()
            }
        case promql.Call():
            return _call(expression, series, at_s)
        case promql.AggregateExpr():
            kept = set(expression.modifier.labels) if expression.modifier else set()
            groups: dict[Labels, list[float]] = {}
            for labels, value in evaluate(expression.expr, series, at_s).items():
                group = frozenset((name, text) for name, text in labels if name in kept)
                groups.setdefault(group, []).append(value)
            combine = _AGGREGATES[str(expression.op)]
            return {labels: combine(values) for labels, values in groups.items()}
        case promql.BinaryExpr() if isinstance(expression.rhs, promql.NumberLiteral):
            holds, limit = _COMPARISONS[str(expression.op)], expression.rhs.val
            left = evaluate(expression.lhs, series, at_s)
            return {labels: value for labels, value in left.items() if holds(value, limit)}
        case promql.BinaryExpr():
            left = evaluate(expression.lhs, series, at_s)
            right = evaluate(expression.rhs, series, at_s)
            return _combined(expression, left, right)
    raise NotImplementedError(f"no rule of this project uses {expression}")


def _call(call: promql.Call, series: Series, at_s: float) -> dict[Labels, float]:
    if call.func.name == "label_replace":
        inner, name, value, source, pattern = call.args
        assert source.val == pattern.val == "", "constant labels only"
        added = {(name.val, value.val)}
        found = evaluate(inner, series, at_s)
        return {labels | added: sample for labels, sample in found.items()}
    (matrix,) = call.args
    range_s = matrix.range.total_seconds()
    windows = _window(matrix.vector_selector, series, at_s, range_s)
    match call.func.name:
        case "last_over_time":
            return {labels: samples[-1][1] for labels, samples in windows.items()}
        case "rate" | "increase" as name:
            per_s = range_s if name == "rate" else 1.0
            return {labels: _increase(samples) / per_s for labels, samples in windows.items()}
    raise NotImplementedError(f"no rule of this project uses {call}")


def _combined(
    expression: promql.BinaryExpr, left: dict[Labels, float], right: dict[Labels, float]
) -> dict[Labels, float]:
    """Two vectors, matched by all labels or by those of `on`."""
    matching = expression.modifier.matching if expression.modifier else None
    wanted = set(matching.labels) if matching else None

    def key(labels: Labels) -> Labels:
        return labels if wanted is None else frozenset(x for x in labels if x[0] in wanted)

    others = {key(labels): value for labels, value in right.items()}
    match str(expression.op):
        case "and":
            return {labels: value for labels, value in left.items() if key(labels) in others}
        case "unless":
            return {labels: value for labels, value in left.items() if key(labels) not in others}
        case "or":
            return right | left
        case "/":  # without NaN, for which no comparison holds
            return {
                labels: value / others[key(labels)]
                for labels, value in left.items()
                if others.get(key(labels))
            }
    raise NotImplementedError(f"no rule of this project uses {expression}")


def _window(
    selector: promql.VectorSelector, series: Series, at_s: float, range_s: float
) -> dict[Labels, list[tuple[float, float]]]:
    """The samples of matching series within a range before a time."""
    found = {}
    for (name, labels), samples in series.items():
        within = [(t, value) for t, value in samples if at_s - range_s <= t <= at_s]
        if name == selector.name and within and _matches(selector, dict(labels)):
            found[labels] = within
    return found


def _matches(selector: promql.VectorSelector, labels: Mapping[str, str]) -> bool:
    for matcher in selector.matchers.matchers:
        text = labels.get(matcher.name, "")
        if matcher.op == promql.MatchOp.Equal:
            holds = text == matcher.value
        elif matcher.op == promql.MatchOp.Re:
            holds = re.fullmatch(matcher.value, text) is not None
        else:
            raise NotImplementedError(f"no rule of this project uses {matcher}")
        if not holds:
            return False
    return True


def _increase(samples: Sequence[tuple[float, float]]) -> float:
    """The increase of a counter, which begins at 0 when its process restarts."""
    pairs = pairwise(samples)
    return sum(later - before if later >= before else later for (_, before), (_, later) in pairs)
