"""Probes of a port, without credentials: whether a broker serves clients, and why none can
connect."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Iterable, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROBE_TIMEOUT_S = 2.0
"""Time limit of a connection attempt, and of an answer."""
MAX_ANSWER_BYTES = 1 << 20

_API_VERSIONS_V0, _METADATA_V1 = (18, 0), (3, 1)
_NO_TOPICS = struct.pack(">i", 0)
_CORRELATION = 7
_TLS_ALERT = b"\x15\x03"

Spoken = Literal["kafka", "kafka with sasl", "http", "tls", "another protocol", "silence"]

_NOT_KAFKA: Mapping[Spoken, str] = {
    "http": "speaks HTTP: KVLANE_BOOTSTRAP_SERVERS must name a port of Kafka, often 9092.",
    "another protocol": "does not speak Kafka's protocol: check its number.",
    "silence": "accepts connections and does not answer: check its number.",
}


class PortAnswer(NamedTuple):
    """The answer of a port: its protocol (`over_tls`: inside TLS), and the advertised addresses."""

    spoken: Spoken
    over_tls: bool = False
    advertised: tuple[tuple[str, int], ...] = ()


class ClusterMetadata(NamedTuple):
    """The cluster as one broker has it: host and port of live brokers, the id of the controller."""

    brokers: tuple[tuple[str, int], ...]
    controller_id: int


def query_metadata(
    host: str, port: int, timeout_s: float = PROBE_TIMEOUT_S
) -> ClusterMetadata | None:
    """Send a Metadata request to a plaintext listener; None without an answer."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(_request(_METADATA_V1, _NO_TOPICS))
            with connection.makefile("rb") as answer:
                (size,) = struct.unpack(">i", answer.read(4))
                return _read_metadata(answer.read(size))
    except (OSError, ValueError, struct.error):
        return None


class ClientSecurity(NamedTuple):
    """The security settings of a client: the context of `tls`, and the use of SASL."""

    tls: ssl.SSLContext | None
    uses_sasl: bool


async def connection_advice(servers: Iterable[str], client: ClientSecurity) -> str:
    """The correction for servers to which a client could not connect; "" if nothing is certain."""
    for server in servers:
        host, port = _address(server)
        try:
            answer = await _ask(host, port)
        except (OSError, TimeoutError):
            continue  # nothing listens there, or not for this machine
        return await _advice(server, host, port, answer, client)
    return ""


async def _advice(
    server: str, host: str, port: int, answer: PortAnswer, client: ClientSecurity
) -> str:
    if foreign := _NOT_KAFKA.get(answer.spoken):
        return f"The port {server} {foreign}"
    if answer.over_tls != (client.tls is not None):
        wanted = "SSL or SASL_SSL" if answer.over_tls else "PLAINTEXT or SASL_PLAINTEXT"
        return (
            f"The port {server} speaks {'TLS' if answer.over_tls else 'Kafka without TLS'}: "
            f"set KVLANE_SECURITY_PROTOCOL to {wanted}."
        )
    if client.tls is not None and (reason := await _distrust(host, port, client.tls)):
        return (
            f"The certificate of {server} is refused: {reason}. Set KVLANE_SSL_CAFILE to the "
            "authority that signed it, and name the host as the certificate does."
        )
    if answer.spoken == "kafka with sasl" and not client.uses_sasl:
        return (
            f"The port {server} speaks Kafka and requires a login: set KVLANE_SECURITY_PROTOCOL to "
            f"SASL_{'SSL' if answer.over_tls else 'PLAINTEXT'}, and KVLANE_SASL_MECHANISM, "
            "KVLANE_SASL_USERNAME and KVLANE_SASL_PASSWORD."
        )
    for broker, broker_port in answer.advertised:
        if not await _listens(broker, broker_port):
            return (
                f"Kafka answers at {server}, but its broker advertises {broker}:{broker_port}, "
                "where no connection is possible from this machine: correct the broker's "
                "advertised.listeners."
            )
    return ""


