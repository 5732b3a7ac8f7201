"""The settings of every process: one table, read from `KVLANE_*` environment variables.

The environment is read when `Settings()` is called and never again; read elsewhere are
KVLANE_CACHE_DIR (`streams/brokers/jvm_artifacts.py`) and KVLANE_KERNEL_CACHE_DIR
(`indexer/kernels.py`). An empty variable counts as not set. Secrets come from the environment or
from files and are masked wherever settings are shown.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import BaseModel, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvlane.app.configuration.kafka_settings import (
    KafkaSettings,
    TopicSettings,
    kafka_conflicts,
    topic_conflicts,
)
from kvlane.app.configuration.process_settings import HttpSettings, ProcessSettings, http_conflicts
from kvlane.app.configuration.request_settings import (
    BatchSettings,
    RequestSettings,
    batch_conflicts,
    request_conflicts,
)
from kvlane.app.configuration.router_settings import ORDERED_SETTINGS, RouterSettings
from kvlane.app.configuration.setting_values import (
    PREFIX,
    SettingsError,
    are_on_loopback,
    exceeds,
    variable_name,
)
from kvlane.app.configuration.worker_settings import (
    EngineSettings,
    WorkerSettings,
    engine_conflicts,
    worker_conflicts,
)
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.streams.ids import TenantTag
from kvlane.streams.topics import ASSIGNMENTS, BATCH, KV_EVENTS, PROMPTS, RESULTS, USAGE

if TYPE_CHECKING:
    from kvlane.indexer.block_hashes import KeySecret

__all__ = [
    "AREAS",
    "Settings",
    "SettingsError",
    "ordered_values",
    "settings_for_writing",
    "settings_with_order",
    "unknown_variables",
    "variable_name",
]

AREAS: dict[str, type[BaseModel]] = {
    "Kafka": KafkaSettings,
    "Topics": TopicSettings,
    "Requests and results": RequestSettings,
    "Batches": BatchSettings,
    "Worker": WorkerSettings,
    "Engine and model": EngineSettings,
    "Router and indexer": RouterSettings,
    "HTTP, gateway and access": HttpSettings,
    "Logs, traces and local files": ProcessSettings,
}


class TopicOptions(TypedDict):
    """Arguments that create the topics of a deployment, or compare them with the broker's."""

    lanes: int
    replication: int | None
    min_insync: int
    partitions: dict[str, int]
    retention_ms: dict[str, int]


