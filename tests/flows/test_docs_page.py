"""Test of the page `/docs` in a headless Chromium, with API keys and the log in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from tests.harness.browser import browser_page, find_chromium
from tests.harness.http_harness import HttpHarness, connect_to
from tests.harness.key_files import KeyFileHarness

pytestmark = pytest.mark.slow


async def test_page_lists_every_operation_without_a_key_and_without_other_hosts(
    tmp_path: Path,
) -> None:
    if find_chromium() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    keys = KeyFileHarness(tmp_path)
    keys.add("acme")
    harness = HttpHarness(
        connect_to(MemoryBroker(SystemClock(), lanes=1)), lanes=1, **keys.settings
    )
    await harness.open()
    url = harness.gateway.url
    paths = harness.gateway.http.openapi()["paths"]
    operations = sorted((method, path) for path, each in paths.items() for method in each)
    async with browser_page(tmp_path) as page:
        await page.open(f"{url}/docs")
        await page.wait_for(f"document.querySelectorAll('.opblock').length === {len(operations)}")
        shown = await page.evaluate(
            "[...document.querySelectorAll('.opblock-summary')].map((each) => ["
            "each.querySelector('.opblock-summary-method').textContent.toLowerCase(), "
            "each.querySelector('[data-path]').dataset.path])"
        )
        assert sorted(map(tuple, shown)) == operations
        await page.evaluate(
            "document.querySelector('.opblock-post .opblock-summary-control').click()"
        )
        await page.wait_for(
            "document.querySelector('.opblock.is-open .opblock-body .responses-wrapper')"
        )
        assert page.problems == []
        hosts = {
            each.partition("/docs")[0].removesuffix("/openapi.json") for each in page.requested
        }
        assert {each for each in hosts if not each.startswith("data:")} == {url}
    await harness.close()
