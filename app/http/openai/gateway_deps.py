"""Dependencies of the endpoints of one gateway."""

from __future__ import annotations

from typing import NamedTuple

from app.batches.batch_log import BatchLog
from app.batches.file_store import FileStore
from app.http.authentication import AccessControl
from app.http.openai.active_streams import ActiveStreams
from app.http.openai.served_models import ModelCatalog, ServedModels
from app.http.probes import Probes
from app.metrics.gateway_metrics import GatewayMetrics
from app.runtime.process import ProcessContext
from app.settings import Settings
from streams.ids import RequestIds

DEADLINE_MARGIN_S = 30.0
"""Time after its deadline within which a router must end a request."""


class GatewayDeps(NamedTuple):
    """Made by `app/gateway.py`."""

    settings: Settings
    ctx: ProcessContext
    streams: ActiveStreams
    served_models: ServedModels
    catalog: ModelCatalog
    probes: Probes
    metrics: GatewayMetrics
    access: AccessControl
    batches: BatchLog
    files: FileStore
    entity_ids: RequestIds
    """Ids of files and batch jobs."""
