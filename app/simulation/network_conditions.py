"""Network conditions of a simulated deployment: delays between processes, and number of routers.

Owns the numbers only; `app/simulation/simulator.py` applies them.
"""

from __future__ import annotations

from typing import NamedTuple

from kvlane.app.routing.selection.routing_config import TransferSpeed
from kvlane.app.routing.selection.select import DEFAULT_BYTES_PER_TOKEN


class NetworkConditions(NamedTuple):
    """Delays and routers. Default: one router, and only engines take time.

    `dispatch_delay_ms`: from a decision until its worker has the request. `event_delay_ms`: from an
    event on a worker (tokens, ends, cache changes) until routers read it. `ledger_lag_ms`: from a
    ledger record until routers read it; each counts its own decisions at once. `shares_ledger`:
    whether routers read each other's decisions. `staggers_routers`: whether they take turns at each
    worker, by the lag. `publishes_curves`: whether worker cards contain performance curves.
    `transfer`: of KV caches between workers; None: it takes no time.
    """

    dispatch_delay_ms: float = 0.0
    event_delay_ms: float = 0.0
    routers: int = 1
    ledger_lag_ms: float = 0.0
    shares_ledger: bool = True
    publishes_curves: bool = True
    transfer: TransferSpeed | None = None
    staggers_routers: bool = True

    def transfer_ms(self, tokens: int) -> float:
        if self.transfer is None:
            return 0.0
        size = 1000 * tokens * DEFAULT_BYTES_PER_TOKEN
        return self.transfer.latency_ms + size / self.transfer.bytes_per_s


DEFAULT_CONDITIONS = NetworkConditions()
