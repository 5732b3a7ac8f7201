"""HTTP probes of processes on this machine."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any, NamedTuple

HTTP_TIMEOUT_S = 2.0
READY_POLL_S = 0.1
"""Time between two looks whether the processes of a deployment are ready."""


class HttpAnswer(NamedTuple):
    """A response: its HTTP status, 0 without an answer, and its body as JSON."""

    status: int
    body: Any


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
