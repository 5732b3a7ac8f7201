"""Settings of the connection to Kafka, and of the topics of a deployment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from kvlane.app.configuration.setting_values import (
    UPPER_CASE,
    ReadableFile,
    SettingsError,
    exceeds,
    variable_name,
)
from kvlane.streams.kafka.connection_options import (
    ConnectionOptions,
    SaslMechanism,
    SecurityProtocol,
)
from kvlane.streams.topics import (
    ASSIGNMENTS,
    DEFAULT_LANES,
    KV_EVENTS,
    PROMPTS,
    RESULTS,
    TOPICS_BY_NAME,
    USAGE,
)


class KafkaSettings(BaseModel):
    bootstrap_servers: str = Field(
        "", description="Kafka brokers, host:port[,host:port]; empty: none"
    )
    broker: Literal["auto", "env", "docker", "jvm", "memory"] = Field(
        "auto",
        description="source of the broker for `kvlane demo`, `kvlane up` and tests: env uses "
        "KVLANE_BOOTSTRAP_SERVERS; docker and jvm start one; memory is an in-process broker, not "
        "for `kvlane up`; auto uses KVLANE_BOOTSTRAP_SERVERS if set, else the first of docker, jvm "
        "and memory that starts",
    )
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
    security_protocol: Annotated[SecurityProtocol, UPPER_CASE] = Field(
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
        None,
        description="PEM file of the private key of KVLANE_SSL_CERTFILE, such as "
        "/etc/kvlane/kafka-user/user.key; for HTTP see KVLANE_HTTP_TLS_KEY",
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
    sasl_mechanism: Annotated[SaslMechanism | None, UPPER_CASE] = Field(
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

    @field_validator("bootstrap_servers")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        if "://" in value or any(
            not _is_address(part.strip()) for part in value.split(",") if value
        ):
            raise ValueError("give host:port, several separated by commas, without a scheme")
        return value

    def require_bootstrap_servers(self) -> None:
        """Raises SettingsError when no Kafka is named."""
        if not self.bootstrap_servers:
            raise SettingsError(
                "KVLANE_BOOTSTRAP_SERVERS is not set: name a Kafka as host:port, or start one with "
                "`kvlane up`"
            )

    def kafka_connection(self, client_id: str) -> ConnectionOptions:
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


def kafka_conflicts(settings: KafkaSettings) -> Iterator[str]:
    if settings.broker == "env" and not settings.bootstrap_servers:
        yield "KVLANE_BROKER=env needs KVLANE_BOOTSTRAP_SERVERS=host:port"
    protocol = f"KVLANE_SECURITY_PROTOCOL={settings.security_protocol}"
    if not settings.security_protocol.endswith("SSL"):
        for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
            if getattr(settings, name) is not None:
                yield f"{variable_name(name)} is set, but {protocol} does not encrypt: use SSL"
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        yield "KVLANE_SSL_KEYFILE needs KVLANE_SSL_CERTFILE, the certificate it belongs to"
    yield from _sasl_conflicts(settings, protocol)


def _sasl_conflicts(settings: KafkaSettings, protocol: str) -> Iterator[str]:
    if not settings.security_protocol.startswith("SASL_"):
        for name in ("sasl_mechanism", "sasl_username", "sasl_password", "sasl_oauth_token_file"):
            if getattr(settings, name):  # an empty SecretStr is false
                variable = variable_name(name)
                yield f"{variable} is set, but {protocol} does not use it: use SASL_SSL"
    elif settings.sasl_mechanism is None:
        yield f"{protocol} needs KVLANE_SASL_MECHANISM: PLAIN, SCRAM-SHA-512, ..."
    elif settings.sasl_mechanism == "OAUTHBEARER":
        if settings.sasl_oauth_token_file is None:
            yield "KVLANE_SASL_MECHANISM=OAUTHBEARER needs KVLANE_SASL_OAUTH_TOKEN_FILE"
    elif not (settings.sasl_username and settings.sasl_password.get_secret_value()):
        yield (
            f"KVLANE_SASL_MECHANISM={settings.sasl_mechanism} needs KVLANE_SASL_USERNAME and "
            "KVLANE_SASL_PASSWORD (or KVLANE_SASL_PASSWORD_FILE)"
        )


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


class TopicSettings(BaseModel):
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
        description="partitions of assignments, fixed when `kvlane topics create` makes them; "
        "worker ids are hashed onto them, and workers that share one read each other's records: "
        "take several times the number of workers",
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
    usage_retention_s: float = Field(
        (TOPICS_BY_NAME[USAGE].retention_ms or 0) / 1000,
        ge=2 * 86_400,
        description="time for which the usage of requests is kept, in seconds; longer than ledger",
    )
    replication_factor: int | None = Field(
        None,
        ge=1,
        description="replicas of every partition that `kvlane topics create` makes; empty: 3, or "
        "as many as there are brokers if there are fewer",
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


def topic_conflicts(settings: TopicSettings) -> Iterator[str]:
    factor = settings.replication_factor
    if factor is not None and settings.min_insync_replicas > factor:
        yield exceeds(settings, "min_insync_replicas", "replication_factor")
