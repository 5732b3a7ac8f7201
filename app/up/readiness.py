"""Readiness of a deployment on this machine: `/readyz` of the processes, `/v1/models` of the
gateway, and the workers in its topics (`app/local/worker_observer.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from http import HTTPStatus

from kvlane.app.local.http_probe import HttpAnswer, http_get
from kvlane.app.local.worker_observer import WorkerObserver


class ReadinessCheck:
    def __init__(
        self, workers: WorkerObserver, names: Collection[str], since: int, urls: Mapping[str, str]
    ) -> None:
        """`urls`: addresses by process name; the gateway is "gateway-1"."""
        self._workers = workers
        self._names = names
        self._since = since
        self._urls = urls

    async def failed_checks(self) -> list[str]:
        """The failed checks, as texts; empty when all pass."""
        ready = self._workers.find_ready(self._since)
        missing = [f"{n} has not registered" for n in self._names if n not in ready]
        answers = await asyncio.gather(
            *(asyncio.to_thread(http_get, f"{url}/readyz") for url in self._urls.values())
        )
        for name, answer in zip(self._urls, answers, strict=True):
            if answer.status != HTTPStatus.OK:
                missing.append(f"{name} {_words(answer)}")
        if not missing:
            models = await asyncio.to_thread(http_get, f"{self._urls['gateway-1']}/v1/models")
            if models.status == HTTPStatus.OK and not models.body.get("data"):
                missing.append("gateway-1 lists no model")
        return missing


def _words(answer: HttpAnswer) -> str:
    if not answer.status:
        return "does not listen yet"
    body = answer.body if isinstance(answer.body, dict) else {}
    wrong = [name for name, value in body.items() if value is False and name != "ready"]
    return f"is not ready ({', '.join(wrong) or answer.status})"
