"""Tests of the console of a gateway, with the log in memory: access, data, and its reader."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.http.console.console_endpoint import console_files
from kvlane.app.http.console.live_fleet import IDLE_S, MAX_ANSWERS, RETRY_S, LiveFleet
from kvlane.app.settings import SettingsError
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.http_exchange import HttpExchange
from tests.harness.key_files import KeyFileHarness, auth_headers
from tests.harness.memory_world import MemoryWorld, scenario_test

ROOT = Path(__file__).resolve().parents[2]
API = "/console/api"
DATA = ("fleet", "requests", "requests/some-id", "decisions", "queue")
SECRET_TEXT = "my cat is called Ottilie"
HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


async def get(harness: GatewayHarness, path: str, **headers: str) -> HttpExchange:
    return await harness.send("GET", path, headers=headers).wait_done()


async def live(harness: GatewayHarness, path: str) -> Any:
    """An answer of the console, once its reader has caught up."""
    for _ in range(100):
        answer = (await get(harness, f"{API}/{path}")).json
        if answer["reader"]["state"] == "live":
            return answer
        await harness.world.sleep(0.2)
    raise AssertionError(answer)


def fleet_of(harness: GatewayHarness) -> LiveFleet:
    (route,) = (r for r in harness.gateway.http.routes if r.path == f"{API}/fleet")  # type: ignore[attr-defined]
    found = route.endpoint.__self__._live  # type: ignore[attr-defined]
    assert isinstance(found, LiveFleet)
    return found


# --- access ---------------------------------------------------------------------------------------


@scenario_test
async def test_gateway_has_no_console_by_default(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for path in ("/console", "/console/", "/console/app.js", f"{API}/fleet"):
        assert (await get(harness, path)).status == 404


@scenario_test
async def test_console_needs_keys_where_other_machines_reach_it(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    with pytest.raises(SettingsError, match="KVLANE_CONSOLE=true shows the traffic of all tenants"):
        await GatewayHarness.open(
            world, console=True, http_host="0.0.0.0", http_allow_anonymous=True, stream_secret="s"
        )
    await GatewayHarness.open(world, console=True, http_host="0.0.0.0", **keys.settings)


@scenario_test
async def test_data_need_the_key_of_an_operator_and_files_none(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    user, operator = keys.add("acme"), keys.add("ops", "operator")
    metrics = keys.add("ops", "metrics")
    harness = await GatewayHarness.open(world, console=True, **keys.settings)
    for name in DATA:
        path = f"{API}/{name}"
        assert (await get(harness, path)).status == 401
        assert (await get(harness, path, **auth_headers(user))).status == 403
        assert (await get(harness, path, **auth_headers(metrics))).status == 403
        assert (await get(harness, path, **auth_headers(operator))).status == 200
    for name in ("", *console_files()):
        answer = await get(harness, f"/console/{name}")
        assert answer.status == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await get(harness, "/console/../keys.json")).status == 401
    assert (await get(harness, "/console/nothing.js", **auth_headers(operator))).status == 404


@scenario_test
async def test_page_of_another_origin_gets_no_data(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world, console=True, http_allowed_origins="*")
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert (await get(harness, f"{API}/fleet", **{"sec-fetch-site": site})).status == status


@scenario_test
async def test_console_is_found_behind_a_path_prefix(world: MemoryWorld) -> None:
    """A proxy that takes a prefix off sends the browser on to the same prefix."""
    harness = await GatewayHarness.open(world, console=True)
    assert (await get(harness, "/console")).headers["location"] == "console/"
    page = (await get(harness, "/console/")).content.decode()
    assert re.findall(r'(?:src|href)="(/|https?:)', page) == []


# --- data -----------------------------------------------------------------------------------------


@scenario_test
async def test_console_shows_what_the_commands_show_without_texts(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world, console=True)
    await harness.chat(SECRET_TEXT).wait_done()
    (request,) = harness.requests()
    fleet = await live(harness, "fleet")
    assert [(w["id"], w["state"]) for w in fleet["workers"]] == [("w1", "ready")]
    assert fleet["status"]["alarms"] == []
    assert sum(point["ended_rate"] for point in fleet["points"]) == 0.2, "one in 5 s"
    assert [p["ttft_p50"] for p in fleet["points"] if p["ttft_p50"] is not None]
    ended = await live(harness, "requests?shown=ended")
    assert [(r["id"], r["code"]) for r in ended["requests"]] == [(request.id, "stop")]
    assert (await live(harness, "requests?shown=ended&model=other"))["requests"] == []
    (decision,) = (await live(harness, "decisions"))["decisions"]
    assert (decision["id"], decision["worker"]) == (request.id, "w1")
    assert decision["words"] == "the only candidate"
    assert [c["is_chosen"] for c in decision["candidates"]] == [True]
    assert (await live(harness, "decisions?after=1"))["decisions"] == []
    life = (await get(harness, f"{API}/requests/{request.id}")).json
    names = [step["name"] for step in life["steps"]]
    assert {"Request", "Assigned", "Started", "Finished", "Shown"} <= set(names)
    queue = await live(harness, "queue")
    assert [lane["router"] for lane in queue["lanes"]] == ["-"] * world.lanes
    for path in ("fleet", "requests?shown=ended", "decisions", "queue", f"requests/{request.id}"):
        content = (await get(harness, f"{API}/{path}")).content
        assert SECRET_TEXT.encode() not in content
        assert b"token_ids" not in content


@scenario_test
async def test_decision_has_its_runner_up_and_the_terms_of_both(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world, console=True)
    await harness.start_worker("w2")
    await world.sleep(2)
    await harness.chat("hello").wait_done()
    (decision,) = (await live(harness, "decisions"))["decisions"]
    assert {decision["worker"], decision["runner_up"]} == {"w1", "w2"}
    first, second = decision["candidates"]
    assert first["terms"].keys() == second["terms"].keys()
    assert decision["lost_by"] == pytest.approx(abs(second["cost"] - first["cost"]))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("requests?shown=all", 400), ("decisions?after=-1", 400), ("decisions?after=x", 400),
        (f"requests/{'x' * 300}", 400), ("nothing", 404), (f"requests/{HOSTILE}", 200),
    ],
)  # fmt: skip
def test_bad_question_is_refused(path: str, status: int) -> None:
    @scenario_test
    async def ask(world: MemoryWorld) -> None:
        harness = await GatewayHarness.with_backend(world, console=True)
        assert (await get(harness, f"{API}/{path}")).status == status

    ask()


# --- the reader -----------------------------------------------------------------------------------


@scenario_test
async def test_reader_runs_only_while_a_page_asks(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world, console=True)
    await harness.chat("hello").wait_done()
    await live(harness, "fleet")
    fleet = fleet_of(harness)
    for _ in range(40):
        await world.sleep(1)
        await live(harness, "fleet")
    assert fleet.is_reading
    await world.sleep(IDLE_S + 3)
    assert not fleet.is_reading
    assert fleet._reader is None
    assert fleet._activity.decisions == 0
    assert len((await live(harness, "requests?shown=ended"))["requests"]) == 1, "it reads again"


@scenario_test
async def test_pages_share_a_reader_and_an_answer(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world, console=True)
    await live(harness, "fleet")
    fleet = fleet_of(harness)
    task = fleet._task
    answers = {(await get(harness, f"{API}/fleet")).content for _ in range(50)}
    assert len(answers) == 1
    for number in range(5 * MAX_ANSWERS):
        await get(harness, f"{API}/requests?model=m{number}")
    assert len(fleet._answers) <= MAX_ANSWERS
    assert fleet._task is task


@scenario_test
async def test_error_of_the_reader_is_shown_and_leaves_the_gateway_alone(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world, console=True)
    await live(harness, "fleet")
    world.faults.unanswered.add("offsets")
    for _ in range(200):
        state = (await get(harness, f"{API}/fleet")).json["reader"]
        if state["state"] == "failed":
            break
        await world.sleep(0.5)
    assert "BrokerUnavailable" in state["message"]
    assert "KVLANE_BOOTSTRAP_SERVERS" in state["correction"]
    assert harness.ctx.error is None
    world.faults.unanswered.clear()
    await world.sleep(RETRY_S)
    await live(harness, "fleet")
    assert (await harness.chat("hello").wait_done()).status == 200


# --- the files ------------------------------------------------------------------------------------


def test_files_of_the_page_are_small_in_the_wheel_and_need_no_network() -> None:
    found = console_files()
    assert sum(len(content) for content, _ in found.values()) <= 60_000
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["kvlane.app"]
    folder = ROOT / "app" / "data" / "console"
    assert {file.name for file in folder.iterdir()} == found.keys()
    for name, (content, _) in found.items():
        assert any(fnmatch(f"data/console/{name}", pattern) for pattern in patterns)
        urls = re.findall(rb"https?://[^\"'\s)]+", content)
        assert set(urls) <= {b"http://www.w3.org/2000/svg"}
        for dangerous in (
            b"innerHTML",
            b"insertAdjacentHTML",
            b"document.write",
            b"eval(",
            b"style=",
        ):
            assert dangerous not in content, name