class Settings(  # pydantic takes the fields of the last base first
    ProcessSettings,
    HttpSettings,
    RouterSettings,
    EngineSettings,
    WorkerSettings,
    BatchSettings,
    RequestSettings,
    TopicSettings,
    KafkaSettings,
    BaseSettings,
):
    """Immutable settings. Raises SettingsError when a value, or two together, cannot work."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, allow_inf_nan=False
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
        for name in _secrets():
            path = values.get(f"{name}_file")
            if path is None or not Path(path).is_file():
                continue  # the check of the field reports the error
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

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        checks = (
            request_conflicts(self),
            batch_conflicts(self),
            worker_conflicts(self),
            engine_conflicts(self),
            _role_conflicts(self),
            topic_conflicts(self),
            http_conflicts(self),
            kafka_conflicts(self),
        )
        problems = [problem for check in checks for problem in check]
        if self.gateway_count > self.lanes:
            problems.append(exceeds(self, "gateway_count", "lanes"))
        if problems:
            raise ValueError("\n".join(problems))
        return self

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
        return TopicOptions(
            lanes=self.lanes,
            replication=self.replication_factor,
            min_insync=self.min_insync_replicas,
            partitions=self.partitions,
            retention_ms={
                BATCH: int(self.batch_retention_s * 1000),
                RESULTS: int(self.results_retention_s * 1000),
                USAGE: int(self.usage_retention_s * 1000),
            },
        )

    def tenant_tag(self) -> TenantTag:
        """The secret that binds the ids of streams to tenants; the same at all gateways. Raises
        SettingsError without one for a gateway that other machines reach, or that has API keys."""
        secret = self.stream_secret.get_secret_value()
        if not secret and self.api_keys_file is not None:
            raise SettingsError(
                "KVLANE_API_KEYS_FILE needs KVLANE_STREAM_SECRET (or KVLANE_STREAM_SECRET_FILE), "
                "the same random text for all gateways: it keeps the streams and cached blocks of "
                "tenants apart"
            )
        if not secret and not are_on_loopback(f"{self.http_host}:0"):
            raise SettingsError(
                f"KVLANE_HTTP_HOST={self.http_host} is reached from other machines: set "
                "KVLANE_STREAM_SECRET (or KVLANE_STREAM_SECRET_FILE) to the same random text for "
                "all gateways"
            )
        return TenantTag((secret or f"kvlane streams of {self.topic_prefix}").encode())

    def block_key_secret(self) -> KeySecret:
        """The constants of block keys. Raises SettingsError without a secret for remote brokers.
        With the default one, a program with access to the topics could make colliding keys."""
        from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret

        secret = self.hash_secret.get_secret_value().encode()
        if not secret and not are_on_loopback(self.bootstrap_servers):
            raise SettingsError(
                f"KVLANE_BOOTSTRAP_SERVERS={self.bootstrap_servers} is not this machine: set "
                "KVLANE_HASH_SECRET (or KVLANE_HASH_SECRET_FILE) to the same random text for all "
                "routers, workers and indexers"
            )
        return derive_secret(secret or LOOPBACK_SECRET)


def _role_conflicts(settings: Settings) -> Iterator[str]:
    """A role that the chosen engine cannot take, as far as settings show it."""
    role, engine = settings.worker_role, settings.engine
    if role == "aggregated":
        return
    refused = f"KVLANE_WORKER_ROLE={role} with KVLANE_ENGINE={engine}"
    if engine == "echo":
        yield f"{refused}: this engine hands no prompt over: use simulated, vllm or attached"
    elif engine == "vllm" and not settings.engine_args.get("kv_transfer_config"):
        yield f"{refused} needs a kv_transfer_config in KVLANE_ENGINE_ARGS: set it"
    elif engine == "attached" and settings.attach_kind != "tokens":
        yield f"{refused} needs KVLANE_ATTACH_KIND=tokens: other requests are not handed over"
    elif engine == "attached" and settings.attach_transfer_lease_s is None:
        yield f"{refused} needs KVLANE_ATTACH_TRANSFER_LEASE_S, the lease of its server: set it"


_OF_TESTS = "TEST_"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with the prefix KVLANE_ that no setting reads, each with a similar name."""
    known = [variable_name(name).removeprefix(PREFIX) for name in Settings.model_fields]
    unknown = []
    for name in sorted(environ):
        own = name.upper().removeprefix(PREFIX)
        if own.startswith(_OF_TESTS):
            continue
        if name.upper().startswith(PREFIX) and own not in known:
            close = difflib.get_close_matches(own, known, n=1)
            unknown.append(f"{name} (did you mean {PREFIX}{close[0]}?)" if close else name)
    return unknown


def settings_for_writing() -> Settings:
    """The settings of a command that writes. Raises SettingsError for variables that no setting
    reads: a misspelt one would leave a default in what is written, perhaps for good."""
    if unknown := unknown_variables(os.environ):
        names = "\n".join(f"{name} is not a setting: correct or unset it" for name in unknown)
        raise SettingsError(names)
    return Settings()


def settings_with_order(settings: Settings, ordered: Mapping[str, Any]) -> Settings:
    """The settings of a router with those of an order about routing. Raises SettingsError."""
    for name in ordered:
        if name not in ORDERED_SETTINGS:
            close = difflib.get_close_matches(name, ORDERED_SETTINGS, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            if name in Settings.model_fields:
                hint = f": set {variable_name(name)}, and restart the processes"
            raise SettingsError(f"{name!r} is no setting that changes while routers run{hint}")
    own = {name: getattr(settings, name) for name in RouterSettings.model_fields}
    try:
        checked = RouterSettings.model_validate(own | dict(ordered))
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error))) from None
    return settings.model_copy(update={name: getattr(checked, name) for name in ordered})


def ordered_values(settings: Settings) -> dict[str, Any]:
    """The settings that an order may replace, as JSON values."""
    values = {name: getattr(settings, name) for name in ORDERED_SETTINGS}
    values["queue_classes"] = {
        name: {
            field: value
            for field, value in share._asdict().items()
            if value != ClassConfig._field_defaults[field]
        }
        for name, share in sorted(settings.queue_classes.items())
    }
    return values


def _secrets() -> list[str]:
    fields = Settings.model_fields.items()
    return [name for name, field in fields if field.annotation is SecretStr]


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
        given = "" if name in (*_secrets(), "engine_args") else f"={problem['input']}"
        inner = "".join(f"{step}: " for step in problem["loc"][1:])
        yield f"{variable_name(name)}{given}: {inner}{message} ({field.description})"
