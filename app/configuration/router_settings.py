"""Settings of a router and of an indexer: queue, routing policy, snapshots of the index."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlane.app.configuration.setting_values import unique_name
from kvlane.app.routing.policy_names import MAX_WEIGHT, Objective, PolicyName, QueueOrder
from kvlane.app.routing.queueing.fair_share import UNBOUNDED, ClassConfig

ORDERED_SETTINGS = (
    "policy", "objective", "max_queue_wait_s", "session_affinity_tolerance", "overlap_score_credit",
    "prefill_load_scale", "host_cache_weight", "disk_cache_weight", "active_request_weight",
    "overlap_decay", "router_temperature", "track_output_blocks", "queue_order", "queue_classes",
    "max_queued_requests", "max_queued_tokens", "handover_min_tokens", "handover_min_share",
    "transfer_bandwidth", "transfer_latency_ms",
)  # fmt: skip
"""Settings that a `RoutingOrder` may replace while routers run; all others need a restart."""


class RouterSettings(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    router_id: str = Field(
        default_factory=unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this router, unique in the deployment",
    )
    max_queued_requests: int = Field(
        4096, ge=0, le=UNBOUNDED, description="requests that a router queues before it rejects more"
    )
    max_queued_tokens: int = Field(
        100_000_000,
        ge=0,
        le=UNBOUNDED,
        description="uncached prompt tokens of interactive requests that a router queues; beyond "
        "it one over HTTP ends with queue_full, and from half of it prompts from Kafka stay in the "
        "log",
    )
    max_queued_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=0,
        le=UNBOUNDED,
        description="prompt bytes that a router queues before it rejects more: an image counts as "
        "few tokens and takes megabytes",
    )
    handover_timeout_s: float = Field(
        10.0,
        gt=0,
        description="longest time from the end of a prefill to the begin of its decode, in "
        "seconds, or with a bootstrap endpoint from the predicted end of the prefill to the first "
        "token; past it the next attempt begins",
    )
    handover_min_tokens: int = Field(
        2048,
        ge=0,
        le=UNBOUNDED,
        description="a prompt with fewer uncached tokens, which are also less than "
        "KVLANE_HANDOVER_MIN_SHARE of it, is computed by its decode worker",
    )
    handover_min_share: float = Field(
        0.7, ge=0, le=1, description="share of a prompt, see KVLANE_HANDOVER_MIN_TOKENS"
    )
    transfer_bandwidth: float = Field(
        12.5e9,
        gt=0,
        description="policy predictive: expected bandwidth of transfers of KV caches between "
        "workers until it is measured, in bytes per second",
    )
    transfer_latency_ms: float = Field(
        1.0,
        ge=0,
        description="policy predictive: expected latency of these transfers, in milliseconds",
    )
    enforce_disaggregation: bool = Field(
        False,
        description="serve no request without a prefill worker; a model without one is not listed",
    )
    transfer_domain: str = Field(
        "",
        description="topology domain within which KV caches are transferred, such as zone, by the "
        "taints topology/zone=... of the workers; prefill workers without a decode worker in their "
        "domain, or without the taint, get no prompts; empty: between all workers",
    )
    transfer_domain_required: bool = Field(
        False,
        description="end requests that cannot be decoded in the domain of their prefill worker; "
        "otherwise that domain is preferred",
    )
    preferred_transfer_domain: str = Field(
        "",
        description="a second topology domain, such as rack, that is preferred for a transfer "
        "besides the one of KVLANE_TRANSFER_DOMAIN; empty: none",
    )
    no_worker_timeout_s: float = Field(
        120,
        ge=0,
        description="time that requests wait while their model has no worker, counted from the "
        "first that found none, in seconds; then they end with no_workers until there is a worker",
    )
    queue_order: QueueOrder = Field(
        "sjf",
        description="policy predictive: order of queued requests within one strict priority and "
        "queue class: sjf takes the shortest prefill first, fcfs the earliest arrival, wspt the "
        "shortest prefill divided by 1 + priority_jump (nvext.agent_hints); edf, of all classes, "
        "the earliest deadline by the targets of the time to a first token (nvext.router, or "
        "ttft_target_ms in KVLANE_QUEUE_CLASSES)",
    )
    queue_classes: dict[str, ClassConfig] = Field(
        {},
        description="share of the workers for each class of queued requests, as a JSON object by "
        'class name (header x-queue-class, or the tenant\'s): {"reports": {"weight": 0.2, '
        '"max_queued_requests": 1000, "max_queued_tokens": 1000000}}; weights are '
        "relative to the 1 of all other classes, limits are per router; ttft_target_ms is for "
        "KVLANE_QUEUE_ORDER=edf",
    )
    policy: PolicyName = Field(
        "predictive",
        description="routing policy: how a worker is selected among the eligible ones "
        "(docs/routing.md)",
    )
    overlap_score_credit: float = Field(
        1.0,
        ge=0,
        le=MAX_WEIGHT,
        description="policy dynamo: weight of a cached prompt block, in blocks",
    )
    prefill_load_scale: float = Field(
        1.0,
        ge=0,
        le=MAX_WEIGHT,
        description="policy dynamo: weight of a prefill block, in decode blocks",
    )
    host_cache_weight: float = Field(
        0.75, ge=0, le=1, description="policy dynamo: weight of a prompt block cached on the host"
    )
    disk_cache_weight: float = Field(
        0.25, ge=0, le=1, description="policy dynamo: weight of a prompt block cached on disk"
    )
    active_request_weight: float = Field(
        0.0,
        ge=0,
        le=MAX_WEIGHT,
        description="policy dynamo: cost of each request of a worker, in decode blocks",
    )
    overlap_decay: float = Field(
        0.0,
        ge=0,
        description="policy dynamo: how much less a cached block counts at a worker with more "
        "prefill than the least loaded one: 1 halves it for one prompt more; 0: never",
    )
    router_temperature: float = Field(
        0.0,
        ge=0,
        le=MAX_WEIGHT,
        description="policy dynamo: softmax temperature of the selection; 0 takes the lowest cost",
    )
    objective: Objective = Field(
        "balanced",
        description="policy predictive: what counts: the time to the first token (first-token), "
        "the time to the last one (throughput), or relative losses of both alike (balanced)",
    )
    max_queue_wait_s: float = Field(
        10,
        ge=0,
        description="policy predictive: longest time a request is queued for a busy worker "
        "before it is assigned to it anyway, in seconds; 0: never. The wait for full or missing "
        "workers is not limited by it",
    )
    session_affinity_tolerance: float = Field(
        1.0,
        ge=0,
        description="extra cost accepted to keep a session on its worker, as a multiple of the "
        "cost of computing the request's whole prompt anew; policies other than predictive, "
        "dynamo and least_loaded keep it always, unless 0",
    )
    track_output_blocks: bool = Field(
        True,
        description="whether generated tokens count as load, weighted down towards the expected "
        "output length",
    )
    indexer_port: int = Field(
        8090, ge=0, le=65535, description="port of an indexer; 0: any free port"
    )
    snapshot_interval_s: float = Field(
        300,
        gt=0,
        description="age of the newest snapshot of a partition after which an indexer writes "
        "another, in seconds; sooner after 20 000 records",
    )

    @field_validator("queue_classes")
    @classmethod
    def _are_shares(cls, value: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
        for name, share in value.items():
            if share.weight <= 0:
                raise ValueError(f"{name!r}: give a weight above 0")
            bounds = share.max_queued_requests, share.max_queued_tokens
            if not all(0 <= bound <= UNBOUNDED for bound in bounds):
                raise ValueError(f"{name!r}: give bounds from 0 to {UNBOUNDED}")
            if share.ttft_target_ms is not None and not share.ttft_target_ms > 0:
                raise ValueError(f"{name!r}: give a ttft_target_ms above 0")
        return value
