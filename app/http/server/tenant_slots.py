"""Places for work that holds memory or a reader of the log, by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvlane.app.http.api_errors import overloaded


class TenantSlots:
    """At most `most` pieces of work at a time, `of_tenant` of them for one tenant; more are refused
    with the message `refusal`."""

    def __init__(self, most: int, of_tenant: int, refusal: str) -> None:
        self._most = most
        self._of_tenant = of_tenant
        self._refusal = refusal
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """A slot until the context is left. Without tenants, "" may take all. Raises ApiError."""
        most = self._of_tenant if tenant else self._most
        if self._taken.total() >= self._most or self._taken[tenant] >= most:
            raise overloaded(self._refusal)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # without the tenants that have none
