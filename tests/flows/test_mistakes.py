"""Tests of errors: the most likely mistakes, each with words that its error must and must not have.

Mistakes that only a real broker shows (TLS, logins, advertised addresses, replication) are in
tests/contracts/test_kafka_rights.py and test_kafka.py, those of processes in test_start_errors.py.
"""

from __future__ import annotations

import re
import socketserver
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.streams.brokers.broker import LOOPBACK

ROOT = Path(__file__).resolve().parents[2]
OUTAGE = "whether Kafka runs"
"""The advice for an outage, which is wrong for every other mistake."""


class Mistake(NamedTuple):
    """A command, its environment, and words that its error must (`says`) and must not have."""

    command: str
    says: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    avoids: tuple[str, ...] = (OUTAGE,)


def kafka_at(servers: str) -> tuple[tuple[str, str], ...]:
    return (("KVLANE_BOOTSTRAP_SERVERS", servers),)


MISTAKES = {
    "no servers": Mistake("topics describe", ("KVLANE_BOOTSTRAP_SERVERS is not set",)),
    "no Kafka": Mistake(
        "topics describe", (f"no Kafka at {LOOPBACK}:1", OUTAGE), kafka_at(f"{LOOPBACK}:1"), ()
    ),
    "unknown host": Mistake(
        "topics describe", ("no Kafka at nothing.invalid:9092", "KVLANE_BOOTSTRAP_SERVERS"),
        kafka_at("nothing.invalid:9092"), (),
    ),
    "port of HTTP": Mistake(
        "topics describe", ("speaks HTTP", "KVLANE_BOOTSTRAP_SERVERS"), kafka_at("{http}")
    ),
    "port of another service": Mistake(
        "topics create", ("does not speak Kafka's protocol",), kafka_at("{ssh}")
    ),
    "invalid value": Mistake(
        "settings", ("KVLANE_LANES=many",), (("KVLANE_LANES", "many"),), (OUTAGE, "Traceback")
    ),
    "login without a name": Mistake(
        "topics describe", ("KVLANE_SASL",),
        (*kafka_at(f"{LOOPBACK}:1"), ("KVLANE_SECURITY_PROTOCOL", "SASL_SSL")),
    ),
    "certificate that is not there": Mistake(
        "topics describe", ("/none/ca.pem",),
        (*kafka_at(f"{LOOPBACK}:1"), ("KVLANE_SECURITY_PROTOCOL", "SSL"),
         ("KVLANE_SSL_CAFILE", "/none/ca.pem")),
    ),
    "no Java": Mistake(
        "up --broker jvm --ephemeral", ("Java", "KVLANE_BOOTSTRAP_SERVERS=host:port"),
        (("PATH", "/none"), ("JAVA_HOME", "")),
    ),
    "no Docker daemon": Mistake(
        "up --broker docker --ephemeral", ("Docker", "KVLANE_BOOTSTRAP_SERVERS=host:port"),
        (("DOCKER_HOST", "unix:///none/docker.sock"),),
    ),
    "given servers that do not answer": Mistake(
        "up", ("none of the given servers answers", "start a broker of their own"),
        kafka_at(f"{LOOPBACK}:1"), (),
    ),
    "no key file": Mistake("keys list", ("set KVLANE_API_KEYS_FILE or give --file",)),
    "key file that is not there": Mistake(
        "keys list --file /none/keys.json", ("no such file", "kvlane keys create --tenant")
    ),
    "role that does not exist": Mistake(
        "keys create --tenant a --role admin --file {folder}/keys.json",
        ("user, operator or metrics",),
    ),
    "batch without a gateway": Mistake(
        "batch list --url http://127.0.0.1:1", ("http://127.0.0.1:1/v1 cannot be reached",)
    ),
    "trace that is not there": Mistake(
        "simulate --trace /none/trace.jsonl", ("/none/trace.jsonl",)
    ),
    "prompt and file at once": Mistake(
        "publish hello --file {folder}/prompts.jsonl", ("give no text and no --id with it",)
    ),
    "empty prompt": Mistake("publish ''", ("give it as an argument or on standard input",)),
    **{
        f"misspelt setting: {command}": Mistake(
            command, ("KVLANE_REPLICATON_FACTOR", "did you mean KVLANE_REPLICATION_FACTOR?"),
            (*kafka_at(f"{LOOPBACK}:1"), ("KVLANE_REPLICATON_FACTOR", "3")),
        )
        for command in (
            "topics create", "topics skip ledger:0:1", "publish hello", "cancel some-id",
            "keys create --tenant a --file {folder}/keys.json",
            "keys revoke some-id --file {folder}/keys.json",
            "keys limit a --requests 1 --file {folder}/keys.json",
            "batch submit {folder}/prompts.jsonl --url http://127.0.0.1:1",
            "batch cancel batch_1 --url http://127.0.0.1:1", "dead-letters retry 0:1",
        )
    },
    "misspelt command": Mistake("topics creat", ("create",)),
    "time that does not exist": Mistake(
        "replay --view load --at yesterdayish", ("yesterdayish",), kafka_at(f"{LOOPBACK}:1")
    ),
}  # fmt: skip


class _Banner(socketserver.BaseRequestHandler):
    """Sends the beginning of its server's protocol to every client."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(self.server.banner)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """The addresses of servers that speak other protocols, by the name of the protocol."""
    addresses, servers = {}, []
    for name, banner in (("http", b"HTTP/1.1 400 \r\n\r\n"), ("ssh", b"SSH-2.0-OpenSSH_9\r\n")):
        server = socketserver.ThreadingTCPServer((LOOPBACK, 0), _Banner)
        server.banner = banner  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        addresses[name] = f"{LOOPBACK}:{server.server_address[1]}"
        servers.append(server)
    yield addresses
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_error_says_what_to_do(
    mistake: Mistake, ports: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVLANE_BOOTSTRAP_SERVERS", "KVLANE_API_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("KVLANE_REQUEST_TIMEOUT_MS", "1000")
    for name, value in mistake.environment:
        monkeypatch.setenv(name, value.format(**ports))
    (tmp_path / "prompts.jsonl").write_text("hello\n")
    arguments = [part.strip("'").format(folder=tmp_path) for part in mistake.command.split()]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2), result.output
    for words in mistake.says:
        assert words in result.output
    for words in (*mistake.avoids, "Traceback"):
        assert words not in result.output


def test_ctrl_c_while_the_commands_load_ends_without_a_traceback() -> None:
    program = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "kvlane.app.commands.topic_commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from kvlane.app.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")


def test_extras_that_are_named_exist_and_are_on_no_package_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [
        file
        for pattern in ("app/**/*.py", "docs/*.md", "deploy/**/*.md", "README.md")
        for file in ROOT.glob(pattern)
    ]
    named = set()
    for file in files:
        text = file.read_text()
        assert "kvlane[" not in text, f"{file}: no package index has kvlane yet"
        named |= set(re.findall(r"install -e '\.\[(\w+)\]'", text))
        named |= set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", text))
    assert named >= {"vllm", "demo", "plot", "traces"}
    assert named <= project["optional-dependencies"].keys()
