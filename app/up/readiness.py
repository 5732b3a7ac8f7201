"""Readiness of a deployment on this machine.

Checks `/readyz` of the processes, `/v1/models` of the gateway, and the workers in its topics
(`app/local/worker_observer.py`). Starts and stops nothing.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from kvlane.app.local.worker_observer import WorkerObserver

HTTP_TIMEOUT_S = 2.0


class HttpAnswer(NamedTuple):
    """A response: its HTTP status, 0 without an answer, and its body as JSON."""

    status: int
    body: Any


class ReadinessCheck:
    """The checks that must pass before requests are served."""

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


def http_get(url: str) -> HttpAnswer:
    """GET from a server of this machine, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S, context=context) as answer:  # noqa: S310 - http
            return HttpAnswer(answer.status, _body(answer.read()))
    except urllib.error.HTTPError as e:
        with e:
            return HttpAnswer(e.code, _body(e.read()))
    except (OSError, http.client.HTTPException):
        return HttpAnswer(0, None)


def _body(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _words(answer: HttpAnswer) -> str:
    if not answer.status:
        return "does not listen yet"
    body = answer.body if isinstance(answer.body, dict) else {}
    wrong = [name for name, value in body.items() if value is False and name != "ready"]
    return f"is not ready ({', '.join(wrong) or answer.status})"
