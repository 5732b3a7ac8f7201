"""Tests of the settings."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from kvlane.app.commands.settings_table import print_settings, settings_rows
from kvlane.app.settings import (
    AREAS,
    Settings,
    SettingsError,
    settings_for_writing,
    unknown_variables,
)
from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.token_file import TokenFile
from kvlane.streams.topics import ASSIGNMENTS, BATCH, KV_EVENTS, PROMPTS, TOPICS_BY_NAME

MECHANISMS_WITH_PASSWORD = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVLANE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def sasl(mechanism: str, **values: object) -> dict[str, object]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_username": "alice",
        "sasl_password": SECRET,
        **values,
    }


# Areas


def test_each_setting_belongs_to_one_area_and_is_shown_with_it() -> None:
    by_area = [name for area in AREAS.values() for name in area.model_fields]
    assert by_area == list(Settings.model_fields)


@pytest.mark.parametrize("name", ["log_level", "security_protocol", "sasl_mechanism"])
def test_choice_in_capitals_is_accepted_in_small_letters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"log_level": "warning", **sasl("scram-sha-256", security_protocol="sasl_ssl")}
    for field, value in values.items():
        monkeypatch.setenv(f"KVLANE_{field.upper()}", str(value))
    assert getattr(Settings(), name) == str(values[name]).upper()


# Reading


def test_defaults_work_without_an_environment() -> None:
    settings = Settings()
    assert (settings.lanes, settings.topic_prefix, settings.broker) == (8, "kvlane.", "auto")


def test_variables_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_LANES", "16")
    monkeypatch.setenv("KVLANE_LOG_JSON", "true")
    monkeypatch.setenv("KVLANE_LOG_LEVEL", "debug")
    settings = Settings()
    assert (settings.lanes, settings.log_json, settings.log_level) == (16, True, "DEBUG")


def test_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_LANES", "")
    monkeypatch.setenv("KVLANE_WORKER_ID", "")
    settings = Settings()
    assert settings.lanes == 8
    assert settings.worker_id.endswith(f"-{os.getpid()}")


def test_partitions_of_prompts_and_workers_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (PROMPTS, BATCH, ASSIGNMENTS, KV_EVENTS)
    assert Settings().partitions == {name: TOPICS_BY_NAME[name].partitions for name in names}
    for number, name in enumerate(names, 3):
        variable = f"KVLANE_{name.upper().replace('-', '_')}_PARTITIONS"
        monkeypatch.setenv(variable, str(number))
    assert Settings().partitions == {PROMPTS: 3, BATCH: 4, ASSIGNMENTS: 5, KV_EVENTS: 6}


def test_retention_of_batch_prompts_is_a_setting() -> None:
    options = Settings(batch_retention_s=30 * 86_400).topic_options()
    assert options["retention_ms"][BATCH] == 30 * 86_400_000


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().lanes = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", ["sasl_password", "ssl_keypassword", "hash_secret", "stream_secret"]
)
def test_secret_is_read_from_its_file(
    name: str, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLANE_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("KVLANE_SASL_MECHANISM", "PLAIN")
    monkeypatch.setenv("KVLANE_SASL_USERNAME", "alice")
    if name != "sasl_password":
        monkeypatch.setenv("KVLANE_SASL_PASSWORD", "another")
    monkeypatch.setenv(f"KVLANE_{name.upper()}_FILE", str(secret_file))
    assert getattr(Settings(), name).get_secret_value() == SECRET


def test_processes_with_one_hash_secret_agree_on_keys(secret_file: Path) -> None:
    got = Settings(bootstrap_servers="kafka:9092", hash_secret=SECRET).block_key_secret()
    assert got == Settings(hash_secret_file=secret_file).block_key_secret()
    assert got.fingerprint != Settings(hash_secret="another").block_key_secret().fingerprint


@pytest.mark.parametrize("servers", ["", "localhost:9092", "127.0.0.1:9092, [::1]:9093"])
def test_brokers_on_this_machine_need_no_hash_secret(servers: str) -> None:
    assert Settings(bootstrap_servers=servers).block_key_secret() == derive_secret(LOOPBACK_SECRET)


def test_brokers_elsewhere_need_a_hash_secret() -> None:
    settings = Settings(bootstrap_servers="localhost:9092,kafka:9092")
    with pytest.raises(SettingsError, match="KVLANE_HASH_SECRET_FILE"):
        settings.block_key_secret()


# Refusing


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lanes", "many", "valid integer"),
        ("lanes", "0", "greater than or equal to 1"),
        ("deadline_s", "nan", "finite"),
        ("broker", "vm", "'docker'"),
        ("topic_prefix", "a/b", "pattern"),
        ("bootstrap_servers", "kafka://host:9092", "host:port"),
        ("bootstrap_servers", "host", "host:port"),
        ("bootstrap_servers", "host:9092,,other:9092", "host:port"),
        ("ssl_cafile", "/nowhere/ca.pem", "no such file"),
        ("sasl_password_file", "/nowhere/password", "no such file"),
        ("attach_url", "127.0.0.1:8001", "http://host:port"),
        ("attach_url", "http://127.0.0.1:8001/v1/completions", "without a path"),
        ("attach_events_endpoint", "tcp://*:5557", "tcp://127.0.0.1:5557 is meant"),
        ("attach_replay_endpoint", "127.0.0.1:5558", "tcp://host:port"),
        ("attach_kind", "image", "'completion'"),
        ("worker_role", "reader", "'decode'"),
    ],
)
def test_refusal_names_variable_value_and_remedy(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"KVLANE_{name.upper()}", value)
    with pytest.raises(SettingsError) as refusal:
        Settings()
    assert f"KVLANE_{name.upper()}={value}: " in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"deadline_s": 700}, "KVLANE_DEADLINE_S=700 exceeds KVLANE_MAX_LIFETIME_S=600"),
        ({"max_lifetime_s": 1500}, "KVLANE_MAX_LIFETIME_S=1500 exceeds KVLANE_DEDUP_WINDOW_S=1200"),
        (
            {"batch_retention_s": 86_400},
            "KVLANE_BATCH_MAX_LIFETIME_S=604800 exceeds KVLANE_BATCH_RETENTION_S=86400",
        ),
        ({"max_lifetime_s": 1800, "dedup_window_s": 1800}, "it must be below 1800"),
        ({"dedup_window_s": 172_801}, "should be less than or equal to 172800"),
        ({"heartbeat_interval_s": 3}, "raise it to 6, or lower KVLANE_HEARTBEAT_INTERVAL_S"),
        (
            {"min_insync_replicas": 2, "replication_factor": 1},
            "KVLANE_MIN_INSYNC_REPLICAS=2 exceeds KVLANE_REPLICATION_FACTOR=1",
        ),
        ({"broker": "env"}, "needs KVLANE_BOOTSTRAP_SERVERS"),
        ({"security_protocol": "SASL_SSL"}, "needs KVLANE_SASL_MECHANISM"),
        (sasl("PLAIN", sasl_username=""), "needs KVLANE_SASL_USERNAME"),
        (sasl("PLAIN", sasl_password=""), "KVLANE_SASL_PASSWORD_FILE"),
        (sasl("OAUTHBEARER"), "needs KVLANE_SASL_OAUTH_TOKEN_FILE"),
        ({"sasl_username": "alice"}, "KVLANE_SASL_USERNAME is set, but"),
        ({"sasl_password": SECRET}, "KVLANE_SASL_PASSWORD is set, but"),
        ({"ssl_cafile": __file__}, "KVLANE_SSL_CAFILE is set, but"),
        (
            {"security_protocol": "SSL", "ssl_keyfile": __file__},
            "KVLANE_SSL_KEYFILE needs KVLANE_SSL_CERTFILE",
        ),
        ({"engine": "attached", "model_path": "."}, "needs KVLANE_ATTACH_URL=http://host:port"),
        ({"engine": "attached", "attach_url": "http://h:1"}, "needs KVLANE_MODEL_PATH"),
        ({"engine": "vllm", "max_loras": 2}, "which loads no adapter on demand"),
        (
            {"engine": "attached", "attach_replay_endpoint": "tcp://h:1"},
            "KVLANE_ATTACH_REPLAY_ENDPOINT repairs losses of KVLANE_ATTACH_EVENTS_ENDPOINT",
        ),
        (
            {"engine": "attached", "attach_kind": "chat", "attach_events_endpoint": "tcp://h:1"},
            "KVLANE_ATTACH_EVENTS_ENDPOINT has no effect with KVLANE_ATTACH_KIND=chat",
        ),
        ({"sasl_password": SECRET, "sasl_password_file": __file__}, "not both"),
        ({"lane": 8}, "lane is not a setting"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    values: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings(**values)
    assert words in str(refusal.value)


ATTACHED = {"engine": "attached", "attach_url": "http://h:1", "model_path": "."}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (ATTACHED, "needs KVLANE_ATTACH_TRANSFER_LEASE_S"),
        (ATTACHED | {"attach_kind": "chat"}, "needs KVLANE_ATTACH_KIND=tokens"),
        ({"engine": "vllm"}, "needs a kv_transfer_config in KVLANE_ENGINE_ARGS"),
        ({"engine": "echo"}, "hands no prompt over"),
    ],
)
def test_role_that_an_engine_cannot_take_is_refused_from_the_settings_alone(
    role: str, values: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=f"KVLANE_WORKER_ROLE={role}.*{words}"):
        Settings(worker_role=role, **values)


def test_roles_with_engines_that_hand_prompts_over_are_accepted() -> None:
    transfers = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    for values in (
        ATTACHED | {"attach_transfer_lease_s": 20},
        {"engine": "vllm", "engine_args": transfers},
        {"engine": "simulated"},
    ):
        assert Settings(worker_role="decode", **values).worker_role == "decode"


def test_attached_chat_server_needs_no_model_folder() -> None:
    where = {"engine": "attached", "attach_url": "http://h:1"}
    assert Settings(attach_kind="chat", **where).model_path is None


def test_attach_url_may_end_in_v1() -> None:
    assert Settings(attach_url="http://h:8001/v1/").attach_url == "http://h:8001"


def test_error_lists_all_conflicts() -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings(deadline_s=700, min_insync_replicas=2, replication_factor=1)
    assert len(str(refusal.value).splitlines()) == 2


def test_refusal_never_shows_a_secret() -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings(sasl_password=[SECRET], lanes="many")
    assert "KVLANE_SASL_PASSWORD: " in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_binary_secret_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="KVLANE_SASL_PASSWORD_FILE cannot be read as text"):
        Settings(**sasl("PLAIN", sasl_password="", sasl_password_file=path))


# Showing


def test_table_masks_secrets_and_keeps_the_rest() -> None:
    table = {row.name: row for row in settings_rows(Settings(**sasl("PLAIN")))}
    assert table["KVLANE_SASL_PASSWORD"].value == "********"
    assert table["KVLANE_SSL_KEYPASSWORD"].value == ""
    assert table["KVLANE_SASL_USERNAME"].value == "alice"


def test_secrets_among_the_arguments_of_an_engine_are_masked() -> None:
    arguments = {
        "hf_token": SECRET,
        "tokenizer": "a/b",
        "max_num_batched_tokens": 8,
        "kv_transfer_config": {"connectors": [{"apiKey": "x", "auth-key": SECRET}]},
        "secret": [SECRET],
    }
    table = {row.name: row.value for row in settings_rows(Settings(engine_args=arguments))}
    shown = table["KVLANE_ENGINE_ARGS"]
    assert SECRET not in shown
    assert "'hf_token': '********', 'tokenizer': 'a/b', 'max_num_batched_tokens': 8" in shown
    with pytest.raises(SettingsError) as refusal:
        Settings(engine_args=[SECRET])
    assert SECRET not in str(refusal.value)


def test_table_marks_settings_that_were_set() -> None:
    row = next(row for row in settings_rows(Settings(lanes=16)) if row.name == "KVLANE_LANES")
    assert (row.default, row.value, row.is_set) == ("8", "16", True)


def test_every_setting_has_a_description_with_its_unit() -> None:
    units = {"_s": "seconds", "_ms": "milliseconds"}
    for row in settings_rows(Settings()):
        assert row.description
        for suffix, unit in units.items():
            if row.name.lower().endswith(suffix):
                assert unit in row.description, row.name


def test_command_prints_every_variable_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in sasl("PLAIN").items():
        monkeypatch.setenv(f"KVLANE_{name.upper()}", str(value))
    monkeypatch.setenv("KVLANE_LANSE", "8")
    print_settings(settings_rows(Settings()))
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in settings_rows(Settings()))
    assert "KVLANE_LANSE (did you mean KVLANE_LANES?)" in printed
    assert SECRET not in printed


def test_unknown_variables_are_found_and_others_left_alone() -> None:
    environ = {"KVLANE_LANES": "8", "KVLANE_QQQQQQ": "1", "PATH": "/bin"}
    assert unknown_variables(environ) == ["KVLANE_QQQQQQ"]


def test_misspelt_variable_is_refused_by_what_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_REPLICATION", "3")  # the name in an older version
    monkeypatch.setenv("KVLANE_TEST_ANYTHING", "1")
    words = r"KVLANE_REPLICATION \(did you mean KVLANE_REPLICATION_FACTOR\?\) is not a setting"
    with pytest.raises(SettingsError, match=words):
        settings_for_writing()
    monkeypatch.delenv("KVLANE_REPLICATION")
    assert settings_for_writing().replication_factor is None


@pytest.mark.parametrize("show", [repr, str])
def test_secrets_are_in_no_representation(show: type[str]) -> None:
    settings = Settings(**sasl("PLAIN"))
    for value in (settings, settings.kafka_connection("router")):
        assert SECRET not in show(value)
    assert SECRET not in json.dumps(settings.model_dump(mode="json"))


# Reaching Kafka


def test_connection_carries_the_settings_and_the_name_of_the_client() -> None:
    connection = Settings(bootstrap_servers="a:1, b:2").kafka_connection("router")
    assert connection.client_id == "router"
    assert connection.servers == ["a:1", "b:2"]
    assert connection.session_timeout_ms == 6000


def test_plaintext_options_hold_no_security() -> None:
    options = Settings(bootstrap_servers="a:1").kafka_connection("router").client_options()
    assert options == {
        "bootstrap_servers": ["a:1"],
        "client_id": "router",
        "request_timeout_ms": 4000,
        "security_protocol": "PLAINTEXT",
    }


@pytest.mark.parametrize("mechanism", MECHANISMS_WITH_PASSWORD)
def test_password_mechanisms_reach_the_client(mechanism: str) -> None:
    connection = Settings(**sasl(mechanism)).kafka_connection("router")
    options = connection.client_options()
    assert options["security_protocol"] == "SASL_PLAINTEXT"
    assert options["sasl_mechanism"] == mechanism
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("alice", SECRET)


async def test_oauth_token_is_read_afresh(secret_file: Path) -> None:
    settings = Settings(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_file=secret_file,
    )
    options = settings.kafka_connection("router").client_options()
    provider = options["sasl_oauth_token_provider"]
    assert isinstance(provider, TokenFile)
    assert await provider.token() == SECRET
    secret_file.write_text("rotated")
    assert await provider.token() == "rotated"


def test_tls_verifies_the_broker_by_default() -> None:
    strict = ConnectionOptions("a:1", "router", security_protocol="SSL").client_options()[
        "ssl_context"
    ]
    assert isinstance(strict, ssl.SSLContext)
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    lax = ConnectionOptions("a:1", "router", security_protocol="SSL", ssl_check_hostname=False)
    context = lax.client_options()["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_encrypted_client_key_opens_with_its_password_without_a_prompt(tmp_path: Path) -> None:
    certificate, key = tmp_path / "client.pem", tmp_path / "client.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=client", "-days", "1",
         "-passout", f"pass:{SECRET}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    mutual = {
        "security_protocol": "SSL",
        "ssl_cafile": certificate,
        "ssl_certfile": certificate,
        "ssl_keyfile": key,
    }
    opened = Settings(**mutual, ssl_keypassword=SECRET).kafka_connection("router").client_options()
    assert isinstance(opened["ssl_context"], ssl.SSLContext)
    with pytest.raises(ssl.SSLError):
        Settings(**mutual).kafka_connection("router").client_options()


@pytest.mark.parametrize("mechanism", [None, *MECHANISMS_WITH_PASSWORD, "OAUTHBEARER"])
async def test_every_client_takes_the_options(mechanism: str | None, secret_file: Path) -> None:
    values: dict[str, object] = {"security_protocol": "SSL"}
    if mechanism == "OAUTHBEARER":
        values = {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": mechanism,
            "sasl_oauth_token_file": secret_file,
        }
    elif mechanism:
        values = sasl(mechanism, security_protocol="SASL_SSL")
    connection = Settings(bootstrap_servers="127.0.0.1:9", **values).kafka_connection("router")
    options = connection.client_options()
    producer = AIOKafkaProducer(**options)
    consumer = AIOKafkaConsumer(**options, session_timeout_ms=connection.session_timeout_ms)
    admin = AIOKafkaAdminClient(**options)
    await asyncio.gather(producer.stop(), consumer.stop(), admin.close())
