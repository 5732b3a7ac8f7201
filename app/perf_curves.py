"""Performance curves of an engine: the duration of a step by its load, and profiles of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

MAX_COEFFICIENT = 1e6
"""Largest coefficient of a curve; sums of them stay finite."""


class PerfCurves(NamedTuple):
    """Times of a step in ms, as quadratics of the load, highest power first. The default is the
    published profile of NVIDIA Dynamo's mock engine."""

    prefill: tuple[float, float, float] = (4.209989e-7, 1.518344e-2, 16.50142)
    """Coefficients over the number of new prompt tokens."""
    decode: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    """Coefficients over the used share of the capacity, from 0 to 1."""
    min_decode_ms: float = 1.0

    def prefill_ms(self, tokens: float) -> float:
        """Time to compute `tokens` prompt tokens in one step; 0 for none."""
        a, b, c = self.prefill
        return (a * tokens + b) * tokens + c if tokens else 0.0

    def decode_ms(self, usage: float) -> float:
        """Time of one decode step, at this usage of the capacity."""
        a, b, c = self.decode
        u = min(usage, 1.0)
        return max((a * u + b) * u + c, self.min_decode_ms)

    def coefficients(self, speedup: float = 1.0) -> tuple[float, ...]:
        """All coefficients in the order of the fields, for an engine `speedup` times as fast."""
        return tuple(x / speedup for x in (*self.prefill, *self.decode, self.min_decode_ms))


ProfileName = Literal["published", "h100"]
PROFILES: Final[Mapping[ProfileName, PerfCurves]] = {
    "published": PerfCurves(),
    "h100": PerfCurves((0.0, 0.0245, 55.0), (0.0, 0.0, 6.8)),
}
"""Profiles of simulated engines. `published`: see `PerfCurves`.

`h100`: vLLM 0.32 with a model of a thousand million parameters in bf16, four servers that shared an
H100, 400 requests of a production trace (6090 prompt tokens in the mean, 8.8 requests a second).
The constants come from the times to a first token without cached tokens, and from the times between
tokens without steps with prompts. The step of decode was measured at one load, so it is constant.
"""


def curves_from(numbers: Sequence[float]) -> PerfCurves | None:
    """The inverse of `coefficients`; None for impossible curves: negative times, or falling
    prefill."""
    if len(numbers) != 7 or not all(abs(x) <= MAX_COEFFICIENT for x in numbers):  # nor is it NaN
        return None
    a, b, c, *decode, floor = numbers
    if min(a, b, c, floor) < 0:
        return None
    return PerfCurves((a, b, c), (decode[0], decode[1], decode[2]), floor)
