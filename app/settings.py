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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.routing.classes import Share
from streams.connection import Connection, SaslMechanism, SecurityProtocol
from streams.ids import Seal
from streams.records import ModelKind, Role
from streams.topics import BY_NAME, RESPONSES

if TYPE_CHECKING:
    from indexer.keys import KeySecret

PREFIX = "KVLANE_"
_MASK = "********"
_SECRETS = ("sasl_password", "ssl_keypassword", "hash_secret", "stream_secret", "attach_api_key")
"""Each has a twin NAME_file."""
_LONGEST_LIFETIME_S = (BY_NAME[RESPONSES].retention_ms or 0) / 2000
"""Below half the retention of the answers, what a reader was shown of a request is still there when
the request changes hands at its end."""


class SettingsError(ValueError):
    """Settings that cannot work. Each line names a variable, what is wrong, and what would do."""


def variable(field: str) -> str:
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


class Settings(BaseSettings):
    """Immutable settings. Raises SettingsError when a value, or two together, cannot work."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    # Where Kafka is
    bootstrap_servers: str = Field(
        "", description="Kafka brokers, host:port[,host:port]; empty: none given"
    )
    broker: Literal["auto", "env", "docker", "jvm", "memory"] = Field(
        "auto",
        description="where a demo or a test gets its broker: env is KVLANE_BOOTSTRAP_SERVERS, "
        "docker and jvm start one, memory is the in-process twin, auto takes the first that works",
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "kvlane",
        description="folder for what is fetched once: broker files, tokenizers",
    )
    kernel_cache: Path | None = Field(
        None,
        description="where the machine code of the index's kernels is kept; empty: in the virtual "
        "environment, else in ~/.cache/kvlane/kernels",
    )

    # What the topics look like; all processes of a deployment agree on these
    topic_prefix: str = Field(
        "kvlane.",
        pattern=r"^[A-Za-z0-9._-]*$",
        max_length=64,
        description="what every topic name starts with",
    )
    lanes: int = Field(
        32, ge=1, le=1024, description="partitions of requests, ledger and responses, each"
    )
    replication: int = Field(1, ge=1, description="copies of every partition, in brokers")
    min_insync: int = Field(
        1, ge=1, description="copies that must have a record before it counts, in brokers"
    )
    hash_secret: SecretStr = Field(
        SecretStr(""),
        description="secret behind the names of cached blocks; empty: a known one, for brokers on "
        "this machine only",
    )
    hash_secret_file: ReadableFile | None = Field(
        None, description="file that holds KVLANE_HASH_SECRET"
    )

    # How long a request may take
    deadline_s: float = Field(
        600, gt=0, description="time a request has when it names none, in seconds"
    )
    max_lifetime_s: float = Field(
        600, gt=0, description="longest time any request may ask for, in seconds"
    )
    dedup_window_s: float = Field(
        1200,
        gt=0,
        description="time in which a request id that comes again is recognised, in seconds",
    )
    max_attempts: int = Field(
        3, ge=1, description="failed attempts after which a request ends with an error"
    )

    # Worker
    worker_id: str = Field(
        default_factory=_unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this worker, unique in the deployment",
    )
    worker_timeout_s: float = Field(
        5, gt=0, description="silence after which a worker counts as dead, in seconds"
    )
    heartbeat_s: float = Field(1, gt=0, description="time between two heartbeats, in seconds")
    max_num_seqs: int = Field(256, ge=1, description="requests a worker runs at a time")
    worker_queue: int = Field(
        16, ge=0, description="requests a worker keeps waiting before it hands more back"
    )
    drain_grace_s: float = Field(
        30,
        ge=0,
        description="time a stopping worker or gateway gives its running requests, in seconds",
    )
    canary_idle_s: float = Field(
        10, gt=0, description="time without a request after which an engine is probed, in seconds"
    )
    canary_answer_s: float = Field(
        3, gt=0, description="time an engine has to answer a probe, in seconds"
    )
    engine_stall_s: float = Field(
        30,
        gt=0,
        description="time without a step, while requests run, after which they are moved to other "
        "workers, in seconds; beside a server that tells no steps the longer of this and "
        "KVLANE_ATTACH_SILENCE_S",
    )
    engine_dead_s: float = Field(
        60,
        gt=0,
        description="time without an answer to any probe after which a worker ends, to be started "
        "anew, in seconds",
    )
    engine: Literal["simulated", "echo", "vllm", "attached"] = Field(
        "simulated",
        description="what generates: simulated behaves as a GPU would and says sentences in the "
        "tokens of the model, echo has no model and repeats what it is told, vllm is the real one, "
        "attached is a server that runs already",
    )
    engine_speedup: float = Field(
        1, gt=0, description="how many times faster than its GPU the simulated engine is"
    )
    block_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="tokens in a block of the simulated engine's cache, or of that of an attached "
        "server that does not say",
    )
    cache_blocks: int = Field(
        16_384,
        ge=1,
        description="blocks that the simulated engine's cache holds, or that of an attached server "
        "that does not say",
    )
    echo_itl_ms: float = Field(
        20, ge=0, description="time the echo engine takes for one token, in milliseconds"
    )
    attach_url: str = Field(
        "",
        description="engine attached: the server that a worker stands beside, http://host:port; it "
        "speaks OpenAI's completions, and KVLANE_MODEL_PATH has the files of its model",
    )
    attach_kind: ModelKind = Field(
        "tokens",
        description="engine attached: what the server is asked: in tokens, which serve chats and "
        "completions, or only one kind of request, in the client's own words; then no "
        "KVLANE_MODEL_PATH is needed, and an answer that breaks off cannot go on elsewhere",
    )
    attach_model: str = Field(
        "", description="engine attached: the model's name at the server; empty: its only one"
    )
    attach_events: str = Field(
        "",
        description="engine attached: where the server publishes its cache events, "
        "tcp://host:port; empty: its cache is guessed from what it serves",
    )
    attach_replay: str = Field(
        "",
        description="engine attached: where lost cache events can be asked for again, "
        "tcp://host:port; empty: what was told before a loss is forgotten",
    )
    attach_api_key: SecretStr = Field(
        SecretStr(""), description="engine attached: the key that the server asks for"
    )
    attach_api_key_file: ReadableFile | None = Field(
        None, description="file that holds KVLANE_ATTACH_API_KEY"
    )
    attach_silence_s: float = Field(
        120,
        gt=0,
        description="engine attached: time the server may say nothing while it has something to "
        "answer, in seconds; then the request goes to another worker",
    )
    attach_answer_bytes: int = Field(
        64 * 1024 * 1024,
        gt=0,
        description="engine attached: what is read of one answer, in bytes, with all that the "
        "server writes around each token; an answer that has more is broken off",
    )
    attach_start_s: float = Field(
        600,
        gt=0,
        description="engine attached: time a worker that starts waits for the server, in seconds",
    )

    engine_args: dict[str, Any] = Field(
        {},
        description="engine vllm: arguments of its AsyncEngineArgs, as a JSON object, such as "
        '{"tensor_parallel_size": 2}',
    )
    adapters: dict[str, Path] = Field(
        {},
        description="adapters (LoRA) that the engine loads at its start, as a JSON object of names "
        "and folders; the engines simulated and echo read no folder",
    )

    worker_role: Role = Field(
        "aggregated",
        description="what a worker is there for: aggregated does whole requests, prefill only "
        "prompts, for other workers, decode whole requests and what prefill workers began",
    )
    taints: str = Field(
        "",
        description="what requests can ask for by name, separated by commas, such as "
        "gpu=h200,topology/zone=a",
    )
    max_loras: int = Field(
        0,
        ge=0,
        description="engines simulated and echo: adapters that are loaded when they are asked for, "
        "beside those of KVLANE_ADAPTERS",
    )
    busy_cache: float | None = Field(
        None,
        gt=0,
        le=1,
        description="part of its cache in use, 0 to 1, above which a worker gets no new requests; "
        "empty: no bound",
    )
    busy_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens still to be computed above which a worker gets no new requests; "
        "empty: no bound",
    )

    # Router
    router_id: str = Field(
        default_factory=_unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this router, unique in the deployment",
    )
    held_requests: int = Field(
        4096, ge=0, description="requests a router keeps waiting before it refuses more"
    )
    held_tokens: int = Field(
        100_000_000,
        ge=0,
        description="tokens of prompts, but for what caches have, that a router keeps waiting "
        "before it refuses more",
    )
    held_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=0,
        description="bytes of prompts that a router keeps waiting before it refuses more: an image "
        "counts as few tokens and takes megabytes",
    )
    wait_for_worker_s: float = Field(
        120,
        ge=0,
        description="how long requests wait for a worker while their model has none, in seconds; "
        "then they are refused (503, no_workers) until one is there",
    )
    queue_order: Literal["shortest", "fcfs", "wspt"] = Field(
        "shortest",
        description="policy predictive: who of those that wait goes first, after strict priority: "
        "the shortest prefill, the first that came, or the shortest by priority",
    )

    queue_classes: dict[str, Share] = Field(
        {},
        description="shares of the workers while requests wait, as a JSON object by names that "
        'requests (x-queue-class) or their tenants have: {"batch": {"weight": 0.2, '
        '"held_requests": 1000, "held_tokens": 1000000}}; weights are relative to the 1 of all '
        "others, bounds hold in each router",
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
        "predictive", description="how a worker is chosen among those that may take a request"
    )
    overlap_score_credit: float = Field(
        1.0,
        ge=0,
        description="policy dynamo: what a cached block of the prompt is worth, in blocks",
    )
    prefill_load_scale: float = Field(
        1.0, ge=0, description="policy dynamo: what a block of prefill costs, in blocks of decode"
    )
    router_temperature: float = Field(
        0.0, ge=0, description="policy dynamo: 0 takes the least cost, more spreads the requests"
    )
    decode_weight: float = Field(
        0.01,
        ge=0,
        description="policy predictive: what a millisecond of decode, summed over requests, is "
        "worth in milliseconds to a first token",
    )
    max_hold_s: float = Field(
        10,
        ge=0,
        description="policy predictive: how long a request is held for a busy worker, in seconds",
    )

    session_slack: float = Field(
        1.0,
        ge=0,
        description="how many times the work of its own prompt a request's session is worth: when "
        "its worker costs more than that above the best one, it goes there instead",
    )
    track_output_blocks: bool = Field(
        True,
        description="whether tokens of answers under way count as load, less and less towards "
        "their expected length",
    )
    router_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port a router answers /livez, /readyz and /metrics on; 0 takes any free one; "
        "empty: none",
    )

    # Gateway
    http_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address a gateway, router or indexer listens on",
    )
    http_port: int = Field(
        8000, ge=0, le=65535, description="port the gateway listens on; 0 takes any free one"
    )
    indexer_port: int = Field(
        8090, ge=0, le=65535, description="port an indexer listens on; 0 takes any free one"
    )
    snapshot_every_s: float = Field(
        300,
        gt=0,
        description="time after which an indexer writes a new snapshot of the caches, in seconds",
    )
    http_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="largest body of a request over HTTP, in bytes"
    )
    http_streams: int = Field(
        2000, ge=1, description="answers a gateway has under way before it refuses more"
    )
    stream_secret: SecretStr = Field(
        SecretStr(""),
        description="secret that seals stream ids, one for all gateways; empty: one made of the "
        "topic prefix, for gateways on loopback only",
    )
    stream_secret_file: ReadableFile | None = Field(
        None, description="file that holds KVLANE_STREAM_SECRET"
    )
    gateways: int = Field(1, ge=1, le=1024, description="gateways that share the lanes")
    gateway_number: int = Field(
        0, ge=0, description="which of the gateways this one is, from 0: it reads its lanes only"
    )

    # Model
    model: str = Field("demo", min_length=1, description="name under which the model is served")
    model_path: Path | None = Field(
        None,
        description="folder of the model, as Hugging Face lays it out; empty: the one of the demo",
    )
    context_length: int = Field(
        8192, ge=1, description="longest prompt and answer together, in tokens"
    )

    # Kafka client
    request_timeout_ms: int = Field(
        4000,
        ge=100,
        description="time a broker has to answer before the client asks again, in milliseconds",
    )
    session_timeout_ms: int = Field(
        6000,
        ge=1000,
        description="silence after which a group takes a member's lanes away, in milliseconds",
    )
    security_protocol: SecurityProtocol = Field(
        "PLAINTEXT", description="SSL encrypts, SASL_ says who we are: SASL_SSL does both"
    )
    ssl_cafile: ReadableFile | None = Field(
        None, description="PEM file of trusted authorities; empty: those of the system"
    )
    ssl_certfile: ReadableFile | None = Field(
        None, description="PEM file of the client's certificate, for mutual TLS"
    )
    ssl_keyfile: ReadableFile | None = Field(
        None, description="PEM file of the client's private key"
    )
    ssl_keypassword: SecretStr = Field(
        SecretStr(""), description="password of the private key, if it is encrypted"
    )
    ssl_keypassword_file: ReadableFile | None = Field(
        None, description="file that holds KVLANE_SSL_KEYPASSWORD"
    )
    ssl_check_hostname: bool = Field(
        True, description="whether a broker's certificate must bear the name we called"
    )
    sasl_mechanism: SaslMechanism | None = Field(
        None, description="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER"
    )
    sasl_username: str = Field("", description="user name for PLAIN and SCRAM")
    sasl_password: SecretStr = Field(SecretStr(""), description="password for PLAIN and SCRAM")
    sasl_password_file: ReadableFile | None = Field(
        None, description="file that holds KVLANE_SASL_PASSWORD"
    )
    sasl_oauth_token_file: ReadableFile | None = Field(
        None, description="file of the OAUTHBEARER token, read afresh at every connection"
    )

    # What is said and kept
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="least severity that is logged"
    )
    log_json: bool = Field(False, description="log lines as JSON objects")
    keep_prompts: bool = Field(
        False, description="keep prompt text in dead letters instead of redacting it"
    )
    debug: bool = Field(
        False, description="check every engine's answers against the engine contract as they come"
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
                raise ValueError(f"set {variable(name)} or {variable(name)}_FILE, not both")
            try:
                values[name] = Path(path).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise ValueError(
                    f"the file of {variable(name)}_FILE cannot be read as text"
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

    @field_validator("attach_url")
    @classmethod
    def _is_server(cls, value: str) -> str:
        bare = value.rstrip("/").removesuffix("/v1")
        if value and not re.fullmatch(r"https?://[^/?#@\s]+", bare):
            raise ValueError("give http://host:port or https://host:port, without a path")
        return bare

    @field_validator("attach_events", "attach_replay")
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
    def _are_shares(cls, value: dict[str, Share]) -> dict[str, Share]:
        for name, share in value.items():
            if share.weight <= 0:
                raise ValueError(f"{name!r}: give a weight above 0")
            if min(share.held_requests, share.held_tokens) < 0:
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
        if self.max_lifetime_s > self.dedup_window_s:
            yield _exceeds(self, "max_lifetime_s", "dedup_window_s")
        if self.max_lifetime_s >= _LONGEST_LIFETIME_S:
            yield (
                f"KVLANE_MAX_LIFETIME_S={self.max_lifetime_s:g} is not less than half the "
                f"retention of the responses: it must be below {_LONGEST_LIFETIME_S:g}"
            )
        if 2 * self.heartbeat_s > self.worker_timeout_s:
            yield (
                f"KVLANE_WORKER_TIMEOUT_S={self.worker_timeout_s:g} is less than two heartbeats: "
                f"raise it to {2 * self.heartbeat_s:g} or lower KVLANE_HEARTBEAT_S"
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
        if self.attach_kind != "tokens" and self.attach_events:
            yield (
                f"KVLANE_ATTACH_EVENTS is of no use with KVLANE_ATTACH_KIND={self.attach_kind}: "
                "such requests are not routed by cache"
            )
        if self.attach_replay and not self.attach_events:
            yield "KVLANE_ATTACH_REPLAY needs KVLANE_ATTACH_EVENTS, whose losses it repairs"

    def _wrong_topology(self) -> Iterator[str]:
        if self.min_insync > self.replication:
            yield _exceeds(self, "min_insync", "replication")
        if self.gateway_number >= self.gateways:
            yield (
                f"KVLANE_GATEWAY_NUMBER={self.gateway_number} counts from 0 and must be below "
                f"KVLANE_GATEWAYS={self.gateways}"
            )
        if self.gateways > self.lanes:
            yield _exceeds(self, "gateways", "lanes")
        if self.broker == "env" and not self.bootstrap_servers:
            yield "KVLANE_BROKER=env needs KVLANE_BOOTSTRAP_SERVERS=host:port"

    def _wrong_security(self) -> Iterator[str]:
        protocol = f"KVLANE_SECURITY_PROTOCOL={self.security_protocol}"
        if not self.security_protocol.endswith("SSL"):
            for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
                if getattr(self, name) is not None:
                    yield f"{variable(name)} is set, but {protocol} does not encrypt: use SSL"
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            yield "KVLANE_SSL_KEYFILE needs KVLANE_SSL_CERTFILE, the certificate it belongs to"
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
                    yield f"{variable(name)} is set, but {protocol} does not use it: use SASL_SSL"
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
    def taint_names(self) -> tuple[str, ...]:
        """The taints of a worker, one by one."""
        return tuple(name.strip() for name in self.taints.split(",") if name.strip())

    def seal(self) -> Seal:
        """What binds the ids of a gateway's streams to tenants; the same at all gateways.

        Raises SettingsError without a secret for a gateway that other machines reach: the known
        one keeps streams apart that nobody tries to mix up.
        """
        secret = self.stream_secret.get_secret_value()
        if not secret and not _on_loopback(f"{self.http_host}:0"):
            raise SettingsError(
                f"KVLANE_HTTP_HOST={self.http_host} is reached from other machines: set "
                "KVLANE_STREAM_SECRET (or KVLANE_STREAM_SECRET_FILE) to the same random text for "
                "all gateways"
            )
        return Seal((secret or f"kvlane streams of {self.topic_prefix}").encode())

    def connection(self, client_id: str) -> Connection:
        """How a Kafka client with this name reaches the cluster."""
        return Connection(
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

    def key_secret(self) -> KeySecret:
        """The constants of block keys. Raises SettingsError without a secret for remote brokers.

        With the known one, whoever reaches the topics could make prompts whose keys collide.
        """
        from indexer.keys import LOOPBACK_SECRET, derive

        secret = self.hash_secret.get_secret_value().encode()
        if not secret and not _on_loopback(self.bootstrap_servers):
            raise SettingsError(
                f"KVLANE_BOOTSTRAP_SERVERS={self.bootstrap_servers} is not this machine: set "
                "KVLANE_HASH_SECRET (or KVLANE_HASH_SECRET_FILE) to the same random text for all "
                "routers, workers and indexers"
            )
        return derive(secret or LOOPBACK_SECRET)


class SettingRow(NamedTuple):
    """One setting as it is shown to people; a secret's values are masked."""

    name: str  # the environment variable
    default: str
    value: str
    meaning: str  # with its unit
    is_set: bool  # by the environment or the caller, whether or not it equals the default


