"""Parts of the chart that follow from the code: tables of topics and rights, names of settings.

`python deploy/chart/generate.py` writes `files/tables.yaml` and `values.schema.json`; `make chart`
runs it before it renders.
"""

from __future__ import annotations

import hashlib
import json
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


def values_schema() -> str:
    """The content of `values.schema.json`: a misspelt value or setting ends a rendering."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    settings = {"type": "object", "properties": {name: {} for name in Settings.model_fields}}
    process = {"properties": {"settings": {"$ref": "#/definitions/settings"}}}
    parts = {"type": "object", "additionalProperties": {"type": ["object", "null"], **process}}
    nested = {
        name: {
            "type": "object",
            "properties": {key: {} for key in value},
            "additionalProperties": False,
        }
        for name, value in values.items()
        if isinstance(value, dict) and value and name != "podAnnotations"
    }
    properties = (
        {name: {} for name in values}
        | nested
        | {"settings": {"$ref": "#/definitions/settings"}, "processes": parts, "workers": parts}
    )
    properties["kafka"]["properties"]["authentication"] = {"enum": ["", "scram-sha-512", "tls"]}
    document = {
        "$schema": SCHEMA,
        "definitions": {"settings": settings | {"additionalProperties": False}},
        "type": "object",
        "properties": properties | {"global": {}},
        "additionalProperties": False,
    }
    return json.dumps(document, indent=1) + "\n"


GENERATED = {"files/tables.yaml": tables, "values.schema.json": values_schema}
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
        (CHART / path).write_text(content())


if __name__ == "__main__":
    main()
