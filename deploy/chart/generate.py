"""Parts of the chart that follow from the code: tables of topics and rights, the schema of its
values.

`python deploy/chart/generate.py` writes `files/tables.yaml` and `values.schema.json`; `make chart`
runs it before it renders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvlane.app.settings import Settings
from kvlane.streams.topics import PER_LANE, TOPICS, AclRule, Topic, required_acls

CHART = Path(__file__).parent
STRIMZI_TYPES = {"transactional-id": "transactionalId"}
"""Types of resources that Strimzi spells in another way than Kafka's tools."""
SCHEMA = "http://json-schema.org/draft-07/schema#"


def topic_row(topic: Topic) -> dict[str, Any]:
    """Partitions and configuration of a topic, and the settings that change them."""
    own = f"{topic.name}_partitions".replace("-", "_")
    lanes = ["lanes"] if topic.partitions == PER_LANE else []
    settings = [name for name in (own, *lanes) if name in Settings.model_fields]
    default = Settings.model_fields["lanes"].default if lanes else topic.partitions
    retention = f"{topic.name}_retention_s".replace("-", "_")
    config = topic.config(min_insync=1)
    del config["min.insync.replicas"]  # a value of the chart
    return {
        "name": topic.name,
        "partitions": default,
        "partitionsSettings": settings,
        "retentionSetting": retention if retention in Settings.model_fields else "",
        "config": config,
    }


def user_rules() -> dict[str, list[dict[str, Any]]]:
    """The rules of each role, with the operations on one resource together.

    A foreign rule is the template of the rules for each prefix of topics for replies.
    """
    users: dict[str, dict[AclRule, list[str]]] = {}
    for rule in required_acls(reply_prefixes=[""]):
        resource = rule._replace(operation="All")
        users.setdefault(rule.role, {}).setdefault(resource, []).append(rule.operation)
    return {
        role: [
            {
                "type": STRIMZI_TYPES.get(rule.resource, rule.resource),
                "name": rule.name,
                "patternType": "prefix" if rule.is_prefix or not rule.name else "literal",
                "isForeign": rule.is_foreign,
                "operations": operations,
            }
            for rule, operations in rules.items()
        ]
        for role, rules in users.items()
    }


def tables() -> str:
    """The content of `files/tables.yaml`."""
    head = "# Topics and rights of streams/topics.py, written by deploy/chart/generate.py.\n"
    content = {"topics": [topic_row(topic) for topic in TOPICS], "users": user_rules()}
    return head + yaml.safe_dump(content, sort_keys=False)


