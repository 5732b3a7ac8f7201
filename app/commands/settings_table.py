"""The command `kvlane settings`: all settings as a table, with secrets masked, or as Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, SecretStr
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlane.app.settings import AREAS, Settings, unknown_variables, variable_name

_MASK = "********"
_SECRET_WORDS = {
    "auth",
    "authorization",
    "credential",
    "credentials",
    "key",
    "password",
    "secret",
    "token",
}


_READ_BY = {
    "Kafka": "every process",
    "Topics": "`kvlane topics create`, and every process, which compares the topics with them",
    "Requests and results": "gateways and preprocessors; `KVLANE_MAX_LIFETIME_S` also by routers "
    "and workers, `KVLANE_MAX_ATTEMPTS` by routers, `KVLANE_DEDUP_WINDOW_S` by routers and "
    "collectors, `KVLANE_REPLY_TOPIC_PREFIXES` by preprocessors",
    "Batches": "gateways (files, time limits), preprocessors (time limits), collectors "
    "(`KVLANE_BATCH_MAX_LINES`) and routers (the others); partitions and retention as in Topics",
    "Worker": "workers; `KVLANE_WORKER_TIMEOUT_S` and `KVLANE_HEARTBEAT_INTERVAL_S` also by "
    "routers, `KVLANE_DRAIN_GRACE_S` by gateways",
    "Engine and model": "workers",
    "Router and indexer": "routers; `KVLANE_INDEXER_PORT` and `KVLANE_SNAPSHOT_INTERVAL_S` by "
    "indexers, `KVLANE_ENFORCE_DISAGGREGATION` also by gateways",
    "HTTP, gateway and access": "gateways; `KVLANE_STATUS_PORT` and `KVLANE_HTTP_HOST` by every "
    "process, keys, TLS and access to metrics by all that listen, sizes also by indexers",
    "Logs, traces and local files": "every process; `KVLANE_KEEP_PROMPTS` by preprocessors and "
    "routers",
}
"""The processes that read the settings of an area, by its title in `AREAS`."""


class SettingRow(NamedTuple):
    """One setting as it is shown to people; a secret's values are masked."""

    name: str  # the environment variable
    default: str
    value: str
    description: str  # with its unit
    is_set: bool  # by the environment or the caller, whether or not it equals the default


def settings_rows(settings: Settings) -> list[SettingRow]:
    """Every setting in the order of the class, safe to print and to log."""
    return [
        SettingRow(
            name=variable_name(name),
            default=_unset(name) or _shown(field.default),
            value=_shown(getattr(settings, name)),
            description=field.description or "",
            is_set=name in settings.model_fields_set,
        )
        for name, field in Settings.model_fields.items()
    ]


def settings_markdown() -> str:
    """Tables of all settings with their defaults by area, as `docs/configuration.md` has them."""
    return "\n".join(_area_table(title, area) for title, area in AREAS.items())


def _area_table(title: str, area: type[BaseModel]) -> str:
    lines = [
        f"## {title}",
        "",
        f"Read by {_READ_BY[title]}.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in area.model_fields.items():
        default = _unset(name) or _shown(field.default)
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(
            f"| `{variable_name(name)}` | {f'`{default}`' if default else ''} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def print_settings(rows: Sequence[SettingRow]) -> None:
    """Show settings, and the variables of the environment that are none."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variable", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("meaning")
    for row in rows:
        default = f" [dim](default: {escape(row.default) or 'empty'})[/]" if row.is_set else ""
        style = "bold" if row.is_set else ""
        table.add_row(row.name, escape(row.value), escape(row.description) + default, style=style)
    console = Console()
    console.print(table)
    for name in unknown_variables(os.environ):
        console.print(f"[yellow]not a setting, ignored:[/] {name}", highlight=False)


def _unset(name: str) -> str:
    """Text for a default that is made when the process starts."""
    made = {"worker_id": "HOST-PID", "router_id": "HOST-PID", "cache_dir": "~/.cache/kvlane"}
    return made.get(name, "")


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return _MASK if value.get_secret_value() else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    return "" if value is None else str(_masked(value))


def _masked(value: object, name: str = "") -> object:
    """An argument of an engine without the secrets in it, recognised by names (`hf_token`)."""
    if isinstance(value, dict):
        return {key: _masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, name) for inner in value]
    is_secret = not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))
    return _MASK if is_secret and isinstance(value, str) and value else value
