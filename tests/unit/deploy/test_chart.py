"""Tests of the Helm chart: its generated parts are current, and what it renders is valid and
starts kvlane.

The manifests in deploy/k8s are the rendered chart. `make chart` renews them and needs helm; these
tests do not.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import math
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as kubernetes_schemas

from kvlane.app.gateway import REDIRECT_TIMEOUT_S
from kvlane.app.settings import Settings, unknown_variables, variable_name
from kvlane.app.worker import DRAIN_NOTICE_HEARTBEATS, SHUTDOWN_STEP_S
from kvlane.streams.topics import PER_LANE, TOPICS_BY_NAME, required_acls

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "chart"
RENDERED = sorted((ROOT / "deploy" / "k8s").glob("*.yaml"))
VALUES = {path.stem: path for path in (CHART / "values").glob("*.yaml")}
SCHEMAS = Path(__file__).parents[2] / "recordings" / "crd_schemas"
KUBERNETES = "1.34"
HELM = shutil.which("helm") or shutil.which("helm", path=Path.home() / ".cache/kvlane/tools")
MOUNTED_KEYS = {
    "kafka-ca": ["ca.crt"],
    "kafka-user": ["password"],
    "http-tls": ["tls.crt", "tls.key"],
}
"""Files of the Secrets that are mounted whole or by one name."""

each_file = pytest.mark.parametrize("rendered", RENDERED, ids=lambda path: path.stem)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("chart_generator", CHART / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def read(rendered: Path) -> list[dict[str, Any]]:
    return [part for part in yaml.load_all(rendered.read_text(), yaml.CSafeLoader) if part]


class Process(NamedTuple):
    """A container of kvlane in a rendered file, with its pod."""

    name: str
    """Of the Deployment, StatefulSet or Job."""
    container: dict[str, Any]
    pod: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """The literal variables."""
        return {each["name"]: each["value"] for each in self.container["env"] if "value" in each}

    def settings(self, monkeypatch: pytest.MonkeyPatch, files: Path) -> Settings:
        """The settings that the process reads, its mounted files in a folder of this machine."""
        environment = self.environment
        for name in [variable_name(field) for field in Settings.model_fields]:
            monkeypatch.delenv(name, raising=False)
        for mount in self.container["volumeMounts"]:
            for key in self._keys(mount["name"]):
                path = files / mount["mountPath"].lstrip("/") / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("secret")
        for name, value in environment.items():
            monkeypatch.setenv(name, re.sub(r"^/(etc/kvlane/)", rf"{files}/\1", value))
        assert unknown_variables(environment) == []
        return Settings()

    def _keys(self, volume: str) -> list[str]:
        source = next(each for each in self.pod["volumes"] if each["name"] == volume)
        items = source.get("secret", {}).get("items")
        return [item["path"] for item in items] if items else MOUNTED_KEYS.get(volume, [])


def pods(parts: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in parts:
        if (template := pod_template(part)) is not None:
            yield part["metadata"]["name"], template["spec"]


def pod_template(part: dict[str, Any]) -> dict[str, Any] | None:
    if part["kind"] == "LeaderWorkerSet":
        template: dict[str, Any] = part["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        return template
    has_pods = part["kind"] in ("Deployment", "StatefulSet", "Job")
    return part["spec"]["template"] if has_pods else None


def processes(rendered: Path) -> dict[str, Process]:
    """The processes of kvlane by name, without the containers that run beside them."""
    return {name: Process(name, pod["containers"][0], pod) for name, pod in pods(read(rendered))}


# --- what is generated is current -----------------------------------------------------------------


def test_tables_and_schema_of_the_chart_are_current() -> None:
    """Renew them with `make chart`."""
    for path, content in generator().GENERATED.items():
        assert (CHART / path).read_text() == content(), path


def test_rendered_manifests_are_those_of_this_chart() -> None:
    """Renew them with `make chart`."""
    assert (ROOT / "deploy" / "k8s" / "chart.sha256").read_text().strip() == generator().digest()
    assert {path.stem for path in RENDERED} == {"default", *VALUES}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"polcy": "random"}}, "polcy"),
        ({"workers": {"a": {"settings": {"engin": "vllm"}}}}, "engin"),
        ({"processes": {"router": {"settings": {"lane": 4}}}}, "lane"),
        ({"kafka": {"bootstrapServer": "kafka:9092"}}, "bootstrapServer"),
        ({"replicas": 3}, "replicas"),
        ({"processes": {"ruter": {}}}, "ruter"),
        ({"processes": {"router": {"nodeselector": {"gpu": "h100"}}}}, "nodeselector"),
        ({"processes": {"router": {"autoscaling": {"cpu": 70}}}}, "cpu"),
        ({"processes": {"router": {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}}}}, "min"),
        ({"workers": {"simulated": {"replica": 9}}}, "replica"),
        ({"workers": {"simulated": {"replicas": "two"}}}, "two"),
        ({"workers": {"simulated": {"nodes": 2}}}, "follower"),
        ({"workers": {"Llama_70B": {}}}, "Llama_70B"),
        ({"settings": {"lanes": "eight"}}, "eight"),
        ({"settings": {"lanes": 0}}, "minimum"),
        ({"settings": {"policy": "fastest"}}, "fastest"),
        ({"settings": {"hash_secret": "a"}}, "hash_secret"),
        ({"workers": {"a": {"settings": {"engine": "vlm"}}}}, "vlm"),
        ({"networkPolicy": {"enabled": "no"}}, "no"),
    ],
)
def test_misspelt_value_is_refused(values: dict[str, Any], named: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match=named):
        jsonschema.validate(values, schema)


@pytest.mark.parametrize("path", [CHART / "values.yaml", *VALUES.values()], ids=lambda p: p.stem)
def test_values_of_the_chart_fit_their_schema(path: Path) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


# --- what is rendered is valid --------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _read_schemas_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(kubernetes_schemas.schema_contents)
        patch.setattr(kubernetes_schemas, "schema_contents", cached)
        yield


def strict(schema: Any) -> Any:
    """The schema without further properties: an API server would drop them silently."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    closed = "properties" in schema and schema.get("type") == "object"
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def check(part: dict[str, Any]) -> None:
    """Raises an error for a resource that its schema does not allow."""
    if part["kind"] == "LeaderWorkerSet":
        for template in ("leaderTemplate", "workerTemplate"):
            pod = part["spec"]["leaderWorkerTemplate"][template]
            check({"apiVersion": "v1", "kind": "PodTemplate", "template": pod})
    own = SCHEMAS / f"{part['kind']}.json"
    if not own.is_file():
        kubernetes_schemas.validate(part, KUBERNETES, strict=True)
        return
    definition = json.loads(own.read_text())
    assert part["apiVersion"] == definition["apiVersion"]
    jsonschema.validate(
        part, strict(definition["openAPIV3Schema"]) | {"additionalProperties": True}
    )


