"""How long the steps of an engine take, as curves over what is in a step.

Pure numbers. Who measures is elsewhere; the routers read these from the cards of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LARGEST = 1e6
"""Of the numbers of curves: whatever is added up of them stays finite."""


class Curves(NamedTuple):
    """Times of a step in ms, as quadratics of the load, highest power first.

    The default is the published profile of NVIDIA Dynamo's mock engine.
    """

    prefill: tuple[float, float, float] = (4.209989e-7, 1.518344e-2, 16.50142)
    """Of the number of new prompt tokens; 0 without any."""
    decode: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    """Of the used share of the capacity, from 0 to 1."""
    decode_floor: float = 1.0

    def prefill_ms(self, tokens: float) -> float:
        """Time to compute `tokens` prompt tokens in one step."""
        a, b, c = self.prefill
        return (a * tokens + b) * tokens + c if tokens else 0.0

    def decode_ms(self, usage: float) -> float:
        """Time of a token for each sequence in decode, at this usage of the capacity."""
        a, b, c = self.decode
        u = min(usage, 1.0)
        return max((a * u + b) * u + c, self.decode_floor)

    def numbers(self, speedup: float = 1.0) -> tuple[float, ...]:
        """All numbers in the order of the fields, of an engine so many times faster."""
        return tuple(x / speedup for x in (*self.prefill, *self.decode, self.decode_floor))


def curves_of(numbers: Sequence[float]) -> Curves | None:
    """The inverse of `numbers`; None if they are not those of curves that can be true.

    Prefill never takes less for more tokens, and no step takes less than nothing.
    """
    if len(numbers) != 7 or not all(abs(x) <= LARGEST for x in numbers):  # nor is it NaN
        return None
    a, b, c, *decode, floor = numbers
    if min(a, b, c, floor) < 0:
        return None
    return Curves((a, b, c), (decode[0], decode[1], decode[2]), floor)
