"""A transport by which OpenAI's and Anthropic's clients survive the death of a gateway.

    python examples/reattaching_client.py http://127.0.0.1:8000 http://127.0.0.1:8001

A stream whose connection breaks goes on at the next gateway, behind the last event that arrived.
A request without a response fails; the client repeats it itself, at the next gateway.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus

import httpx2
from openai import AsyncOpenAI

FORMS = {"/v1/messages": "message", "/v1/responses": "response", "/v1/completions": "completion"}
"""The form of a resumed stream, by the path of its request; others are chats."""


class ReattachingTransport(httpx2.AsyncBaseTransport):
    """Sends requests to the first of some gateways; one that fails becomes the last of them."""

    def __init__(self, gateways: Sequence[str]) -> None:
        self._gateways = [httpx2.URL(url) for url in gateways]
        self._transport = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["x-kvlane-detach"] = "true"  # otherwise a lost connection cancels
        response, gateway = await self.send(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = EventStream(self, request, response, gateway)
        return response

    async def send(self, request: httpx2.Request) -> tuple[httpx2.Response, httpx2.URL]:
        """The response to a request, and the gateway that it comes from."""
        gateway = self._gateways[0]
        request.url = request.url.copy_with(
            scheme=gateway.scheme, host=gateway.host, port=gateway.port
        )
        request.headers["host"] = gateway.netloc.decode()
        try:
            return await self._transport.handle_async_request(request), gateway
        except httpx2.TransportError:
            self.leave(gateway)
            raise

    def leave(self, gateway: httpx2.URL) -> None:
        """Prefer the other gateways to one that failed."""
        if gateway == self._gateways[0]:
            self._gateways.append(self._gateways.pop(0))

    async def aclose(self) -> None:
        await self._transport.aclose()


class EventStream(httpx2.AsyncByteStream):
    """The events of a stream, each whole and once, from as many gateways as it takes."""

    def __init__(
        self,
        transport: ReattachingTransport,
        request: httpx2.Request,
        response: httpx2.Response,
        gateway: httpx2.URL,
    ) -> None:
        self._transport = transport
        self._request = request
        self._gateway = gateway
        self._path = f"/v1/streams/{response.headers['x-kvlane-id']}"
        self._query = f"?form={FORMS.get(request.url.path, 'chat')}"
        self._source = response.stream
        self._last_id = ""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        has_ended = False
        while not has_ended:
            pending = b""
            try:
                assert isinstance(self._source, httpx2.AsyncByteStream)
                async for part in self._source:
                    *events, pending = (pending + part).split(b"\n\n")
                    for event in events:
                        yield event + b"\n\n"
                        self._count(event)
                has_ended = True
            except httpx2.TransportError:
                await self.aclose()
                self._transport.leave(self._gateway)
                await self._resume()

    def _count(self, event: bytes) -> None:
        for line in event.splitlines():
            if line.startswith(b"id: "):
                self._last_id = line.removeprefix(b"id: ").decode()

    async def _resume(self) -> None:
        url = self._request.url.copy_with(raw_path=(self._path + self._query).encode())
        keys = ("authorization", "x-api-key")
        headers = {name: value for name, value in self._request.headers.items() if name in keys}
        if self._last_id:
            headers["last-event-id"] = self._last_id
        extensions = self._request.extensions
        request = httpx2.Request("GET", url, headers=headers, extensions=extensions)
        response, self._gateway = await self._transport.send(request)
        self._source = response.stream
        if response.status_code != HTTPStatus.OK:
            raise httpx2.RemoteProtocolError(f"{response.status_code} of {url}")

    async def aclose(self) -> None:
        assert isinstance(self._source, httpx2.AsyncByteStream)
        await self._source.aclose()


async def main(gateways: Sequence[str]) -> None:
    http = httpx2.AsyncClient(transport=ReattachingTransport(gateways), timeout=600)
    async with AsyncOpenAI(base_url=f"{gateways[0]}/v1", api_key="-", http_client=http) as client:
        model = (await client.models.list()).data[0].id
        events = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Why is it blue?"}], stream=True
        )
        async for event in events:
            print(event.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["http://127.0.0.1:8000"]))
