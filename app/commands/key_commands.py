"""The commands `kvlane keys`: edit the file of API keys, which gateways reload within a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvlane.app.access import key_file
from kvlane.app.access.key_file import KeyFile, KeyFileError, KeyRole, Tenant
from kvlane.app.commands import console as screen

app = typer.Typer(
    no_args_is_help=True,
    help="Create, list and revoke API keys; limit their tenants.\n\n"
    "Example: `kvlane keys create --tenant acme`",
)

_File = Annotated[
    Path | None, typer.Option("--file", help="The key file; default: KVLANE_API_KEYS_FILE.")
]
_NO_LIMIT = -1


def _limit(meaning: str | None = None) -> Any:
    return typer.Option(min=_NO_LIMIT, max=key_file.MAX_LIMIT, help=meaning)


@app.command()
def create(
    *,
    tenant: Annotated[str, typer.Option(help="Owner of the key. A new tenant has no limits.")],
    role: Annotated[
        str, typer.Option(help="user, operator (dry runs, indexer, metrics) or metrics.")
    ] = "user",
    note: Annotated[str, typer.Option(help="Purpose of the key, for the list.")] = "",
    days: Annotated[float | None, typer.Option(min=0, help="Days after which it expires.")] = None,
    file: _File = None,
) -> None:
    """Create a key and print it, only this once: the file has a salted hash of it.

    Creates the file if necessary, readable for its owner only.

    Example: `kvlane keys create --tenant acme --note "web shop" --days 90`
    """
    path = _path_to_write(file)
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    key = key_file.new_key(tenant, _role(role), note, expires)
    with key_file.lock_key_file(path):
        content = key_file.read_key_file(path) if path.exists() else KeyFile()
        key_file.write_key_file(path, content.with_key(key.entry))
    typer.echo(key.token)


@app.command("list")
def list_keys(*, file: _File = None, json: screen.JsonOption = None) -> None:
    """Show all keys, and the limits of their tenants.

    Example: `kvlane keys list --json - | jq -r '.keys[] | select(.state == "valid") | .id'`
    """
    content = key_file.read_key_file(_path(file))
    now_s = datetime.now(UTC).timestamp()
    keys = [
        {
            "id": key.id, "tenant": key.tenant, "role": key.role, "state": key.status(now_s),
            "expires": "" if key.expires is None else key.expires.isoformat(" ", "minutes"),
            "note": key.note,
        }
        for key in content.keys
    ]  # fmt: skip
    tenants = {name: content.terms(name) for name in content.tenant_names}
    found = {"keys": keys, "tenants": tenants, "defaults": content.defaults}
    shown = {**tenants, "(defaults)": content.defaults}
    screen.show_result(json, found, lambda: _show(keys, shown))


def _show(keys: Sequence[Mapping[str, str]], tenants: Mapping[str, Tenant]) -> None:
    shown_keys = screen.plain_table("id", "tenant", "role", "state", "expires", "note")
    for key in keys:
        shown_keys.add_row(*key.values())
    shown = screen.plain_table("tenant", "class", "cache", "limits")
    for name, terms in tenants.items():
        limits = ((limit, getattr(terms, limit)) for limit in key_file.LIMITS)
        text = ", ".join(f"{limit} {most}" for limit, most in limits if most is not None)
        cache = "shared" if terms.share_cache else "own"
        shown.add_row(name, terms.queue_class or "by name", cache, text or "none")
    console = Console(highlight=False, markup=False)
    console.print(shown_keys)
    console.print()
    console.print(shown)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key, from `list`.")],
    *,
    file: _File = None,
) -> None:
    """Revoke a key: gateways reject it within a second or two. Open streams continue.

    The entry stays in the file as `disabled`.

    Example: `kvlane keys revoke 5f3e7c96a0b1`
    """
    path = _path_to_write(file)
    with key_file.lock_key_file(path):
        key_file.write_key_file(path, key_file.read_key_file(path).without(key_id))
    typer.echo(f"{key_id} is revoked")


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="The tenant; none with --defaults.")] = "",
    *,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Set the limits of tenants without their own.")
    ] = False,
    requests: Annotated[int | None, _limit("Requests in flight; -1: no limit.")] = None,
    tokens: Annotated[int | None, _limit("Tokens in flight: prompts and longest answers.")] = None,
    requests_per_minute: Annotated[int | None, _limit()] = None,
    tokens_per_minute: Annotated[int | None, _limit()] = None,
    tokens_per_day: Annotated[int | None, _limit("Budget of a day, in UTC.")] = None,
    tokens_per_month: Annotated[int | None, _limit("Budget of a calendar month.")] = None,
    file_bytes: Annotated[int | None, _limit("Bytes of all files together.")] = None,
    batches: Annotated[int | None, _limit("Batches that have not ended.")] = None,
    queue_class: Annotated[
        str | None, typer.Option(help="One of KVLANE_QUEUE_CLASSES; empty: the tenant's name.")
    ] = None,
    share_cache: Annotated[
        bool | None, typer.Option("--share-cache/--own-cache", help="Share cached blocks.")
    ] = None,
    file: _File = None,
) -> None:
    """Set limits of a tenant, over all gateways. Omitted limits stay unchanged.

    Examples:

    - `kvlane keys limit acme --requests 8 --tokens-per-day 5000000`

    - `kvlane keys limit --defaults --tokens-per-day 1000000`
    """
    if defaults == bool(tenant) or (defaults and (queue_class or share_cache)):
        raise KeyFileError("give a tenant, or --defaults with limits only")
    path = _path_to_write(file)
    given: dict[str, object] = {
        "requests": requests, "tokens": tokens, "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute, "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month, "file_bytes": file_bytes, "batches": batches,
        "queue_class": queue_class, "share_cache": share_cache,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= {name: None for name in key_file.LIMITS if given[name] == _NO_LIMIT}
    with key_file.lock_key_file(path):
        content = key_file.read_key_file(path)
        if defaults:
            changed = content.with_defaults(changes)
        elif tenant in content.tenant_names:
            changed = content.with_tenant(tenant, changes)
        else:
            raise KeyFileError(f"{path}: tenant {tenant!r} has no key")
        key_file.write_key_file(path, changed)
    typer.echo(
        "the default limits are changed" if defaults else f"the limits of {tenant} are changed"
    )


def _path_to_write(file: Path | None) -> Path:
    from kvlane.app.settings import settings_for_writing

    settings_for_writing()
    return _path(file)


def _path(file: Path | None) -> Path:
    from kvlane.app.settings import Settings

    path = file or Settings().api_keys_file
    if path is None:
        raise KeyFileError("no key file: set KVLANE_API_KEYS_FILE or give --file")
    return path


def _role(role: str) -> KeyRole:
    for each in ("user", "operator", "metrics"):
        if role == each:
            return each
    raise KeyFileError(f"unknown role {role!r}: give user, operator or metrics")
