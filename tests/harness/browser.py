"""A headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_S = 30.0
_KEYS = {"Escape": 27, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}


def find_chromium() -> str | None:
    """The browser, if it runs here; it may be in the midst of its installation."""
    path = shutil.which("chromium")
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=20)
    return path if done.returncode == 0 else None


class BrowserPage:
    """One page. `problems`: errors of scripts, and of the console, the policy's among them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def receive(self) -> None:
        async for message in self._socket:
            body = json.loads(message.data)
            if "id" in body:
                self._answers.pop(body["id"]).set_result(body)
                continue
            name, params = body.get("method"), body.get("params", {})
            if name == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:1000])
            elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
            elif name == "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = future = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        body = await asyncio.wait_for(future, 20)
        assert "error" not in body, (method, body["error"])
        return body["result"]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.wait_for("location.protocol !== 'about:' && document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        found = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait_for(self, script: str, within_s: float = 20.0) -> Any:
        """The value of an expression, once it is true."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not (value := await self.evaluate(f"({script}) instanceof Node || ({script})")):
            if loop.time() > until:
                page = await self.evaluate("document.body.innerText")
                raise AssertionError(f"never true: {script}\n{self.problems[:5]}\n{page[:2000]}")
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        code = _KEYS.get(key, ord(key[0]))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def set_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser_page(
    folder: Path, width: int = 1280, height: int = 800
) -> AsyncIterator[BrowserPage]:
    """A page of a new browser, whose profile is in the folder."""
    path = find_chromium()
    assert path is not None
    process = await asyncio.create_subprocess_exec(
        path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-default-apps", "--disable-extensions", "--disable-sync", "--mute-audio",
        "--hide-scrollbars", "--remote-debugging-port=0", f"--window-size={width},{height}",
        f"--user-data-dir={folder / 'profile'}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)}, start_new_session=True,
    )  # fmt: skip
    try:
        port = await _port(folder / "profile" / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            target = next(each for each in targets if each["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = BrowserPage(socket)
                receiving = asyncio.create_task(page.receive())
                try:
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Emulation.setDeviceMetricsOverride", width=width, height=height,
                        deviceScaleFactor=1, mobile=False,
                    )  # fmt: skip
                    yield page
                finally:
                    receiving.cancel()
                    await asyncio.gather(receiving, return_exceptions=True)
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while not (file.exists() and (content := file.read_text().split())):
        assert process.returncode is None, "Chromium has ended"
        assert loop.time() < until, "Chromium does not start"
        await asyncio.sleep(0.05)
    return int(content[0])
