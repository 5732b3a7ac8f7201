"""What the endpoints of one gateway work with."""

from __future__ import annotations

from typing import NamedTuple

from app.http.health import Health
from app.http.library import Library
from app.http.metrics import Metrics
from app.http.served import Served
from app.http.streams import Streams
from app.lifetime import Lifetime
from app.settings import Settings

MARGIN_S = 30.0
"""Past its deadline, a request gets this long to be ended by its router."""


class Parts(NamedTuple):
    """Made by `app/gateway.py`."""

    settings: Settings
    life: Lifetime
    streams: Streams
    served: Served
    library: Library
    health: Health
    metrics: Metrics
