"""The settings of every process: one table, read from `KVLANE_*` environment variables.

Owns names, defaults, units and the checks between them. Reads the environment when `Settings()` is
called and never again; a process passes the value on and nothing below reads the environment.
An empty variable counts as not set. Secrets come from the environment or from files and are masked
wherever settings are shown.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.operator_error import OperatorError
from app.routing.queueing.fair_share import ClassConfig
from streams.ids import TenantTag
from streams.kafka.connection_options import ConnectionOptions, SaslMechanism, SecurityProtocol
from streams.prompt import MAX_DEADLINE_S
from streams.record_base import ModelKind
from streams.records import Role
from streams.topics import (
    ASSIGNMENTS,
    BATCH,
    DEFAULT_LANES,
    KV_EVENTS,
    PROMPTS,
    RESPONSES,
    RESULTS,
    TOPICS_BY_NAME,
)

if TYPE_CHECKING:
    from indexer.block_keys import KeySecret

PREFIX = "KVLANE_"
_SECRETS = ("sasl_password", "ssl_keypassword", "hash_secret", "stream_secret", "attach_api_key")
"""Each has a twin NAME_file."""
_LONGEST_LIFETIME_S = (TOPICS_BY_NAME[RESPONSES].retention_ms or 0) / 2000
"""Below half the retention of the answers, what a reader was shown of a request is still there when
the request changes hands at its end."""


class SettingsError(OperatorError, ValueError):
    """Settings that cannot work. Each line names a variable, what is wrong, and what would do."""


def variable_name(field: str) -> str:
    """The environment variable of a field."""
    return f"{PREFIX}{field.upper()}"


def _unique_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("no such file: give the path of a file this process can read")
    if not os.access(path, os.R_OK):
        raise ValueError("the file is not readable for this process: check owner and mode")
    return path


ReadableFile = Annotated[Path, AfterValidator(_readable)]


class TopicOptions(TypedDict):
    """Arguments that create the topics of a deployment, or compare them with the broker's."""

    lanes: int
    replication: int
    min_insync: int
    partitions: dict[str, int]
    retention_ms: dict[str, int]