async def _ask(host: str, port: int) -> PortAnswer:
    """Ask a port without TLS, then with. Raises OSError or TimeoutError if nothing listens."""
    answer = await _ask_over(host, port, None)
    if answer.spoken not in ("silence", "tls"):
        return answer
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        secured = await _ask_over(host, port, context)
    except (OSError, TimeoutError) as e:
        # An alert is one of TLS too: of a server that wants a client's certificate, say.
        is_alert = isinstance(e, ssl.SSLError) and "ALERT" in (e.reason or "")
        return PortAnswer("tls", over_tls=True) if is_alert else answer
    silent = secured.spoken in ("silence", "tls")
    return PortAnswer("tls" if silent else secured.spoken, True, secured.advertised)


async def _ask_over(host: str, port: int, context: ssl.SSLContext | None) -> PortAnswer:
    async with _connected(host, port, context) as (reader, writer):
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                first = await _exchange(reader, writer, _API_VERSIONS_V0, b"")
                if not _is_kafka(first):
                    return PortAnswer(_foreign(first))
                topics = await _exchange(reader, writer, _METADATA_V1, _NO_TOPICS)
        except (TimeoutError, OSError):
            return PortAnswer("silence")
        if not _is_kafka(topics):  # the broker closes a connection without a login
            return PortAnswer("kafka with sasl")
        return PortAnswer("kafka", advertised=_read_metadata(topics[4:]).brokers)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, api: tuple[int, int], body: bytes
) -> bytes:
    """Send a request of Kafka; its response with the length before it, or what came instead."""
    writer.write(_request(api, body))
    await writer.drain()
    start = await reader.read(8)
    while 0 < len(start) < 8 and (more := await reader.read(8 - len(start))):
        start += more
    if not _is_kafka(start):
        return start
    length = struct.unpack(">i", start[:4])[0] - 4
    try:
        return start + await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        return b""


def _is_kafka(answer: bytes) -> bool:
    if len(answer) < 8:
        return False
    length: int
    length, correlation = struct.unpack(">ii", answer[:8])
    return bool(correlation == _CORRELATION) and 4 <= length <= MAX_ANSWER_BYTES


def _foreign(answer: bytes) -> Spoken:
    if not answer:
        return "silence"
    if answer.startswith(_TLS_ALERT):
        return "tls"
    return "http" if answer.startswith(b"HTTP/") else "another protocol"


def _request(api: tuple[int, int], body: bytes) -> bytes:
    """A request with its length; `api`: its number and version."""
    head = struct.pack(">hhih", *api, _CORRELATION, -1)  # without a client id
    return struct.pack(">i", len(head) + len(body)) + head + body


def _read_metadata(body: bytes) -> ClusterMetadata:
    """`body`: of a Metadata response, from its correlation id on."""
    from aiokafka.protocol.metadata import MetadataResponse_v1

    metadata = MetadataResponse_v1.decode(BytesIO(body[4:]))
    addresses = tuple((host, port) for _, host, port, _ in metadata.brokers)
    return ClusterMetadata(addresses, metadata.controller_id)


async def _distrust(host: str, port: int, trust: ssl.SSLContext) -> str:
    """The reason for which a client does not trust a server; "" if it does, or is not asked."""
    try:
        async with _connected(host, port, trust):
            return ""
    except ssl.SSLCertVerificationError as e:
        return e.verify_message
    except (OSError, TimeoutError):
        return ""


async def _listens(host: str, port: int) -> bool:
    try:
        async with _connected(host, port, None):
            return True
    except (OSError, TimeoutError):
        return False


@asynccontextmanager
async def _connected(
    host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    name = host if context is not None else None
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=name
        )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _address(server: str) -> tuple[str, int]:
    """Host and port, as aiokafka splits them: 9092 without a port."""
    from aiokafka.conn import get_ip_port_afi

    host, port, _ = get_ip_port_afi(server)
    return host, port