TEXT, FLAG, OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
LIST = {"type": "array"}
POSITIVE = {"type": "integer", "minimum": 1}
TEXTS = {"type": "array", "items": TEXT}
TEXT_OBJECT = {"type": "object", "additionalProperties": TEXT}
SHARE = {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[1-9][0-9]?%$|^100%$"}]}
GROUP_NAME = "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
SCALED_BY = {
    "preprocessor": ("cpu", "prompts", "batchPrompts"),
    "worker": ("cpu", "queuedTokens", "activeRequests", "batchRequests"),
}
"""By role, the triggers of autoscaling besides those of the user; of other processes `cpu`."""
SETTING_KEYS = (
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minLength", "pattern",
)  # fmt: skip
"""What the schema of a setting takes over from that of its field."""


def closed(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """An object with these properties only; null leaves it out."""
    found = {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
    return found | ({"required": list(required)} if required else {})


def setting_schema(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The values that a field of Settings takes from its variable; null leaves the setting out."""
    options = []
    for each in field.get("anyOf", [field]):
        resolved = definitions[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
        option = {key: resolved[key] for key in SETTING_KEYS if key in resolved}
        if choices := option.get("enum"):  # in capitals: accepted in small letters too
            lower = [each.lower() for each in choices if each.isupper()]
            option["enum"] = sorted({*choices, *lower}, key=str)
        options.append(option)
        if option.get("type") == "object":
            options.append({"type": "string", "pattern": r"^\s*\{"})
    options = [option for option in options if option.get("type") != "null"]
    if len(options) > 1:
        return {"anyOf": [*options, {"type": "null"}]}
    found = options[0] | {"type": [options[0]["type"], "null"]}
    return found | ({"enum": [*found["enum"], None]} if "enum" in found else {})


def settings_schema() -> dict[str, Any]:
    """The settings by name, without secrets: these come from Secrets, as files."""
    schema = Settings.model_json_schema()
    fields = schema["properties"]
    return closed(
        {
            name: setting_schema(field, schema.get("$defs", {}))
            for name, field in fields.items()
            if f"{name}_file" not in fields
        }
    )


def image() -> dict[str, Any]:
    return closed({"repository": TEXT, "tag": TEXT})


def part_schema(role: str) -> dict[str, Any]:
    """The values of a process or of a worker group."""
    triggers = SCALED_BY.get(role, ("cpu",))
    scaling = closed(
        {"minReplicas": {"type": "integer", "minimum": 0}, "maxReplicas": POSITIVE}
        | dict.fromkeys(triggers, POSITIVE)
        | {"triggers": {"type": "array", "minItems": 1}, "fallback": OBJECT, "behavior": OBJECT}
        | {"pollingInterval": POSITIVE, "cooldownPeriod": {"type": "integer", "minimum": 0}},
        ("minReplicas", "maxReplicas"),
    )
    scaling["anyOf"] = [{"required": [name]} for name in (*triggers, "triggers")]
    # Nothing, as in values that a user had before: no autoscaling.
    scaling = {"anyOf": [scaling, {"type": ["object", "null"], "maxProperties": 0}]}
    options = {
        "replicas": {"type": "integer", "minimum": 0},
        "settings": {"$ref": "#/definitions/settings"},
        "image": image(),
        "resources": OBJECT,
        "updateStrategy": OBJECT,
        "maxUnavailable": SHARE,
        "autoscaling": scaling,
        "networkPolicy": closed({"ingress": LIST, "egress": LIST}),
        "podAnnotations": TEXT_OBJECT,
        **dict.fromkeys(("env", "volumes", "volumeMounts", "initContainers", "sidecars"), LIST),
    } | POD
    if role == "worker":
        options |= {
            "startupSeconds": {"type": "integer", "minimum": 30},
            "modelClaim": TEXT,
            "volumeClaimTemplates": LIST,
            "sharedMemory": {"type": ["string", "integer"]},
            "nodes": {"type": "integer", "minimum": 2},
            "follower": OBJECT,
        }
    if role in ("gateway", "indexer"):
        options["service"] = closed(
            {
                "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                "port": POSITIVE,
                "annotations": TEXT_OBJECT,
                "loadBalancerSourceRanges": TEXTS,
            }
        )
    if role == "gateway":
        options["indexed"] = FLAG
    found = closed(options)
    if role == "worker":
        found["dependencies"] = {"nodes": ["follower"], "follower": ["nodes"]}
    return found


POD = {
    "nodeSelector": TEXT_OBJECT,
    "tolerations": LIST,
    "affinity": OBJECT,
    **dict.fromkeys(("priorityClassName", "runtimeClassName", "serviceAccountName"), TEXT),
}
"""Fields of a pod that all pods may have, or one part."""
PROCESSES = ("gateway", "preprocessor", "router", "collector", "indexer")


def values_schema() -> str:
    """The content of `values.schema.json`: a misspelt name, and a value of another type, end a
    rendering."""
    monitor = {"enabled": FLAG, "labels": TEXT_OBJECT}
    properties = POD | {
        "global": {},
        "image": closed(
            {"repository": TEXT, "tag": TEXT}
            | {"pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]}}
        ),
        "imagePullSecrets": {"type": "array", "items": closed({"name": TEXT}, ["name"])},
        "settings": {"$ref": "#/definitions/settings"},
        "kafka": closed(
            dict.fromkeys(("bootstrapServers", "tlsSecret", "userPrefix"), TEXT)
            | {"authentication": {"enum": ["", "scram-sha-512", "tls"]}}
        ),
        "secretName": TEXT,
        "http": closed({"allowAnonymous": FLAG, "tlsSecret": TEXT}),
        "processes": closed({role: part_schema(role) for role in PROCESSES}),
        "workers": {
            "type": "object",
            "propertyNames": {"pattern": GROUP_NAME},
            "additionalProperties": {"$ref": "#/definitions/worker"},
        },
        "autoscaling": closed(
            dict.fromkeys(("prometheusUrl", "prometheusSelector", "kafkaSecret"), TEXT)
        ),
        "topicsJob": closed({"enabled": FLAG, "image": image(), "resources": OBJECT}),
        "strimzi": closed({"enabled": FLAG, "cluster": TEXT, "clientUser": FLAG}),
        "networkPolicy": closed(
            {"enabled": FLAG, "kafkaPorts": {"type": "array", "items": POSITIVE}}
            | dict.fromkeys(("clients", "metrics"), LIST)
        ),
        "ingress": closed(
            {"enabled": FLAG, "className": TEXT, "hosts": TEXTS, "tlsSecret": TEXT}
            | {"annotations": TEXT_OBJECT}
        ),
        "httpRoute": closed(
            {"enabled": FLAG, "parentRefs": LIST, "hostnames": TEXTS, "annotations": TEXT_OBJECT}
        ),
        "monitoring": closed(
            {"podMonitor": closed(monitor | {"interval": TEXT})}
            | {name: closed(monitor) for name in ("prometheusRule", "dashboards")}
        ),
        "topologySpread": TEXTS,
        "podAnnotations": TEXT_OBJECT,
    }
    document = {
        "$schema": SCHEMA,
        "definitions": {"settings": settings_schema(), "worker": part_schema("worker")},
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return json.dumps(document, indent=1) + "\n"


def copied(path: Path) -> Callable[[], str]:
    """A file of another folder: Helm reads those of the chart only."""
    return path.read_text


GENERATED: dict[str, Callable[[], str]] = {
    "files/tables.yaml": tables,
    "files/alerts.yaml": copied(CHART.parent / "prometheus" / "alerts.yaml"),
    **{
        f"files/dashboards/{path.name}": copied(path)
        for path in sorted((CHART.parent / "grafana" / "dashboards").glob("*.json"))
    },
    "values.schema.json": values_schema,
}
"""The generated files, and the function that gives the content of each."""


def digest() -> str:
    """SHA-256 of all files that a rendering depends on, in hex."""
    found = hashlib.sha256()
    for path in sorted(CHART.rglob("*")):
        if path.suffix in (".yaml", ".tpl", ".json"):
            found.update(f"{path.relative_to(CHART)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def main() -> None:
    """Write the generated files."""
    for path, content in GENERATED.items():
        (CHART / path).parent.mkdir(exist_ok=True)
        (CHART / path).write_text(content())


if __name__ == "__main__":
    main()