class Settings(BaseSettings):
    """Immutable settings. Raises SettingsError when a value, or two together, cannot work."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    # Where Kafka is
    bootstrap_servers: str = Field(
        "", description="Kafka brokers, host:port[,host:port]; empty: none"
    )
    broker: Literal["auto", "env", "docker", "jvm", "memory"] = Field(
        "auto",
        description="source of the broker for demos and tests: env uses KVLANE_BOOTSTRAP_SERVERS, "
        "docker and jvm start one, memory is the in-process broker, auto takes the first "
        "that works",
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "kvlane",
        description="directory for downloaded files: broker archives, tokenizers",
    )
    kernel_cache_dir: Path | None = Field(
        None,
        description="directory of the compiled index kernels; empty: in the virtual environment, "
        "else ~/.cache/kvlane/kernels",
    )

    # What the topics look like; all processes of a deployment agree on these
    topic_prefix: str = Field(
        "kvlane.",
        pattern=r"^[A-Za-z0-9._-]*$",
        max_length=64,
        description="prefix of every topic name",
    )
    lanes: int = Field(
        DEFAULT_LANES,
        ge=1,
        le=1024,
        description="partitions of each of requests, ledger and responses, fixed when "
        "`kvlane topics create` makes them; more routers than lanes share no more work",
    )
    assignments_partitions: int = Field(
        TOPICS_BY_NAME[ASSIGNMENTS].partitions,
        ge=1,
        le=1024,
        description="partitions of assignments that `kvlane topics create` makes",
    )
    kv_events_partitions: int = Field(
        TOPICS_BY_NAME[KV_EVENTS].partitions,
        ge=1,
        le=1024,
        description="partitions of kv-events that `kvlane topics create` makes",
    )
    prompts_partitions: int = Field(
        TOPICS_BY_NAME[PROMPTS].partitions,
        ge=1,
        le=1024,
        description="partitions of prompts that `kvlane topics create` makes; more preprocessors "
        "than partitions share no more work",
    )
    batch_partitions: int = Field(
        TOPICS_BY_NAME[BATCH].partitions,
        ge=1,
        le=1024,
        description="partitions of batch that `kvlane topics create` makes",
    )
    batch_retention_s: float = Field(
        (TOPICS_BY_NAME[BATCH].retention_ms or 0) / 1000,
        ge=3600,
        description="time for which batch prompts are kept, in seconds",
    )
    results_partitions: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="partitions of results that `kvlane topics create` makes; empty: as many as "
        "lanes, which is also the cheapest to read again when a collector takes over a lane",
    )
    results_retention_s: float = Field(
        (TOPICS_BY_NAME[RESULTS].retention_ms or 0) / 1000,
        ge=3600,
        description="time for which results are kept, in seconds",
    )
    replication_factor: int = Field(
        1, ge=1, description="replicas of every partition that `kvlane topics create` makes"
    )
    min_insync_replicas: int = Field(
        1, ge=1, description="in-sync replicas that must have a record before it is acknowledged"
    )
    hash_secret: SecretStr = Field(
        SecretStr(""),
        description="secret for the hashes of cached blocks, the same in all processes; empty: a "
        "public one, accepted with brokers on loopback only",
    )
    hash_secret_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_HASH_SECRET"
    )

    # How long a request may take
    deadline_s: float = Field(
        600, gt=0, description="time limit of a request that sets none, in seconds"
    )
    max_lifetime_s: float = Field(
        600, gt=0, description="longest time limit that a request may set, in seconds"
    )
    batch_max_lifetime_s: float = Field(
        7 * 24 * 3600,
        gt=0,
        le=MAX_DEADLINE_S,
        description="time limit of a batch prompt that sets none, and the longest, in seconds from "
        "its append to `batch`",
    )
    dedup_window_s: float = Field(
        1200,
        gt=0,
        description="time during which a repeated request id is recognised, in seconds",
    )
    max_attempts: int = Field(
        3, ge=1, description="failed attempts after which a request ends with an error"
    )

    # Results
    results: Literal["requested", "all", "batch"] = Field(
        "requested",
        description="requests that get a record on results: those whose prompt asks for it or "
        "belongs to a batch job, all (also over HTTP), or those of batch jobs only",
    )
    reply_topic_prefixes: str = Field(
        "",
        description="prefixes of the topics that prompts may name for a copy of their result, "
        "separated by commas; empty: none",
    )

    # Worker
    worker_id: str = Field(
        default_factory=_unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this worker, unique in the deployment",
    )
    worker_timeout_s: float = Field(
        5,
        gt=0,
        description="time without a heartbeat after which a worker is considered dead, in seconds",
    )
    heartbeat_interval_s: float = Field(
        1, gt=0, description="time between two heartbeats of a worker, in seconds"
    )
    max_num_seqs: int = Field(256, ge=1, description="requests that a worker runs concurrently")
    worker_max_waiting: int = Field(
        16, ge=0, description="requests that a worker queues before it returns more to the router"
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
    engine: Literal["simulated", "echo", "vllm", "attached"] = Field(
        "simulated",
        description="engine of a worker: simulated has the timing and prefix cache of a GPU and "
        "generates demo text, echo has no model and repeats the prompt, vllm is vLLM, "
        "attached is an OpenAI-compatible server that runs already",
    )
    engine_speedup: float = Field(
        1, gt=0, description="speed of the simulated engine relative to the GPU it models"
    )
    block_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="tokens per KV-cache block of the simulated engine, or of an attached server "
        "that does not report it",
    )
    cache_blocks: int = Field(
        16_384,
        ge=1,
        description="KV-cache blocks of the simulated engine, or of an attached server that does "
        "not report them",
    )
    echo_itl_ms: float = Field(
        20, ge=0, description="inter-token latency of the echo engine, in milliseconds"
    )
    attach_url: str = Field(
        "",
        description="engine attached: URL of the server, http://host:port; it serves the OpenAI "
        "completions API, and KVLANE_MODEL_PATH has the files of its model",
    )
    attach_kind: ModelKind = Field(
        "tokens",
        description="engine attached: tokens sends tokenized prompts and serves chats and "
        "completions; any other kind forwards the client's body for that one endpoint, "
        "needs no KVLANE_MODEL_PATH, and cannot resume an interrupted response on another "
        "worker",
    )
    attach_model: str = Field(
        "", description="engine attached: name of the model at the server; empty: its only one"
    )
    attach_events_endpoint: str = Field(
        "",
        description="engine attached: ZMQ endpoint of the server's KV-cache events, "
        "tcp://host:port or ipc://path; empty: the cache is estimated from the requests it serves",
    )
    attach_replay_endpoint: str = Field(
        "",
        description="engine attached: ZMQ endpoint from which lost KV-cache events are requested "
        "again, tcp://host:port; empty: after a loss the cache counts as empty",
    )
    attach_api_key: SecretStr = Field(
        SecretStr(""), description="engine attached: API key of the server"
    )
    attach_api_key_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_ATTACH_API_KEY"
    )
    attach_read_timeout_s: float = Field(
        120,
        gt=0,
        description="engine attached: time without data from the server, while it has a request, "
        "after which the request moves to another worker, in seconds",
    )
    attach_max_response_bytes: int = Field(
        64 * 1024 * 1024,
        gt=0,
        description="engine attached: largest response read from the server, in bytes, including "
        "the JSON around each token; a longer one is aborted",
    )
    attach_start_timeout_s: float = Field(
        600,
        gt=0,
        description="engine attached: time a starting worker waits for the server, in seconds",
    )

    engine_args: dict[str, Any] = Field(
        {},
        description="engine vllm: arguments of AsyncEngineArgs, as a JSON object, such as "
        '{"tensor_parallel_size": 2}',
    )
    adapters: dict[str, Path] = Field(
        {},
        description="LoRA adapters that the engine loads when it starts, as a JSON object of names "
        "and directories; the engines simulated and echo read no directory",
    )

    worker_role: Role = Field(
        "aggregated",
        description="role of this worker: aggregated (prefill and decode); prefill or decode alone "
        "is refused at start, since no router assigns them to separate workers",
    )
    taints: str = Field(
        "",
        description="labels of this worker that requests can require by name, separated by commas, "
        "such as gpu=h200,topology/zone=a",
    )
    max_loras: int = Field(
        0,
        ge=0,
        description="engines simulated and echo: adapters that may be loaded on demand, in "
        "addition to KVLANE_ADAPTERS",
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

    # Router
    router_id: str = Field(
        default_factory=_unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this router, unique in the deployment",
    )
    max_queued_requests: int = Field(
        4096, ge=0, description="requests that a router queues before it rejects more"
    )
    max_queued_tokens: int = Field(
        100_000_000,
        ge=0,
        description="uncached prompt tokens that a router queues before it rejects more",
    )
    max_queued_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=0,
        description="prompt bytes that a router queues before it rejects more: an image counts as "
        "few tokens and takes megabytes",
    )
    max_queued_batch_requests: int = Field(
        128,
        ge=0,
        description="requests of class batch that a router has room for, besides those above; "
        "further batch prompts wait in their topic",
    )
    batch_max_slowdown: float = Field(
        0.05,
        ge=0,
        description="by which part of themselves the decode steps of interactive requests may "
        "become longer for batch requests beside them; beyond it batch requests wait or give way",
    )
    no_worker_timeout_s: float = Field(
        120,
        ge=0,
        description="time that requests wait while their model has no worker, counted from the "
        "first that found none, in seconds; then they end with no_workers until there is a worker",
    )
    queue_order: Literal["sjf", "fcfs", "wspt"] = Field(
        "sjf",
        description="policy predictive: order of queued requests within one strict priority: sjf "
        "takes the shortest prefill first, fcfs the earliest arrival, wspt the shortest "
        "prefill divided by its priority",
    )

    queue_classes: dict[str, ClassConfig] = Field(
        {},
        description="share of the workers for each class of queued requests, as a JSON object by "
        'class name (header x-queue-class, or the tenant\'s): {"batch": {"weight": 0.2, '
        '"max_queued_requests": 1000, "max_queued_tokens": 1000000}}; weights are '
        "relative to the 1 of all other classes, limits are per router",
    )

    policy: Literal[
        "predictive",
        "dynamo",
        "least_loaded",
        "round_robin",
        "random",
        "power_of_two",
        "session_hash",
        "direct",
    ] = Field(
        "predictive", description="routing policy: how a worker is selected among the eligible ones"
    )
    overlap_score_credit: float = Field(
        1.0,
        ge=0,
        description="policy dynamo: weight of a cached prompt block, in blocks",
    )
    prefill_load_scale: float = Field(
        1.0, ge=0, description="policy dynamo: weight of a prefill block, in decode blocks"
    )
    router_temperature: float = Field(
        0.0,
        ge=0,
        description="policy dynamo: softmax temperature of the selection; 0 takes the lowest cost",
    )
    decode_weight: float = Field(
        0.01,
        ge=0,
        description="policy predictive: weight of decode time, summed over requests, relative to "
        "time to first token",
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
    status_port: int | None = Field(
        0,
        ge=0,
        le=65535,
        description="port of /livez, /readyz and /metrics of a router, worker or preprocessor; 0: "
        "any free port, which is logged",
    )

    # Gateway
    http_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address that every process listens on",
    )
    http_port: int = Field(
        8000, ge=0, le=65535, description="port of the gateway; 0: any free port"
    )
    indexer_port: int = Field(
        8090, ge=0, le=65535, description="port of an indexer; 0: any free port"
    )
    snapshot_interval_s: float = Field(
        300,
        gt=0,
        description="time between two snapshots of the index by an indexer, in seconds",
    )
    http_max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="largest HTTP request body, in bytes"
    )
    http_max_file_bytes: int = Field(
        200 * 1024 * 1024,
        ge=1024,
        description="largest file that is uploaded to the Files API, in bytes",
    )
    batch_max_lines: int = Field(
        50_000, ge=1, le=1_000_000, description="requests that the input file of a batch may have"
    )
    http_allowed_origins: str = Field(
        "",
        description="origins of web pages that may call the gateway (CORS), https://name[:port], "
        "separated by commas; * allows any; empty: same origin only",
    )
    http_max_streams: int = Field(
        2000,
        ge=1,
        description="responses that a gateway streams concurrently before it rejects more",
    )
    stream_secret: SecretStr = Field(
        SecretStr(""),
        description="secret that signs stream ids, the same in all gateways; empty: derived from "
        "the topic prefix, accepted for gateways on loopback only",
    )
    stream_secret_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_STREAM_SECRET"
    )
    api_keys_file: Path | None = Field(
        None,
        description="file of API keys and tenant limits, written by `kvlane keys` and reloaded "
        "when it changes; empty: no authentication, accepted for processes on "
        "loopback only",
    )
    http_allow_anonymous: bool = Field(
        False,
        description="whether HTTP ports that other machines reach may be served without API keys, "
        "because a proxy in front authenticates",
    )
    metrics_allow_anonymous: bool = Field(
        False, description="whether /metrics is served without a key although there are API keys"
    )
    http_tls_cert: ReadableFile | None = Field(
        None,
        description="PEM file with the certificate chain of the HTTP ports; empty: no TLS",
    )
    http_tls_key: ReadableFile | None = Field(
        None, description="PEM file with the unencrypted private key of KVLANE_HTTP_TLS_CERT"
    )
    gateway_count: int = Field(1, ge=1, le=1024, description="gateways that share the lanes")
    gateway_index: int = Field(
        0, ge=0, description="index of this gateway, from 0: it reads its share of the lanes only"
    )

    # Model
    model: str = Field("demo", min_length=1, description="name under which the model is served")
    model_path: Path | None = Field(
        None,
        description="directory of the model in Hugging Face layout; empty: the demo model",
    )
    context_length: int = Field(
        8192, ge=1, description="maximum of prompt and output together, in tokens"
    )

    # Kafka client
    request_timeout_ms: int = Field(
        4000,
        ge=100,
        description="time a broker has to answer before the client retries, in milliseconds",
    )
    session_timeout_ms: int = Field(
        6000,
        ge=1000,
        description="time without contact after which the consumer group reassigns a member's "
        "lanes, in milliseconds",
    )
    security_protocol: SecurityProtocol = Field(
        "PLAINTEXT",
        description="PLAINTEXT, SSL (encryption), SASL_PLAINTEXT (authentication), SASL_SSL (both)",
    )
    ssl_cafile: ReadableFile | None = Field(
        None, description="PEM file of trusted certificate authorities; empty: those of the system"
    )
    ssl_certfile: ReadableFile | None = Field(
        None, description="PEM file of the client certificate, for mutual TLS"
    )
    ssl_keyfile: ReadableFile | None = Field(
        None, description="PEM file of the client's private key"
    )
    ssl_keypassword: SecretStr = Field(
        SecretStr(""), description="password of the private key, if it is encrypted"
    )
    ssl_keypassword_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_SSL_KEYPASSWORD"
    )
    ssl_check_hostname: bool = Field(
        True, description="whether a broker's certificate must match its host name"
    )
    sasl_mechanism: SaslMechanism | None = Field(
        None, description="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER"
    )
    sasl_username: str = Field("", description="user name for PLAIN and SCRAM")
    sasl_password: SecretStr = Field(SecretStr(""), description="password for PLAIN and SCRAM")
    sasl_password_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_SASL_PASSWORD"
    )
    sasl_oauth_token_file: ReadableFile | None = Field(
        None, description="file with the OAUTHBEARER token, read at every connection"
    )

    # What is said and kept
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="lowest severity that is logged"
    )
    log_json: bool = Field(False, description="log lines as JSON objects")
    trace_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="receiver of spans by OTLP over HTTP, http://host:4318; empty: no spans",
    )
    trace_sample_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the requests that make spans; one whose client sends a "
        "`traceparent` follows its sampled flag",
    )
    keep_prompts: bool = Field(
        False, description="keep prompt text in dead letters instead of redacting it"
    )
    validate_engine: bool = Field(
        False, description="check every engine output against the engine interface while it runs"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # Without its cause: pydantic's own text shows the inputs, secrets among them.
            raise SettingsError("\n".join(_explain(error))) from None

    @model_validator(mode="before")
    @classmethod
    def _read_secret_files(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in _SECRETS:
            path = values.get(f"{name}_file")
            if path is None or not Path(path).is_file():
                continue  # the field's own check says what is wrong with it
            if values.get(name):
                raise ValueError(
                    f"set {variable_name(name)} or {variable_name(name)}_FILE, not both"
                )
            try:
                values[name] = Path(path).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise ValueError(
                    f"the file of {variable_name(name)}_FILE cannot be read as text"
                ) from None
        return values

    @field_validator("bootstrap_servers")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        if "://" in value or any(
            not _is_address(part.strip()) for part in value.split(",") if value
        ):
            raise ValueError("give host:port, several separated by commas, without a scheme")
        return value

    @field_validator("http_allowed_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in _listed(value):
            if origin != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", origin):
                raise ValueError(
                    "give origins, https://name or http://name:port, without a path, separated by "
                    "commas"
                )
        return value

    @field_validator("attach_url")
    @classmethod
    def _is_server(cls, value: str) -> str:
        bare = value.rstrip("/").removesuffix("/v1")
        if value and not re.fullmatch(r"https?://[^/?#@\s]+", bare):
            raise ValueError("give http://host:port or https://host:port, without a path")
        return bare

    @field_validator("attach_events_endpoint", "attach_replay_endpoint")
    @classmethod
    def _is_socket(cls, value: str) -> str:
        if value and ("*" in value or not re.fullmatch(r"tcp://[^/\s]+:\d+|ipc://\S+", value)):
            raise ValueError(
                "give the address to connect to, tcp://host:port or ipc://path: where the server "
                "has tcp://*:5557, tcp://127.0.0.1:5557 is meant on the same machine"
            )
        return value

    @field_validator("queue_classes")
    @classmethod
    def _are_shares(cls, value: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
        for name, share in value.items():
            if share.weight <= 0:
                raise ValueError(f"{name!r}: give a weight above 0")
            if min(share.max_queued_requests, share.max_queued_tokens) < 0:
                raise ValueError(f"{name!r}: give bounds of 0 or more")
        return value

    @field_validator("security_protocol", "sasl_mechanism", "log_level", mode="before")
    @classmethod
    def _ignore_case(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        checks = (
            self._wrong_times(),
            self._wrong_engine(),
            self._wrong_topology(),
            self._wrong_security(),
        )
        if problems := [problem for check in checks for problem in check]:
            raise ValueError("\n".join(problems))
        return self

    def _wrong_times(self) -> Iterator[str]:
        if self.deadline_s > self.max_lifetime_s:
            yield _exceeds(self, "deadline_s", "max_lifetime_s")
        if self.batch_max_lifetime_s > self.batch_retention_s:
            yield _exceeds(self, "batch_max_lifetime_s", "batch_retention_s")
        if self.max_lifetime_s > self.dedup_window_s:
            yield _exceeds(self, "max_lifetime_s", "dedup_window_s")
        if self.max_lifetime_s >= _LONGEST_LIFETIME_S:
            yield (
                f"KVLANE_MAX_LIFETIME_S={self.max_lifetime_s:g} is not less than half the "
                f"retention of the responses: it must be below {_LONGEST_LIFETIME_S:g}"
            )
        if 2 * self.heartbeat_interval_s > self.worker_timeout_s:
            yield (
                f"KVLANE_WORKER_TIMEOUT_S={self.worker_timeout_s:g} is less than two heartbeats: "
                f"raise it to {2 * self.heartbeat_interval_s:g}, or lower "
                "KVLANE_HEARTBEAT_INTERVAL_S"
            )

    def _wrong_engine(self) -> Iterator[str]:
        cached = self.block_size * self.cache_blocks
        if self.engine == "simulated" and self.context_length > cached:
            yield (
                f"KVLANE_CONTEXT_LENGTH={self.context_length} exceeds the {cached} tokens of the "
                "cache: raise KVLANE_CACHE_BLOCKS or lower the context"
            )
        if self.engine == "attached":
            yield from self._wrong_attachment()

    def _wrong_attachment(self) -> Iterator[str]:
        if not self.attach_url:
            yield "KVLANE_ENGINE=attached needs KVLANE_ATTACH_URL=http://host:port, a server's"
        if self.attach_kind == "tokens" and self.model_path is None:
            yield (
                "KVLANE_ENGINE=attached needs KVLANE_MODEL_PATH: the folder with the tokenizer of "
                "the model that the server serves; or KVLANE_ATTACH_KIND=chat, for which none is "
                "needed"
            )
        if self.attach_kind != "tokens" and self.attach_events_endpoint:
            yield (
                "KVLANE_ATTACH_EVENTS_ENDPOINT has no effect with "
                f"KVLANE_ATTACH_KIND={self.attach_kind}: such requests are not routed by cache"
            )
        if self.attach_replay_endpoint and not self.attach_events_endpoint:
            yield (
                "KVLANE_ATTACH_REPLAY_ENDPOINT repairs losses of KVLANE_ATTACH_EVENTS_ENDPOINT: "
                "set that too"
            )

    def _wrong_topology(self) -> Iterator[str]:
        if self.min_insync_replicas > self.replication_factor:
            yield _exceeds(self, "min_insync_replicas", "replication_factor")
        if self.gateway_index >= self.gateway_count:
            yield (
                f"KVLANE_GATEWAY_INDEX={self.gateway_index} counts from 0 and must be below "
                f"KVLANE_GATEWAY_COUNT={self.gateway_count}"
            )
        if self.gateway_count > self.lanes:
            yield _exceeds(self, "gateway_count", "lanes")
        if self.broker == "env" and not self.bootstrap_servers:
            yield "KVLANE_BROKER=env needs KVLANE_BOOTSTRAP_SERVERS=host:port"

    def _wrong_security(self) -> Iterator[str]:
        protocol = f"KVLANE_SECURITY_PROTOCOL={self.security_protocol}"
        if not self.security_protocol.endswith("SSL"):
            for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
                if getattr(self, name) is not None:
                    yield f"{variable_name(name)} is set, but {protocol} does not encrypt: use SSL"
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            yield "KVLANE_SSL_KEYFILE needs KVLANE_SSL_CERTFILE, the certificate it belongs to"
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            yield "KVLANE_HTTP_TLS_CERT and KVLANE_HTTP_TLS_KEY belong together: set both, or none"
        yield from self._wrong_sasl(protocol)

    def _wrong_sasl(self, protocol: str) -> Iterator[str]:
        if not self.security_protocol.startswith("SASL_"):
            for name in (
                "sasl_mechanism",
                "sasl_username",
                "sasl_password",
                "sasl_oauth_token_file",
            ):
                if getattr(self, name):  # an empty SecretStr is false
                    variable = variable_name(name)
                    yield f"{variable} is set, but {protocol} does not use it: use SASL_SSL"
        elif self.sasl_mechanism is None:
            yield f"{protocol} needs KVLANE_SASL_MECHANISM: PLAIN, SCRAM-SHA-512, ..."
        elif self.sasl_mechanism == "OAUTHBEARER":
            if self.sasl_oauth_token_file is None:
                yield "KVLANE_SASL_MECHANISM=OAUTHBEARER needs KVLANE_SASL_OAUTH_TOKEN_FILE"
        elif not (self.sasl_username and self.sasl_password.get_secret_value()):
            yield (
                f"KVLANE_SASL_MECHANISM={self.sasl_mechanism} needs KVLANE_SASL_USERNAME and "
                "KVLANE_SASL_PASSWORD (or KVLANE_SASL_PASSWORD_FILE)"
            )

    @property
    def partitions(self) -> dict[str, int]:
        """Partitions of the topics whose number is a setting, without those of lanes."""
        own = {RESULTS: self.results_partitions} if self.results_partitions else {}
        return own | {
            PROMPTS: self.prompts_partitions,
            BATCH: self.batch_partitions,
            ASSIGNMENTS: self.assignments_partitions,
            KV_EVENTS: self.kv_events_partitions,
        }

    def topic_options(self) -> TopicOptions:
        """Arguments of `create_topics` and `describe_topics` of `streams/kafka/provision.py`."""
        return TopicOptions(
            lanes=self.lanes,
            replication=self.replication_factor,
            min_insync=self.min_insync_replicas,
            partitions=self.partitions,
            retention_ms={
                BATCH: int(self.batch_retention_s * 1000),
                RESULTS: int(self.results_retention_s * 1000),
            },
        )

    @property
    def reply_prefixes(self) -> tuple[str, ...]:
        """The prefixes of topics for replies, one by one."""
        return _listed(self.reply_topic_prefixes)

    @property
    def taint_names(self) -> tuple[str, ...]:
        """The taints of a worker, one by one."""
        return _listed(self.taints)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins of web pages that are allowed, one by one."""
        return _listed(self.http_allowed_origins)

    def tenant_tag(self) -> TenantTag:
        """What binds the ids of a gateway's streams to tenants; the same at all gateways.

        Raises SettingsError without a secret for a gateway that other machines reach, or that has
        API keys: the known one keeps streams apart that nobody tries to mix up.
        """
        secret = self.stream_secret.get_secret_value()
        if not secret and self.api_keys_file is not None:
            raise SettingsError(
                "KVLANE_API_KEYS_FILE needs KVLANE_STREAM_SECRET (or KVLANE_STREAM_SECRET_FILE), "
                "the same random text for all gateways: it keeps the streams and cached blocks of "
                "tenants apart"
            )
        if not secret and not _on_loopback(f"{self.http_host}:0"):
            raise SettingsError(
                f"KVLANE_HTTP_HOST={self.http_host} is reached from other machines: set "
                "KVLANE_STREAM_SECRET (or KVLANE_STREAM_SECRET_FILE) to the same random text for "
                "all gateways"
            )
        return TenantTag((secret or f"kvlane streams of {self.topic_prefix}").encode())

    def require_bootstrap_servers(self) -> None:
        """Raises SettingsError when no Kafka is named."""
        if not self.bootstrap_servers:
            raise SettingsError(
                "KVLANE_BOOTSTRAP_SERVERS is not set: name a Kafka as host:port, or start one with "
                "`kvlane up`"
            )

    @property
    def is_on_loopback(self) -> bool:
        """Whether the HTTP ports can be reached from this machine only."""
        return _on_loopback(f"{self.http_host}:0")

    def require_authentication(self) -> None:
        """Raises SettingsError for HTTP ports that anybody on another machine may use."""
        if not (self.is_on_loopback or self.api_keys_file or self.http_allow_anonymous):
            raise SettingsError(
                f"KVLANE_HTTP_HOST={self.http_host} is reached from other machines, without API "
                "keys: set KVLANE_API_KEYS_FILE (`kvlane keys create` makes one), or "
                "KVLANE_HTTP_ALLOW_ANONYMOUS=true where something in front authenticates"
            )

    def kafka_connection(self, client_id: str) -> ConnectionOptions:
        """How a Kafka client with this name reaches the cluster."""
        return ConnectionOptions(
            bootstrap_servers=self.bootstrap_servers,
            client_id=client_id,
            security_protocol=self.security_protocol,
            ssl_cafile=self.ssl_cafile,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            ssl_keypassword=self.ssl_keypassword.get_secret_value(),
            ssl_check_hostname=self.ssl_check_hostname,
            sasl_mechanism=self.sasl_mechanism,
            sasl_username=self.sasl_username,
            sasl_password=self.sasl_password.get_secret_value(),
            sasl_oauth_token_file=self.sasl_oauth_token_file,
            request_timeout_ms=self.request_timeout_ms,
            session_timeout_ms=self.session_timeout_ms,
        )

    def block_key_secret(self) -> KeySecret:
        """The constants of block keys. Raises SettingsError without a secret for remote brokers.

        With the known one, whoever reaches the topics could make prompts whose keys collide.
        """
        from indexer.block_keys import LOOPBACK_SECRET, derive_secret

        secret = self.hash_secret.get_secret_value().encode()
        if not secret and not _on_loopback(self.bootstrap_servers):
            raise SettingsError(
                f"KVLANE_BOOTSTRAP_SERVERS={self.bootstrap_servers} is not this machine: set "
                "KVLANE_HASH_SECRET (or KVLANE_HASH_SECRET_FILE) to the same random text for all "
                "routers, workers and indexers"
            )
        return derive_secret(secret or LOOPBACK_SECRET)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that no setting reads, each with what was probably meant."""
    known = [variable_name(name) for name in Settings.model_fields]
    unknown = []
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            unknown.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return unknown


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


def _listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _on_loopback(servers: str) -> bool:
    hosts = [part.strip().rpartition(":")[0].strip("[]") for part in servers.split(",") if part]
    return all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)


def _exceeds(settings: Settings, smaller: str, larger: str) -> str:
    low, high = getattr(settings, smaller), getattr(settings, larger)
    return (
        f"{variable_name(smaller)}={low:.15g} exceeds {variable_name(larger)}={high:.15g}: "
        f"lower the first or raise the second"
    )


def _explain(error: ValidationError) -> Iterator[str]:
    """Lines for the operator. Inputs are shown for plain fields only, never for secrets."""
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            yield from message.splitlines()
            continue
        name = str(problem["loc"][0])
        field = Settings.model_fields.get(name)
        if field is None:
            yield f"{name} is not a setting"
            continue
        given = "" if name in (*_SECRETS, "engine_args") else f"={problem['input']}"
        inner = "".join(f"{step}: " for step in problem["loc"][1:])
        yield f"{variable_name(name)}{given}: {inner}{message} ({field.description})"