@each_file
def test_resources_have_the_form_of_their_schemas(rendered: Path) -> None:
    parts = read(rendered)
    for part in parts:
        check(part)
    names = [(part["kind"], part["metadata"]["name"]) for part in parts]
    assert len(names) == len(set(names))


def test_check_of_schemas_finds_misspelt_fields() -> None:
    found = copy.deepcopy([*read_named("tls"), *read_named("keda")])
    parts = {part["kind"]: part for part in found}
    parts["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    parts["KafkaTopic"]["spec"]["partition"] = 1
    parts["KafkaUser"]["spec"]["authorization"]["acls"][0]["operation"] = "Read"
    parts["ScaledObject"]["spec"]["minReplicas"] = 1
    for kind in ("Deployment", "KafkaTopic", "KafkaUser", "ScaledObject"):
        with pytest.raises(jsonschema.ValidationError):
            check(parts[kind])


def read_named(name: str) -> list[dict[str, Any]]:
    return read(ROOT / "deploy" / "k8s" / f"{name}.yaml")


@each_file
def test_every_pod_is_selected_by_its_budget_and_its_network_policy(rendered: Path) -> None:
    parts = read(rendered)
    selectors = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}
    for part in parts:
        template = pod_template(part)
        if template is None or part["kind"] == "Job":
            continue
        labels = template["metadata"]["labels"]
        for kind, selector in selectors.items():
            chosen = [
                other
                for other in parts
                if other["kind"] == kind
                and other["spec"][selector]["matchLabels"].items() <= labels.items()
            ]
            assert len(chosen) == 1, (kind, part["metadata"]["name"])