def settings_table(settings: Settings) -> list[SettingRow]:
    """Every setting in the order of the class, safe to print and to log."""
    return [
        SettingRow(
            name=variable(name),
            default=_unset(name) or _shown(field.default),
            value=_shown(getattr(settings, name)),
            meaning=field.description or "",
            is_set=name in settings.model_fields_set,
        )
        for name, field in Settings.model_fields.items()
    ]


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that no setting reads, each with what was probably meant."""
    known = [variable(name) for name in Settings.model_fields]
    unknown = []
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            unknown.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return unknown


def settings_command() -> None:
    """Show every setting: its variable, value, default and meaning. Secrets are masked.

    Raises SettingsError when the environment holds settings that cannot work.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variable", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("meaning")
    for row in settings_table(Settings()):
        default = f" [dim](default: {escape(row.default) or 'empty'})[/]" if row.is_set else ""
        style = "bold" if row.is_set else ""
        table.add_row(row.name, escape(row.value), escape(row.meaning) + default, style=style)
    console = Console()
    console.print(table)
    for name in unknown_variables(os.environ):
        console.print(f"[yellow]not a setting, ignored:[/] {name}", highlight=False)


def _unset(name: str) -> str:
    """What stands for a default that is made when the process starts."""
    made = {"worker_id": "HOST-PID", "router_id": "HOST-PID", "cache_dir": "~/.cache/kvlane"}
    return made.get(name, "")


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return _MASK if value.get_secret_value() else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    return "" if value is None else str(value)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


def _on_loopback(servers: str) -> bool:
    hosts = [part.strip().rpartition(":")[0].strip("[]") for part in servers.split(",") if part]
    return all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)


def _exceeds(settings: Settings, smaller: str, larger: str) -> str:
    low, high = getattr(settings, smaller), getattr(settings, larger)
    return (
        f"{variable(smaller)}={_shown(low)} exceeds {variable(larger)}={_shown(high)}: "
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
        given = "" if name in _SECRETS else f"={problem['input']}"
        yield f"{variable(name)}{given}: {message} ({field.description})"
