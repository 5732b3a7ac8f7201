"""Test of the console in a headless Chromium, on a real Kafka, with names that are markup."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import encode, pack_tokens
from kvlane.streams.ports import Log
from kvlane.streams.records import EngineConfig, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import REGISTRY, REQUESTS
from tests.harness.browser import BrowserPage, browser_page, find_chromium
from tests.harness.http_harness import HttpHarness, until
from tests.harness.kafka_processes import provisioned
from tests.harness.key_files import KeyFileHarness, auth_headers

HOSTILE = '<img src=x onerror="window.pwned=1">\u202e'
CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  let least = 99;
  for (const node of document.querySelectorAll("th, td, h2, small, b, .pill, button, .tile span")) {
    if (!node.textContent.trim()) continue;
    const [a, z] = [light(getComputedStyle(node).color), light(back(node))].sort((x, y) => x - y);
    least = Math.min(least, (z + 0.05) / (a + 0.05));
  }
  return least;
})()"""  # noqa: E501

pytestmark = pytest.mark.slow


def text(selector: str) -> str:
    return f"document.querySelector({selector!r})?.textContent"


async def sign_in(page: BrowserPage, key: str) -> None:
    await page.wait_for("document.querySelector('#key-dialog').open")
    await page.type(key)
    await page.press("Enter")
    await page.wait_for("document.querySelector('.tile')")


async def use_by_keyboard(page: BrowserPage, request_id: str) -> None:
    """Each view by its key; the request from the list to its life and back."""
    await page.press("2")
    await page.wait_for("document.querySelector('[aria-pressed=true]')?.textContent === 'open'")
    await page.press("e")
    await page.wait_for(f"{text('tr.row td')} === {request_id!r}")
    await page.press("j")
    await page.wait_for("document.activeElement.matches('tr.row[aria-selected=true]')")
    await page.press("Enter")
    await page.wait_for("document.querySelector('svg[aria-label^=Timeline]')")
    life = await page.evaluate("document.querySelector('#panel').textContent")
    assert "Decision: w1" in life
    assert "Finished" in life
    assert "Ottilie" not in life
    await page.press("Escape")
    await page.wait_for("document.querySelector('[aria-pressed=true]')")
    await page.press("3")
    await page.wait_for(f"{text('#panel h2 .mono')} === 'w1'")
    await page.press("4")
    await page.wait_for("document.querySelectorAll('.charts svg[role=img]').length === 6")
    await page.press("5")
    await page.wait_for("document.querySelectorAll('#panel section').length === 4")
    await page.press("6")
    await page.wait_for(f"({text('#panel')} ?? '').includes('has no ready worker')")
    await page.press("?")
    await page.wait_for("document.querySelector('#help-dialog').open")
    await page.press("Escape")
    await page.press("1")
    await page.wait_for("document.querySelector('.tile')")
    await page.press("/")
    await page.type("no such worker")
    await page.wait_for(f"({text('#panel')} ?? '').includes('No worker is registered')")
    await page.press("Escape")
    await page.wait_for("document.querySelector('tr.row')")


@asynccontextmanager
async def deployment(settings: Mapping[str, Any]) -> AsyncIterator[HttpHarness]:
    """A router, a worker and a gateway, each with a connection of its own."""
    logs: list[Log] = []

    async def connect(name: str) -> Log:
        log = open_log(harness.settings, name)
        logs.append(log)
        await log.start()
        return log

    harness = HttpHarness(connect, **settings)
    try:
        await harness.start_worker("w1", lambda ctx: EchoEngine(ctx.clock, 0.01, model="demo"))
        await harness.open()
        await until(lambda: bool(harness.gateway.parts.served_models.models()))
        yield harness
        await harness.close()
    finally:
        for ctx in harness.contexts:
            await ctx.cancel_tasks()
        for log in logs:
            await log.close()


async def test_operator_sees_the_fleet_in_a_browser(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    if find_chromium() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    keys = KeyFileHarness(tmp_path)
    user, operator = keys.add("acme"), keys.add("ops", "operator")
    settings = {
        "bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": topic_prefix, "lanes": 2,
        "status_port": None, "console": True, "worker_timeout_s": 2, "heartbeat_interval_s": 0.5,
        "router_id": "r1", "cache_dir": tmp_path / "cache", **keys.settings,
    }  # fmt: skip
    async with provisioned(Settings(**settings)) as log, deployment(settings) as parts:
        url = parts.gateway.url
        card = WorkerCard(id=HOSTILE, slot=1, model=HOSTILE, config=EngineConfig(model=HOSTILE))
        epoch = (await log.append(REGISTRY, encode(card, f"worker/{HOSTILE}"))).offset
        await log.append(REGISTRY, encode(replace(card, epoch=epoch), f"worker/{HOSTILE}"))
        ask = Request(id=HOSTILE, model=HOSTILE, token_ids=pack_tokens([1, 2]))
        await log.append(REQUESTS, encode(ask, HOSTILE))
        async with httpx.AsyncClient(base_url=url, headers=auth_headers(user)) as http:
            messages = [{"role": "user", "content": "my cat is called Ottilie"}]
            body = {"model": "demo", "messages": messages}
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        async with browser_page(tmp_path) as page:
            await page.open(f"{url}/console")
            await sign_in(page, operator)
            shown = await page.wait_for(
                "[...document.querySelectorAll('tr.row')].map((r) => r.dataset.key)"
                ".filter((key) => key.includes('img'))[0]"
            )
            assert shown == HOSTILE.replace("\u202e", "\ufffd")
            contrasts = []
            for scheme in ("light", "dark"):
                await page.set_scheme(scheme)
                contrasts.append(await page.evaluate(CONTRAST))
            assert min(contrasts) >= 4.5
            await use_by_keyboard(page, answer.headers["x-kvlane-id"])
            await page.evaluate(f"location.hash = '#/request/' + encodeURIComponent({HOSTILE!r})")
            await page.wait_for("document.querySelector('.facts')")
            assert await page.evaluate("document.images.length + (window.pwned ?? 0)") == 0
            assert [p for p in page.problems if "/api/" not in p] == [], "but 401 without a key"
            assert {each.partition("/console")[0] for each in page.requested} == {url}