@each_file
def test_processes_run_without_rights(rendered: Path) -> None:
    for name, pod in pods(read(rendered)):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


@each_file
def test_secrets_are_mounted_by_reference_only(rendered: Path) -> None:
    assert "Secret" not in {part["kind"] for part in read(rendered)}
    for process in processes(rendered).values():
        for field in ("hash_secret", "stream_secret", "sasl_password", "attach_api_key"):
            assert variable_name(field) not in process.environment


def test_every_process_has_a_place() -> None:
    """A process of this project is started by a Deployment, or as a worker by a StatefulSet."""
    files = [path for path in (ROOT / "app").glob("*.py") if "process_app(" in path.read_text()]
    started = {
        re.sub(r"^app\.|:app$", "", process.container["args"][-1])
        for process in processes(ROOT / "deploy" / "k8s" / "default.yaml").values()
    }
    assert {path.stem for path in files} - {"standalone"} <= started


# --- what is rendered starts kvlane as the values say ---------------------------------------------


@each_file
def test_processes_accept_their_settings(
    rendered: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for process in processes(rendered).values():
        with monkeypatch.context() as patch:
            settings = process.settings(patch, tmp_path / process.name)
            settings.require_bootstrap_servers()
            settings.require_authentication()
            role = process.container["args"][-1]
            if role in ("router", "worker", "indexer"):
                settings.block_key_secret()
            if role == "gateway":
                settings.tenant_tag()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_settings_of_the_values_are_those_of_the_processes(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = yaml.safe_load(VALUES[name].read_text())
    common = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]
    common |= values.get("settings", {})
    started = processes(ROOT / "deploy" / "k8s" / f"{name}.yaml")
    own = {
        f"kvlane-{role}": part.get("settings", {})
        for role, part in values.get("processes", {}).items()
    } | {
        f"kvlane-worker-{group}": part.get("settings", {})
        for group, part in values.get("workers", {}).items()
        if part
    }
    assert own.keys() <= started.keys()
    for process in started.values():
        with monkeypatch.context() as patch:
            settings = process.settings(patch, tmp_path / process.name)
        for field, wanted in (common | own.get(process.name, {})).items():
            found = getattr(settings, field)
            assert (str(found) if isinstance(found, Path) else found) == wanted, field


def render(folder: Path, *options: str) -> Path:
    assert HELM is not None
    command = [HELM, "template", "kvlane", CHART, "--kube-version", f"{KUBERNETES}.0", *options]
    rendered = folder / "rendered.yaml"
    rendered.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    read.cache_clear()
    return rendered


needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm: deploy/chart/render.sh builds it")


@needs_helm
def test_setting_on_the_command_line_of_helm_reaches_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = (
        "--set",
        "settings.max_attempts=7",
        "--set",
        "processes.router.settings.policy=dynamo",
    )
    rendered = render(tmp_path, *options, "--set", "processes.router.settings.log_json=false")
    settings = processes(rendered)["kvlane-router"].settings(monkeypatch, tmp_path)
    assert (settings.max_attempts, settings.policy, settings.log_json) == (7, "dynamo", False)


@needs_helm
def test_step_of_an_upgrade_replaces_the_pods_of_one_kind(tmp_path: Path) -> None:
    pinned = ("--set", "image.tag=old", "--set", "topicsJob.image.tag=new")
    before = processes(render(tmp_path, *pinned))
    after = processes(render(tmp_path, *pinned, "--set", "processes.router.image.tag=new"))
    assert [name for name in before if before[name] != after[name]] == ["kvlane-router"]
    assert before["kvlane-topics"].container["image"] == "kvlane:new"


@each_file
def test_pods_have_time_to_drain(
    rendered: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for process in processes(rendered).values():
        with monkeypatch.context() as patch:
            settings = process.settings(patch, tmp_path / process.name)
        role, grace_s = process.container["args"][-1], settings.drain_grace_s
        if role == "gateway":
            hook = process.container["lifecycle"]["preStop"]["exec"]["command"]
            longest_s = float(hook[-1]) + grace_s + REDIRECT_TIMEOUT_S
        elif role == "worker":
            notice_s = DRAIN_NOTICE_HEARTBEATS * settings.heartbeat_interval_s
            # Running requests, the end of aborted ones, the engine's drain, the tombstone.
            longest_s = notice_s + grace_s + max(grace_s, SHUTDOWN_STEP_S) + 2 * SHUTDOWN_STEP_S
        else:
            continue
        given_s = process.pod["terminationGracePeriodSeconds"]
        assert math.ceil(longest_s) < given_s <= longest_s + 20, process.name


# --- what the values files show ------------------------------------------------------------------


def resource(name: str, kind: str, part: str) -> dict[str, Any]:
    """A resource of a rendered file, by its kind and its name without `kvlane-`."""
    (found,) = [
        each
        for each in read_named(name)
        if (each["kind"], each["metadata"]["name"]) == (kind, f"kvlane-{part}")
    ]
    spec: dict[str, Any] = found["spec"]
    return spec


def test_groups_are_scaled_by_requests_of_their_model_in_their_release() -> None:
    routers = 'namespace="kvlane", pod=~"kvlane-router-.+"'
    queries = {
        group: [
            trigger["metadata"]["query"]
            for trigger in resource("keda", "ScaledObject", f"worker-{group}")["triggers"]
        ]
        for group in ("simulated", "batch")
    }
    assert queries["simulated"][1] == (
        f'sum(kvlane_router_queued_tokens{{model="demo", {routers}}})'
    )
    assert queries["batch"][1] == (
        f'sum(kvlane_router_queued_batch_requests{{model="batch", {routers}}})'
    )
    gateway = resource("keda", "ScaledObject", "gateway")
    assert gateway["triggers"][0]["metadata"] == {"value": "70"}
    assert "replicas" not in resource("keda", "Deployment", "gateway")
    assert resource("keda", "Deployment", "router")["replicas"] == 2


def test_one_kind_of_process_has_another_version_during_an_upgrade() -> None:
    images = {
        name: process.container["image"].rpartition(":")[2]
        for name, process in processes(ROOT / "deploy" / "k8s" / "cluster.yaml").items()
    }
    assert {name for name, tag in images.items() if tag == "next"} == {
        "kvlane-router",
        "kvlane-worker-simulated",
    }
    workers = resource("cluster", "StatefulSet", "worker-simulated")
    assert workers["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "25%"}
    budget = resource("cluster", "PodDisruptionBudget", "worker-simulated")
    assert budget["maxUnavailable"] == "25%"


def test_indexed_gateways_share_the_lanes() -> None:
    gateway = resource("cluster", "StatefulSet", "gateway")
    env = {each["name"]: each for each in gateway["template"]["spec"]["containers"][0]["env"]}
    assert env["KVLANE_GATEWAY_COUNT"]["value"] == str(gateway["replicas"]) == "3"
    assert "pod-index" in env["KVLANE_GATEWAY_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_network_policies_let_traces_and_transfers_pass() -> None:
    for part in ("gateway", "router", "worker-simulated", "topics"):
        egress = resource("cluster", "NetworkPolicy", part)["egress"]
        assert {"ports": [{"protocol": "TCP", "port": 4318}]} in egress, part
    workers = {
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/instance": "kvlane", "kvlane/role": "worker"}
        }
    }
    for part in ("worker-prefill", "worker-decode"):
        policy = resource("disaggregated", "NetworkPolicy", part)
        assert {"from": [workers]} in policy["ingress"]
        assert {"to": [workers]} in policy["egress"]
        pod = resource("disaggregated", "StatefulSet", part)["template"]["spec"]
        env = {each["name"]: each for each in pod["containers"][0]["env"]}
        address = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert address == "status.podIP"
    assert "hook" in str(
        [
            each["metadata"]["annotations"]
            for each in read_named("default")
            if each["metadata"]["name"] == "kvlane-topics" and each["kind"] == "NetworkPolicy"
        ]
    )


@pytest.mark.parametrize(("name", "part"), [("attached", "qwen"), ("multinode", "large")])
def test_attached_server_starts_before_its_worker_and_stops_after_it(name: str, part: str) -> None:
    process = processes(ROOT / "deploy" / "k8s" / f"{name}.yaml")[f"kvlane-worker-{part}"]
    (server,) = process.pod["initContainers"]
    assert server["restartPolicy"] == "Always"
    assert {"startupProbe", "livenessProbe"} <= server.keys()
    probe = process.container["startupProbe"]
    longest_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert probe["httpGet"]["path"] == "/readyz"
    assert int(process.environment["KVLANE_ATTACH_START_TIMEOUT_S"]) < longest_s


def test_rules_and_dashboards_are_in_the_objects_of_their_operators() -> None:
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    (rule,) = [part for part in read_named("cluster") if part["kind"] == "PrometheusRule"]
    assert rule["spec"] == alerts
    boards = {
        key: json.loads(content)
        for part in read_named("cluster")
        if part["kind"] == "ConfigMap"
        for key, content in part["data"].items()
    }
    files = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    assert boards == {f"kvlane-{path.name}": json.loads(path.read_text()) for path in files}


# --- topics and rights ----------------------------------------------------------------------------


def strimzi_settings() -> Settings:
    values = yaml.safe_load(VALUES["tls"].read_text())["settings"]
    return Settings(**{**values, "replication_factor": 3, "min_insync_replicas": 2})


def test_topics_of_strimzi_are_those_that_the_command_creates() -> None:
    found = {part["spec"]["topicName"]: part["spec"] for part in by_kind("KafkaTopic")}
    settings = strimzi_settings()
    options = settings.topic_options()
    assert found.keys() == {f"kvlane.{name}" for name in TOPICS_BY_NAME}
    for name, topic in TOPICS_BY_NAME.items():
        spec = found[f"kvlane.{name}"]
        partitions = options["partitions"].get(name, topic.partitions)
        assert spec["partitions"] == (settings.lanes if partitions == PER_LANE else partitions)
        assert spec["replicas"] == 3
        kept_ms = options["retention_ms"].get(name, topic.retention_ms)
        expected = topic._replace(retention_ms=kept_ms).config(min_insync=2)
        assert {key: str(value) for key, value in spec["config"].items()} == expected


def test_users_of_strimzi_have_the_rights_of_the_table() -> None:
    found = {
        (user["metadata"]["name"], operation, *rule["resource"].values())
        for user in by_kind("KafkaUser")
        for rule in user["spec"]["authorization"]["acls"]
        for operation in rule["operations"]
    }
    assert found == {
        (
            f"kvlane-{rule.role}",
            rule.operation,
            "transactionalId" if rule.resource == "transactional-id" else rule.resource,
            rule.name if rule.is_foreign else f"kvlane.{rule.name}",
            "prefix" if rule.is_prefix or not rule.name else "literal",
        )
        for rule in required_acls(strimzi_settings().reply_prefixes)
    }


def by_kind(kind: str) -> list[dict[str, Any]]:
    return [part for part in read_named("tls") if part["kind"] == kind]


def test_processes_log_in_as_the_users_of_their_roles() -> None:
    users = {user["metadata"]["name"] for user in by_kind("KafkaUser")}
    for process in processes(ROOT / "deploy" / "k8s" / "tls.yaml").values():
        user = process.environment[variable_name("sasl_username")]
        role = process.container["args"][-1].removeprefix("app.").removesuffix(":app")
        assert user == f"kvlane-{role}"
        assert user in users


def test_version_is_the_same_everywhere() -> None:
    """That of pyproject.toml, also in the newest heading of the changelog with a version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    chart = ROOT / "deploy/chart"
    about = yaml.safe_load((chart / "Chart.yaml").read_text("utf-8"))
    assert (about["version"], about["appVersion"]) == (version, version)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)[0] == version
    pages = [
        ROOT / "deploy/compose/compose.yaml",
        *chart.rglob("*.yaml"),
        *(ROOT / "docs").glob("*.md"),
    ]
    images = {
        found
        for page in pages
        for found in re.findall(
            r"(?:\bkvlane:|repository: kvlane, tag: |\btag: )(\d[\w.-]*)", page.read_text("utf-8")
        )
    }
    assert images == {version, f"{version}-vllm"}
