"""API keys of tenants in a file, for tests."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from kvlane.app.access import key_file
from kvlane.app.access.key_file import KeyFile, KeyRole, new_key
from tests.harness.cluster_harness import ClusterHarness, caching_engine
from tests.harness.memory_world import MemoryWorld

SECRET = "only for tests"


class KeyFileHarness:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.tokens: list[str] = []
        key_file.write_key_file(self.path, KeyFile())

    @property
    def settings(self) -> dict[str, Any]:
        return {"api_keys_file": self.path, "stream_secret": SECRET}

    def add(self, tenant: str, role: KeyRole = "user", expires: datetime | None = None) -> str:
        key = new_key(tenant, role, expires=expires)
        self.change(key_file.read_key_file(self.path).with_key(key.entry))
        self.tokens.append(key.token)
        return key.token

    def limit(self, tenant: str, **changes: Any) -> None:
        self.change(key_file.read_key_file(self.path).with_tenant(tenant, changes))

    def revoke(self, token: str) -> None:
        self.change(key_file.read_key_file(self.path).without(token.split("_")[1]))

    def change(self, file: KeyFile) -> None:
        key_file.write_key_file(self.path, file)


def auth_headers(token: str, **more: str) -> dict[str, str]:
    """The headers of a request with this key."""
    return {"authorization": f"Bearer {token}"} | more


async def start_guarded(world: MemoryWorld, keys: KeyFileHarness, **over: Any) -> ClusterHarness:
    """A gateway that requires keys, and one worker with a cache."""
    cluster = await ClusterHarness.start(world, (), **keys.settings, **over)
    await cluster.start_worker("w1", engine=caching_engine(world))
    return cluster
