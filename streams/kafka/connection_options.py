"""Connection options of Kafka clients (addresses, TLS, SASL), and the connection of a process.

Settings import it, so it loads aiokafka late.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvlane.streams.ports import Partition

if TYPE_CHECKING:
    from ssl import SSLContext

    from aiokafka import TopicPartition

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Address and credentials of Kafka; files are PEM.

    Example:
        ConnectionOptions("kafka:9093", "my-program", "SASL_SSL", sasl_mechanism="SCRAM-SHA-512",
                          sasl_username="me", sasl_password=password)
    """

    bootstrap_servers: str  # host:port, several separated by commas
    client_id: str  # name of the program in the broker's logs and quotas
    security_protocol: SecurityProtocol = "PLAINTEXT"
    ssl_cafile: Path | None = None  # None: the certificate authorities of the system
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keypassword: str = field(default="", repr=False)
    ssl_check_hostname: bool = True
    sasl_mechanism: SaslMechanism | None = None
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)
    sasl_oauth_token_file: Path | None = None
    request_timeout_ms: int = 4_000  # time a broker has to answer
    session_timeout_ms: int = 6_000  # for consumer groups only, so not among the client options

    @property
    def servers(self) -> list[str]:
        return [server.strip() for server in self.bootstrap_servers.split(",") if server.strip()]

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol in {"SSL", "SASL_SSL"}

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol in {"SASL_PLAINTEXT", "SASL_SSL"}

    def client_options(self) -> dict[str, object]:
        """The keyword arguments that every aiokafka client takes. Raises OSError (ssl.SSLError
        among them) when a certificate file cannot be read or used."""
        options: dict[str, object] = {
            "bootstrap_servers": self.servers,
            "client_id": self.client_id,
            "request_timeout_ms": self.request_timeout_ms,
            "security_protocol": self.security_protocol,
        }
        if self.uses_tls:
            options["ssl_context"] = self._ssl_context()
        if self.uses_sasl:
            options["sasl_mechanism"] = self.sasl_mechanism
            if self.sasl_mechanism == "OAUTHBEARER":
                from kvlane.streams.kafka.token_file import TokenFile

                assert self.sasl_oauth_token_file is not None, "OAUTHBEARER without a token file"
                options["sasl_oauth_token_provider"] = TokenFile(self.sasl_oauth_token_file)
            else:
                options["sasl_plain_username"] = self.sasl_username
                options["sasl_plain_password"] = self.sasl_password
        return options

    def _ssl_context(self) -> SSLContext:
        from aiokafka.helpers import create_ssl_context

        context: SSLContext = create_ssl_context(
            cafile=self.ssl_cafile,
            certfile=self.ssl_certfile,
            keyfile=self.ssl_keyfile,
            # Never None: OpenSSL would ask for the password of an encrypted key on the terminal.
            password=self.ssl_keypassword,
        )
        context.check_hostname = self.ssl_check_hostname
        return context


class KeyFilter:
    """The keys whose records a consumer returns; None: all. Set as its key deserializer."""

    def __init__(self) -> None:
        self.keys: Container[bytes | None] | None = None

    def __call__(self, key: bytes | None) -> bytes | None:
        return key


class KafkaSession(Protocol):
    """The connection of a process, as its readers, members and writers use it: `KafkaLog`."""

    connection: ConnectionOptions
    options: dict[str, Any]
    """Options of every aiokafka client of this connection."""
    prefix: str
    """Of the names of the deployment's topics and groups."""
    request_timeout_s: float

    async def partitions(self, topic: str) -> int: ...

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]: ...

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]: ...

    def full_name(self, partition: Partition) -> TopicPartition: ...

    def forget(self, user: Any) -> None:
        """A reader, member or writer has closed itself."""
