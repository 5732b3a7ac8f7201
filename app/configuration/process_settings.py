"""Settings of every process: HTTP ports and access to them, logs, traces and local files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from kvlane.app.configuration.setting_values import (
    UPPER_CASE,
    ReadableFile,
    SettingsError,
    are_on_loopback,
    listed,
)


class HttpSettings(BaseModel):
    http_host: str = Field(
        "127.0.0.1", min_length=1, description="address that every process listens on"
    )
    http_port: int = Field(
        8000, ge=0, le=65535, description="port of the gateway; 0: any free port"
    )
    status_port: int | None = Field(
        0,
        ge=0,
        le=65535,
        description="port of /livez, /readyz and /metrics of a router, worker, preprocessor or "
        "collector; 0: any free port, which is logged",
    )
    http_max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="largest HTTP request body, in bytes"
    )
    http_max_streams: int = Field(
        2000,
        ge=1,
        description="responses that a gateway streams concurrently before it rejects more; "
        "lowered, with a warning, to what the hard limit of open files allows",
    )
    http_keep_alive_s: float = Field(
        75,
        ge=1,
        le=86_400,
        description="how long an idle HTTP connection stays open, in seconds; longer than clients "
        "and proxies keep theirs, so that these close it",
    )
    http_allowed_origins: str = Field(
        "",
        description="origins of web pages that may call the gateway (CORS), https://name[:port], "
        "separated by commas; * allows any; empty: same origin only",
    )
    gateway_count: int = Field(1, ge=1, le=1024, description="gateways that share the lanes")
    gateway_index: int = Field(
        0, ge=0, description="index of this gateway, from 0: it reads its share of the lanes only"
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
    console: bool = Field(
        False,
        description="whether the gateway has the operators' page /console, which shows the traffic "
        "of all tenants; its data need a key of the role operator, and it is not served without "
        "keys where other machines reach the gateway",
    )
    http_tls_cert: ReadableFile | None = Field(
        None, description="PEM file with the certificate chain of the HTTP ports; empty: no TLS"
    )
    http_tls_key: ReadableFile | None = Field(
        None, description="PEM file with the unencrypted private key of KVLANE_HTTP_TLS_CERT"
    )

    @field_validator("http_allowed_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in listed(value):
            if origin != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", origin):
                raise ValueError(
                    "give origins, https://name or http://name:port, without a path, separated by "
                    "commas"
                )
        return value

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return listed(self.http_allowed_origins)

    @property
    def is_on_loopback(self) -> bool:
        """Whether the HTTP ports can be reached from this machine only."""
        return are_on_loopback(f"{self.http_host}:0")

    def require_authentication(self) -> None:
        """Raises SettingsError for HTTP ports that other machines may use without a key."""
        if not (self.is_on_loopback or self.api_keys_file or self.http_allow_anonymous):
            raise SettingsError(
                f"KVLANE_HTTP_HOST={self.http_host} is reached from other machines, without API "
                "keys: set KVLANE_API_KEYS_FILE (`kvlane keys create` makes one), or "
                "KVLANE_HTTP_ALLOW_ANONYMOUS=true where something in front authenticates"
            )


def http_conflicts(settings: HttpSettings) -> Iterator[str]:
    if settings.gateway_index >= settings.gateway_count:
        yield (
            f"KVLANE_GATEWAY_INDEX={settings.gateway_index} counts from 0 and must be below "
            f"KVLANE_GATEWAY_COUNT={settings.gateway_count}"
        )
    if (settings.http_tls_cert is None) != (settings.http_tls_key is None):
        yield "KVLANE_HTTP_TLS_CERT and KVLANE_HTTP_TLS_KEY belong together: set both, or none"


class ProcessSettings(BaseModel):
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], UPPER_CASE] = Field(
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
    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "kvlane",
        description="directory for downloaded files: broker archives, tokenizers",
    )
    kernel_cache_dir: Path | None = Field(
        None,
        description="directory of the compiled index kernels; empty: in the virtual environment, "
        "else ~/.cache/kvlane/kernels",
    )
