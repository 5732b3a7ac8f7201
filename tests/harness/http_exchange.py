"""HTTP without sockets: one exchange with an ASGI application, event by event, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message


class HttpExchange:
    """A request and the response so far. The client may disconnect at any moment."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        url: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        upload: bool = True,
        sends_json: bool = True,
    ) -> None:
        """`body`: bytes, or something to be JSON. Begins at once; `upload` False sends no body.

        `sends_json`: a body has the content type of JSON.
        """
        path, _, query = url.partition("?")
        content = body if isinstance(body, bytes) else b"" if body is None else dumps(body)
        kind = {"content-type": "application/json"} if sends_json else {}
        size = {"content-length": str(len(content))} if upload else {}
        lines = kind | size | dict(headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": quote(path, safe="/%").encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in lines.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = b""
        self.complete = False
        self.reading = asyncio.Event()
        """While it is not set, the client reads nothing, and the server's sends wait."""
        self.reading.set()
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self.task = asyncio.get_running_loop().create_task(app(scope, self._parts.get, self._send))
        if upload:
            self.upload(content)

    def upload(self, content: bytes, *, more: bool = False) -> None:
        """Send some of the body."""
        self._parts.put_nowait({"type": "http.request", "body": content, "more_body": more})

    def disconnect(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def wait_done(self) -> HttpExchange:
        """Wait for the end of the response."""
        await self.task
        assert self.complete, "the response was not completed"
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        got: dict[str, Any] = self.json["error"]
        assert set(got) == {"message", "type", "param", "code"}
        return got

    @property
    def events(self) -> list[Any]:
        """The data of the events so far; comments are left out, `[DONE]` is a string."""
        got = "".join(
            line for line in self.content.decode().splitlines(keepends=True) if line[0] != ":"
        )
        blocks = [b for b in got.split("\n\n") if b]
        data = [line[6:] for b in blocks for line in b.split("\n") if line.startswith("data: ")]
        assert len(data) == len(blocks)
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    @property
    def positions(self) -> list[int]:
        """The ids of the events so far."""
        lines = self.content.decode().split("\n")
        return [int(line[4:]) for line in lines if line.startswith("id: ")]

    @property
    def text(self) -> str:
        """The text in the chat or completion events so far."""
        choices = [c for e in self.events if e != "[DONE]" for c in e.get("choices", ())]
        return "".join(
            c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices
        )

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a response starts once"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode("ascii") for k, v in message["headers"]}
        else:
            await self.reading.wait()
            assert self.status, "a body before its status"
            assert not self.complete, "a body after its end"
            self.content += message.get("body", b"")
            self.complete = not message.get("more_body", False)


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
