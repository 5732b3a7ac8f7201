"""Settings of a worker: identity, heartbeats, limits of its load, and checks of its engine."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, Field

from kvlane.app.configuration.setting_values import listed, unique_name
from kvlane.streams.records import Role


class WorkerSettings(BaseModel):
    """Identity, load and health of a worker."""

    worker_id: str = Field(
        default_factory=unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this worker, unique in the deployment; keep it over restarts, so that "
        "the new process replaces the one before at once",
    )
    worker_role: Role = Field(
        "aggregated",
        description="role of this worker: aggregated (prefill and decode); with workers of role "
        "prefill, these compute prompts and hand them to workers of role decode; both need the "
        "engine vllm with a kv_transfer_config in KVLANE_ENGINE_ARGS, attached with "
        "KVLANE_ATTACH_TRANSFER_LEASE_S, or simulated",
    )
    taints: str = Field(
        "",
        description="labels of this worker that requests can require by name, separated by commas, "
        "such as gpu=h200,topology/zone=a",
    )
    worker_timeout_s: float = Field(
        5,
        gt=0,
        description="time without a heartbeat after which routers send a worker no new work and "
        "may declare it lost, in seconds",
    )
    heartbeat_interval_s: float = Field(
        1, gt=0, description="time between two heartbeats of a worker, in seconds"
    )
    max_num_seqs: int = Field(256, ge=1, description="requests that a worker runs concurrently")
    worker_max_waiting: int = Field(
        16, ge=0, description="requests that a worker queues before it returns more to the router"
    )
    max_cache_usage: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of its KV cache in use, 0 to 1, above which a worker gets no new "
        "requests; empty: no limit",
    )
    max_pending_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens assigned to a rank of this worker, neither cached nor computed, "
        "above which it gets no new requests; empty: no limit",
    )
    drain_grace_s: float = Field(
        30,
        ge=0,
        description="time that a stopping worker or gateway gives its running requests, in seconds",
    )
    health_probe_idle_s: float = Field(
        10,
        gt=0,
        description="time without a request after which a worker probes its engine, in seconds",
    )
    health_probe_timeout_s: float = Field(
        3, gt=0, description="time the engine has to answer a probe, in seconds"
    )
    engine_stall_timeout_s: float = Field(
        30,
        gt=0,
        description="time without an engine step or output, while runs wait for one, after which "
        "they move to other workers, in seconds; with an attached server that reports no steps the "
        "longer of this and KVLANE_ATTACH_READ_TIMEOUT_S",
    )
    engine_dead_timeout_s: float = Field(
        60,
        gt=0,
        description="time without an answer to any probe after which the worker exits, to be "
        "restarted by its supervisor, in seconds",
    )

    @property
    def taint_names(self) -> tuple[str, ...]:
        """The taints of a worker, one by one."""
        return listed(self.taints)


def worker_conflicts(settings: WorkerSettings) -> Iterator[str]:
    """The times of heartbeats that do not fit together."""
    if 2 * settings.heartbeat_interval_s > settings.worker_timeout_s:
        yield (
            f"KVLANE_WORKER_TIMEOUT_S={settings.worker_timeout_s:g} is less than two heartbeats: "
            f"raise it to {2 * settings.heartbeat_interval_s:g}, or lower "
            "KVLANE_HEARTBEAT_INTERVAL_S"
        )
