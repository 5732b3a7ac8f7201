"""What a simulated deployment is beside its workers: how late things are, and how many routers.

Owns the numbers alone. What follows from them is `replay.py`'s and `knowledge.py`'s.
"""

from __future__ import annotations

from typing import NamedTuple


class Conditions(NamedTuple):
    """The default is a deployment of one router in which nothing takes time but the engines.

    `hop_ms`: from a decision until its worker has the request. `notice_ms`: from what happens on a
    worker (tokens, ends, its cache) until routers read of it. `lag_ms`: from anything on the ledger
    until routers read it, others' decisions among it; each router counts its own at once.
    `shares_ledger`: whether routers read of each other at all. `tells_curves`: whether cards say
    how fast their engines are.
    """

    hop_ms: float = 0.0
    notice_ms: float = 0.0
    routers: int = 1
    lag_ms: float = 0.0
    shares_ledger: bool = True
    tells_curves: bool = True


ORDINARY = Conditions()
