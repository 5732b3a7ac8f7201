"""Records of `registry`, compacted and keyed by entity: cards, snapshots, the deployment,
orders of operators."""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvlane.streams.record_base import InternalRecord, ModelKind
from kvlane.streams.request import SamplingOptions

Role = Literal["aggregated", "prefill", "decode"]
GUIDED_DECODING_FEATURE = "guided_decoding"
LOGPROBS_FEATURE = "logprobs"
"""Features that an engine may not support: names in `EngineConfig.unsupported`."""


class EngineConfig(InternalRecord, frozen=True):
    """The properties that an engine advertises; None: not advertised.

    `curve`: the time of its steps (`numbers` in app/perf_curves.py). `lora_names`: its adapters;
    `max_loras` above 0: others are loaded on demand. `data_parallel_size`: its ranks. Without
    `gives_tokens` no other run can continue its answers; with `guesses_cache` its cache events are
    a guess. `unsupported`: features for which requests are refused (`guided_decoding`, `logprobs`).
    `transfer_lease_s`: how long it holds blocks for another engine; None: no hand-overs.
    `transfer_bytes_per_token`: their size. `continues_guided`: it continues answers with guided
    decoding.
    """

    model: str
    served_model_name: str | None = None
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    curve: tuple[float, ...] | None = None
    lora_names: tuple[str, ...] | None = None
    max_loras: int | None = None
    data_parallel_size: int | None = None
    gives_tokens: bool = True
    guesses_cache: bool = False
    kind: ModelKind = "tokens"
    unsupported: tuple[str, ...] = ()
    transfer_lease_s: float | None = None
    transfer_bytes_per_token: int | None = None
    continues_guided: bool = False


class WorkerCard(InternalRecord, frozen=True):
    """The registration of a worker. Key `worker/<id>`.

    The first card of a life has no epoch: its offset *is* the epoch, unique and rising. Later cards
    of that life repeat it. `life`: random, by process. `busy_cache` (share of its cache, 0 to 1),
    `busy_prefill_tokens` (on a rank): above them it gets no new work; None: no bound. `versions`:
    for people. `max_runs`: bound of open runs. `parser_version`: of tool calls and reasoning; 0:
    none.
    """

    id: str
    slot: int
    model: str
    config: EngineConfig
    epoch: int | None = None
    role: Role = "aggregated"
    ranks: int = 1
    taints: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    life: str = ""
    busy_cache: float | None = None
    busy_prefill_tokens: int | None = None
    max_runs: int | None = None
    parser_version: int = 0


class Artifact(InternalRecord, frozen=True):
    """A file on `artifacts`: its SHA-256 in hex, and its size in bytes."""

    sha256: str
    size: int


class ModelCard(InternalRecord, frozen=True):
    """A model that clients may ask for. Key `model/<name>`.

    `special_tokens`: names for templates (bos_token, eos_token …). `checksum`: over everything but
    name and checksum. `served_as`: its name at servers that get bodies unchanged. `tool_parser`,
    `reasoning_parser`: as in the settings; "" for auto.
    """

    name: str
    kind: ModelKind = "tokens"
    context_length: int | None = None
    block_size: int | None = None
    tokenizer: Artifact | None = None
    template: Artifact | None = None
    special_tokens: dict[str, str] = {}
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingOptions = SamplingOptions()
    checksum: str = ""
    served_as: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""


class SnapshotPointer(InternalRecord, frozen=True):
    """The position of a complete snapshot. Key `snapshot/<view>/<partition>`."""

    view: str = msgspec.field(name="fold")  # the name on the wire
    partition: int
    position: int
    first_part: int
    parts: int
    checksum: str
    state_hash: str
    format: int = 1


class Deployment(InternalRecord, frozen=True):
    """Parameters that all processes of a deployment must share. Key `deployment`."""

    lanes: int
    partitions: dict[str, int]
    format: int = 1


class Skip(InternalRecord, frozen=True):
    """A record that readers skip, if it is marked for newer ones. Key
    `skip/<topic>/<partition>/<offset>`."""

    topic: str
    partition: int
    offset: int


class Cordon(InternalRecord, frozen=True):
    """An operator's order: a worker gets no new runs, in any of its epochs, until a tombstone of
    this record. Key `cordon/<worker>`. `evacuates`: other workers continue its answers."""

    worker: str
    evacuates: bool = False


class AliasTarget(InternalRecord, frozen=True):
    """A model that serves under an alias. `weight`: its share, in relation to the other targets; 0:
    it serves only while none with a weight can."""

    model: str
    weight: int = 0


class ModelAlias(InternalRecord, frozen=True):
    """A name of one or more models, by an operator's order. Key `alias/<name>`. It takes precedence
    over a model of the same name, which may be a target."""

    name: str
    targets: tuple[AliasTarget, ...] = ()


ROUTING_FORMAT = 1
"""The highest format of a `RoutingOrder` that this version reads."""


class RoutingOrder(InternalRecord, frozen=True):
    """An operator's order: settings by which all routers route, instead of their own, until a
    tombstone of this record. Key `routing`. `settings`: JSON values by name
    (`ORDERED_SETTINGS` in app/configuration/router_settings.py). A router of a lower `format`
    keeps its own settings."""

    settings: dict[str, Any]
    format: int = 1


class Tombstone(InternalRecord, frozen=True):
    """The removal of an entity. On the wire: a null value, and an epoch header."""

    key: str
    epoch: int | None = None
