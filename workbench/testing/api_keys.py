"""API keys of a simulated world: the file that gateways read, and its changes while they run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvlane.app.access.key_file import KeyFile, Tenant, new_key, write_key_file
from workbench.testing.simulated_process import SimulatedProcess
from workbench.testing.virtual_time import VirtualLoop

TENANTS = ("acme", "zenith")
LIMITED, LIMITS = "frugal", Tenant(requests=2, batches=1)
"""A tenant with limits, of the scenario `limits`."""
HOARDER, FILE_BYTES = "hoarder", 1500
"""A tenant with a limit of the bytes of its files, in the same scenario."""
NOTICE_S = 2.0
"""Time in which a gateway that runs follows a change of the file."""


class SimulatedKeys:
    """One valid key of each tenant, and all earlier ones."""

    def __init__(self, loop: VirtualLoop, *, has_limits: bool) -> None:
        self._loop = loop
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "keys.json"
        limits = {LIMITED: LIMITS, HOARDER: Tenant(file_bytes=FILE_BYTES)} if has_limits else {}
        tenants = (*TENANTS, *limits)
        self._file = KeyFile(limits)
        self._valid: dict[str, str] = {}
        self._changed_s: dict[str, float] = {}
        """When each key became valid, or was revoked."""
        self.paths: dict[str, list[str]] = {tenant: [] for tenant in tenants}
        """Paths of the answers, files and batch jobs of each tenant."""
        for tenant in tenants:
            self.rotate(tenant)

    def close(self) -> None:
        """Delete the file."""
        self._folder.cleanup()

    def valid(self, tenant: str) -> str:
        """The valid key of a tenant."""
        return self._valid[tenant]

    def rotate(self, tenant: str) -> None:
        """Revoke the key of a tenant, and create another one."""
        if (former := self._valid.get(tenant)) is not None:
            self._file = self._file.without(former.split("_")[1])
            self._changed_s[former] = self._loop.time()
        created = new_key(tenant)
        self._file = self._file.with_key(created.entry)
        self._valid[tenant] = created.token
        self._changed_s[created.token] = self._loop.time()
        write_key_file(self.path, self._file)

    def is_valid(self, token: str, gateway: SimulatedProcess) -> bool | None:
        """True if a gateway serves this key now. None if it may not have read the file yet: while
        it is paused, and shortly after a change."""
        since_s = max(self._changed_s[token], gateway.running_since_s)
        if self._loop.is_paused(gateway.label) or self._loop.time() < since_s + NOTICE_S:
            return None
        return token in self._valid.values()


class ClientKey:
    """The key of a tenant as one of its clients has it, replaced only after a refusal."""

    def __init__(self, keys: SimulatedKeys, tenant: str) -> None:
        self.tenant = tenant
        self._keys = keys
        self._token = keys.valid(tenant)

    @property
    def headers(self) -> dict[str, str]:
        """The header with the key."""
        return {"authorization": f"Bearer {self._token}"}

    def is_valid(self, gateway: SimulatedProcess) -> bool | None:
        """True if a gateway serves the key now; None if it may not have read the file yet."""
        return self._keys.is_valid(self._token, gateway)

    def replace(self) -> None:
        """Take the key that is valid now."""
        self._token = self._keys.valid(self.tenant)

    def own(self, path: str) -> None:
        """Add the path of an object of the tenant."""
        self._keys.paths[self.tenant].append(path)

    def paths_of_others(self) -> list[str]:
        """The paths of all objects of other tenants."""
        owned = self._keys.paths.items()
        return [path for tenant, paths in owned if tenant != self.tenant for path in paths]
