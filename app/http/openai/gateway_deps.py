"""Dependencies of the endpoints of one gateway."""

from __future__ import annotations

from typing import NamedTuple

from kvlane.app.batches.batch_log import BatchLog
from kvlane.app.batches.file_store import FileStore
from kvlane.app.http.openai.active_streams import ActiveStreams
from kvlane.app.http.openai.served_models import ModelCatalog, ServedModels
from kvlane.app.http.server.authentication import AccessControl
from kvlane.app.http.server.probes import Probes
from kvlane.app.metrics.gateway_metrics import GatewayMetrics
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.ids import RequestIds
from kvlane.streams.ports import Log

DEADLINE_MARGIN_S = 30.0
"""Time after its deadline within which a router must end a request."""


class GatewayDeps(NamedTuple):
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
    log: Log
