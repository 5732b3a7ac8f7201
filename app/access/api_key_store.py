"""Store of API keys: those of a file that is reloaded on change, and the quotas of tenants."""

from __future__ import annotations

import logging
import os

from kvlane.app.access.key_file import ApiKey, KeyFileError, KeyRing, Tenant, read_key_file
from kvlane.app.access.quota import TenantQuota
from kvlane.app.settings import Settings
from kvlane.streams.clock import Clock

log = logging.getLogger(__name__)

KEY_FILE_POLL_S = 1.0
MONTH_S = 32 * 86_400
"""The longest month, with a margin for clocks."""


class ApiKeyStore:
    """API keys of a file that is reloaded on change, and quotas of tenants."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        assert settings.api_keys_file is not None
        self._path = settings.api_keys_file
        self._clock = clock
        self._usage_retention_s = settings.usage_retention_s
        self._ring = self._read()
        self._seen = self._signature()
        self.quotas: dict[str, TenantQuota] = {}
        self.is_shared = False
        """Whether gateways divide the limits."""

    def __len__(self) -> int:
        return len(self._ring)

    def find(self, token: str) -> ApiKey | None:
        return self._ring.find(token, self._clock.wall_ms() / 1000)

    def tenant(self, name: str) -> Tenant:
        """The terms of a tenant; one without an entry has no limits."""
        return self._ring.tenants.get(name) or Tenant()

    @property
    def has_limits(self) -> bool:
        tenants = self._ring.tenants.values()
        return any(any(TenantQuota(each, 0.0).limited()) for each in tenants)

    @property
    def has_budgets(self) -> bool:
        return any(TenantQuota(each, 0.0).has_budget for each in self._ring.tenants.values())

    def is_tenant(self, name: str) -> bool:
        return name in self._ring.tenants

    def quota(self, name: str) -> TenantQuota:
        """The quota of a tenant. Bound: the tenants of the file and those with requests."""
        quota = self.quotas.get(name)
        if quota is None:
            quota = self.quotas[name] = TenantQuota(
                self.tenant(name), self._clock.now(), is_shared=self.is_shared
            )
        return quota

    async def watch(self) -> None:
        """Follow the file, until cancelled. One that cannot be read changes nothing. Looks at once:
        a process may wait for its broker between the first reading and this call."""
        while True:
            if (signature := self._signature()) != self._seen:
                self._seen = signature
                self._follow()
            await self._clock.sleep(KEY_FILE_POLL_S)

    def _follow(self) -> None:
        try:
            ring = self._read()
        except KeyFileError as e:
            log.error("keeping the previous API keys: %s", e)  # noqa: TRY400 - no traceback
            return
        self._take(ring)
        log.info("%s has changed: %d API keys", self._path, len(ring))

    def _read(self) -> KeyRing:
        """Raises KeyFileError."""
        ring = KeyRing(read_key_file(self._path))
        has_months = any(each.tokens_per_month is not None for each in ring.tenants.values())
        if has_months and self._usage_retention_s < MONTH_S:
            raise KeyFileError(
                f"{self._path}: tokens_per_month needs the usage of a month: set "
                f"KVLANE_USAGE_RETENTION_S to {MONTH_S} at least"
            )
        return ring

    def _take(self, ring: KeyRing) -> None:
        self._ring = ring
        now = self._clock.now()
        for name, quota in list(self.quotas.items()):
            if name in ring.tenants or not quota.is_idle:
                quota.set_limits(self.tenant(name), now)
            else:
                del self.quotas[name]

    def _signature(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
