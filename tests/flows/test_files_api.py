"""Tests of the Files API at the gateway, on the log in memory: content, lists, tenants and
bounds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.http.batches.files_endpoint import MAX_TRANSFERS
from kvlane.app.http.batches.multipart_upload import STALL_TIMEOUT_S
from kvlane.streams.codecs import PART_BYTES
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.topics import FILE_PARTS, FILE_RETENTION_MS
from tests.harness.batch_harness import BOUNDARY, FORM, form
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.http_exchange import HttpExchange
from tests.harness.key_files import KeyFileHarness, auth_headers
from tests.harness.memory_world import MemoryWorld, scenario_test

LINES = b'{"custom_id": "a"}\n' * 3


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


def upload(
    harness: GatewayHarness, content: bytes | None, headers: Mapping[str, str] = {}, **fields: str
) -> HttpExchange:
    body = form(content, **fields)
    return HttpExchange(harness.gateway.http, "POST", "/v1/files", body, {**FORM, **headers})


async def uploaded(harness: GatewayHarness, content: bytes, token: str = "") -> dict[str, Any]:
    headers = auth_headers(token) if token else {}
    answer = await upload(harness, content, headers).wait_done()
    assert answer.status == 200, answer.content
    got: dict[str, Any] = answer.json
    return got


async def get(harness: GatewayHarness, path: str, token: str = "") -> HttpExchange:
    headers = auth_headers(token) if token else {}
    return await harness.send("GET", f"/v1/files{path}", headers=headers).wait_done()


def kept_parts(world: MemoryWorld) -> set[bytes]:
    """Keys of the parts that are left after compaction."""
    last = {record.key: record.value for record in world.all_records(FILE_PARTS)}
    return {key for key, value in last.items() if key is not None and value is not None}


def replace_part(record: MemoryRecord, key: bytes | None, value: bytes | None) -> MemoryRecord:
    return record._replace(key=key, value=value)


def big(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# --- content --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 7])
@scenario_test
async def test_file_comes_back_as_it_was_uploaded(world: MemoryWorld, size: int) -> None:
    harness = await GatewayHarness.open(world)
    content = big(size, size)
    file = await uploaded(harness, content)
    assert file["bytes"] == size
    assert (file["object"], file["purpose"], file["status"]) == ("file", "batch", "processed")
    assert file["filename"] == "in.jsonl"
    assert file["expires_at"] - file["created_at"] == FILE_RETENTION_MS // 1000
    other = await GatewayHarness.open(world, "g2")
    for each in (harness, other):
        answer = await get(each, f"/{file['id']}/content")
        assert answer.status == 200
        assert answer.headers["content-length"] == str(size)
        assert answer.content == content
        assert (await get(each, f"/{file['id']}")).json == file
    assert all(len(r.value or b"") <= PART_BYTES for r in world.all_records(FILE_PARTS))


@scenario_test
async def test_files_in_one_partition_do_not_mix(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    contents = [big(n, 3 * PART_BYTES + n) for n in range(4)]
    uploads = [upload(harness, content) for content in contents]
    files = [(await each.wait_done()).json["id"] for each in uploads]
    for name, content in zip(files, contents, strict=True):
        assert (await get(harness, f"/{name}/content")).content == content


@scenario_test
async def test_repeated_append_is_visible_once(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    content = big(1, 3 * PART_BYTES)
    world.faults.next_fates(FILE_PARTS, AppendFate.KEPT, AppendFate.UNREPORTED)
    file = await uploaded(harness, content)
    assert len(world.all_records(FILE_PARTS)) == 4
    assert (await get(harness, f"/{file['id']}/content")).content == content


@pytest.mark.parametrize("fate", [AppendFate.OVERTAKEN, AppendFate.TWICE, AppendFate.UNREPORTED])
@pytest.mark.parametrize("size", [10, 3_500_000])
@scenario_test
async def test_repeated_parts_survive_compaction(
    world: MemoryWorld, fate: AppendFate, size: int
) -> None:
    """Wherever the repetition of a part is in the log: beside it, behind others, behind the end."""
    harness = await GatewayHarness.open(world)
    world.faults.late = 3.0
    world.faults.slow["append"] = 0.5
    fates = [AppendFate.KEPT] * (size // PART_BYTES)
    for place in range(len(fates) + 1):
        world.faults.next_fates(FILE_PARTS, *fates[:place], fate, *fates[place:])
        file = await uploaded(harness, big(place, size))
        await world.sleep(5)
        assert not world.faults.fates[FILE_PARTS]
        world.broker.compact_all(lag_ms=1000)
        answer = await get(harness, f"/{file['id']}/content")
        assert answer.content == big(place, size), answer.status


@scenario_test
async def test_part_behind_the_next_one_is_read_in_its_place(world: MemoryWorld) -> None:
    """As earlier versions wrote it, and compaction left it: each attempt under the same key."""
    harness = await GatewayHarness.open(world)
    content = big(7, 3 * PART_BYTES)
    file = await uploaded(harness, content)
    parts = [r for r in world.all_records(FILE_PARTS) if r.key]
    log = world.broker.log(FILE_PARTS, parts[0].partition)
    values = [parts[n] for n in (1, 2, 0)]
    log.records = [replace_part(r, of.key, of.value) for r, of in zip(parts, values, strict=True)]
    assert (await get(harness, f"/{file['id']}/content")).content == content
    del log.records[2]
    answer = await get(harness, f"/{file['id']}/content")
    assert (answer.status, answer.error["code"]) == (410, "file_damaged")


@scenario_test
async def test_body_arrives_in_pieces_of_any_size(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    content = big(2, 300_000).replace(b"a", b"\r\n--a")
    body = form(content)
    rng = random.Random(5)
    answer = HttpExchange(harness.gateway.http, "POST", "/v1/files", None, FORM, upload=False)
    while body:
        size = rng.choice((1, 2, 30, 5000, 100_000))
        answer.upload(body[:size], more=len(body) > size)
        body = body[size:]
        await world.sleep(0)
    await answer.wait_done()
    got = (await get(harness, f"/{answer.json['id']}/content")).content
    assert hashlib.sha256(got).hexdigest() == hashlib.sha256(content).hexdigest()


@scenario_test
async def test_fields_may_follow_the_file(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    mark = f"--{BOUNDARY}\r\ncontent-disposition: form-data; "
    body = f'{mark}name="file"; filename="x"\r\n\r\nabc\r\n{mark}name="purpose"\r\n\r\nbatch\r\n'
    body += f"--{BOUNDARY}--\r\n"
    answer = HttpExchange(harness.gateway.http, "POST", "/v1/files", body.encode(), FORM)
    await answer.wait_done()
    assert (answer.status, answer.json["bytes"]) == (200, 3)


@scenario_test
async def test_damaged_content_is_no_answer(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    file = await uploaded(harness, LINES)
    (part,) = [r for r in world.all_records(FILE_PARTS) if r.key]
    world.broker.delete_records(FILE_PARTS, part.partition, part.offset + 1)
    answer = await get(harness, f"/{file['id']}/content")
    assert (answer.status, answer.error["code"]) == (410, "file_damaged")


# --- lists ----------------------------------------------------------------------------------------


@scenario_test
async def test_files_are_listed_in_pages(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    assert (await get(harness, "")).json["data"] == []
    names = []
    for _ in range(5):
        names.append((await uploaded(harness, LINES))["id"])
        await world.sleep(1)
    newest_first = names[::-1]
    first = (await get(harness, "?limit=2")).json
    assert [f["id"] for f in first["data"]] == newest_first[:2]
    assert first["has_more"]
    assert (first["first_id"], first["last_id"]) == (newest_first[0], newest_first[1])
    rest = (await get(harness, f"?limit=3&after={first['last_id']}")).json
    assert [f["id"] for f in rest["data"]] == newest_first[2:]
    assert not rest["has_more"]
    oldest = (await get(harness, "?order=asc&limit=1")).json
    assert [f["id"] for f in oldest["data"]] == names[:1]
    assert (await get(harness, "?purpose=batch_output")).json["data"] == []
    for wrong in ("limit=0", "limit=x", "limit=10001", "order=up"):
        answer = await get(harness, f"?{wrong}")
        assert (answer.status, answer.error["param"]) == (400, wrong.partition("=")[0])


@scenario_test
async def test_deleted_file_is_gone_with_its_content(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    other = await GatewayHarness.open(world, "g2")
    file = await uploaded(harness, big(3, 2 * PART_BYTES))
    kept = await uploaded(harness, LINES)
    path = f"/v1/files/{file['id']}"
    answer = await other.send("DELETE", path).wait_done()
    assert answer.json == {"id": file["id"], "object": "file", "deleted": True}
    await world.sleep(1)
    for each in (harness, other):
        assert [f["id"] for f in (await get(each, "")).json["data"]] == [kept["id"]]
        for tail in ("", "/content"):
            gone = await get(each, f"/{file['id']}{tail}")
            assert (gone.status, gone.error["code"]) == (404, "file_not_found")
    assert {key.split(b"/")[0] for key in kept_parts(world)} == {kept["id"].encode()}
    assert (await other.send("DELETE", path).wait_done()).status == 404


# --- tenants --------------------------------------------------------------------------------------


@scenario_test
async def test_files_of_another_tenant_do_not_exist(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex", "operator")
    harness = await GatewayHarness.open(world, **keys.settings)
    file = await uploaded(harness, LINES, ours)
    for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        path = f"/v1/files/{file['id']}{tail}"
        answer = await harness.send(method, path, headers=auth_headers(theirs)).wait_done()
        assert (answer.status, answer.error["code"]) == (404, "file_not_found")
        nobody = await harness.send(method, path).wait_done()
        assert nobody.status == 401
    assert (await get(harness, "", theirs)).json["data"] == []
    assert [f["id"] for f in (await get(harness, "", ours)).json["data"]] == [file["id"]]
    assert (await get(harness, f"/{file['id']}/content", ours)).content == LINES


@scenario_test
async def test_files_of_a_tenant_have_a_size(world: MemoryWorld, keys: KeyFileHarness) -> None:
    token = keys.add("acme")
    keys.limit("acme", file_bytes=100)
    harness = await GatewayHarness.open(world, **keys.settings)
    await uploaded(harness, b"x" * 60, token)
    answer = await upload(harness, b"x" * 41, auth_headers(token)).wait_done()
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    last = await uploaded(harness, b"x" * 40, token)
    answer = await upload(harness, b"x", auth_headers(token)).wait_done()
    assert (answer.status, answer.error["code"]) == (429, "file_quota_exceeded")
    assert harness.gateway.parts.metrics.refused_requests.labels("file_bytes").value == 1
    path = f"/v1/files/{last['id']}"
    await harness.send("DELETE", path, headers=auth_headers(token)).wait_done()
    await uploaded(harness, b"x", token)


@pytest.mark.parametrize("gateways", [1, 2])
@scenario_test
async def test_size_of_files_holds_for_uploads_at_the_same_time(
    world: MemoryWorld, keys: KeyFileHarness, gateways: int
) -> None:
    token = keys.add("acme")
    keys.limit("acme", file_bytes=2_500_000)
    doors = [await GatewayHarness.open(world, f"g{n}", **keys.settings) for n in range(gateways)]
    world.faults.slow["append"] = 0.2
    many = [
        upload(door, big(n, 1_200_000), auth_headers(token)) for n in range(4) for door in doors
    ]
    for each in many:
        await each.wait_done()
    kept = [each.json["id"] for each in many if each.status == 200]
    assert len(kept) == 2
    assert {each.error["code"] for each in many if each.status != 200} <= {
        "file_quota_exceeded",
        "too_large",
    }
    assert {key.split(b"/")[0].decode() for key in kept_parts(world)} == set(kept)
    later = await GatewayHarness.open(world, "later", **keys.settings)
    assert {each["id"] for each in (await get(later, "", token)).json["data"]} == set(kept)
    gone = await later.send(
        "DELETE", f"/v1/files/{kept[0]}", headers=auth_headers(token)
    ).wait_done()
    assert gone.status == 200
    await uploaded(later, big(9, 1_200_000), token)


@scenario_test
async def test_transfers_of_a_tenant_leave_room_for_others(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    harness = await GatewayHarness.open(world, **keys.settings)
    headers = FORM | auth_headers(theirs)
    for _ in range(MAX_TRANSFERS):
        HttpExchange(harness.gateway.http, "POST", "/v1/files", None, headers, upload=False)
    await world.sleep(1)
    answer = await upload(harness, LINES, auth_headers(theirs)).wait_done()
    assert (answer.status, answer.error["code"]) == (529, "overloaded")
    await uploaded(harness, LINES, ours)


# --- bad uploads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(None), "file"),
        (form(LINES, purpose="fine-tune"), "purpose"),
        (form(LINES)[:-30], None),
        (form(LINES).replace(BOUNDARY.encode(), b"other"), None),
        (b"", None),
        (form(LINES, note="x" * 9000), None),
        (form(LINES).replace(b"purpose", b"p\xff\xfe"), "file"),
        (form(LINES, note="x").replace(b"\r\nx\r\n", b"\r\n\xff\r\n"), None),
    ],
)
@scenario_test
async def test_bad_body_is_refused_and_leaves_nothing(
    world: MemoryWorld, body: bytes, param: str | None
) -> None:
    harness = await GatewayHarness.open(world)
    answer = await HttpExchange(harness.gateway.http, "POST", "/v1/files", body, FORM).wait_done()
    assert answer.status == 400, answer.content
    if param:
        assert answer.error["param"] == param
    assert kept_parts(world) == set()
    assert (await get(harness, "")).json["data"] == []


@pytest.mark.parametrize(
    "name",
    [
        b'"\xff\xfe"',
        b'"\xed\xa0\x80"',
        b'"a\xe9.jsonl"',
        b'"\xc3"',
        b'"a\x00b"',
        b'"\xf8\x88\x80\x80"',
    ],
)
@scenario_test
async def test_file_name_that_is_no_text_is_refused_before_its_content(
    world: MemoryWorld, name: bytes
) -> None:
    harness = await GatewayHarness.open(world)
    body = form(LINES).replace(b'"in.jsonl"', name)
    answer = await HttpExchange(harness.gateway.http, "POST", "/v1/files", body, FORM).wait_done()
    assert answer.status == 400, answer.content
    assert world.all_records(FILE_PARTS) == []


@pytest.mark.parametrize(
    "name", ["é.jsonl", "日本.jsonl", "%ff", "../a b", "\U0001f600", "a" * 300]
)
@scenario_test
async def test_file_name_of_any_text_is_kept(world: MemoryWorld, name: str) -> None:
    harness = await GatewayHarness.open(world)
    body = form(LINES, filename=name)
    answer = await HttpExchange(harness.gateway.http, "POST", "/v1/files", body, FORM).wait_done()
    assert answer.status == 200, answer.content
    got = (await get(harness, f"/{answer.json['id']}")).json["filename"]
    assert got == name[:255]


@scenario_test
async def test_file_above_the_limit_is_refused(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world, http_max_file_bytes=2 * PART_BYTES)
    await uploaded(harness, bytes(2 * PART_BYTES))
    parts = kept_parts(world)
    answer = await upload(harness, bytes(2 * PART_BYTES + 1)).wait_done()
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    assert kept_parts(world) == parts
    announced = {**FORM, "content-length": "900000000"}
    early = HttpExchange(harness.gateway.http, "POST", "/v1/files", None, announced, upload=False)
    await early.wait_done()
    assert early.status == 413


@scenario_test
async def test_file_is_sent_as_multipart(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    answer = await harness.send("POST", "/v1/files", {"file": "x"}).wait_done()
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_type")


@scenario_test
async def test_client_that_leaves_or_stops_leaves_nothing(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    body = form(bytes(2 * PART_BYTES))
    left, stuck = (
        HttpExchange(harness.gateway.http, "POST", "/v1/files", None, FORM, upload=False)
        for _ in range(2)
    )
    for each in (left, stuck):
        each.upload(body[: PART_BYTES + 200_000], more=True)
    await world.sleep(1)
    assert len(kept_parts(world)) == 2
    left.disconnect()
    await left.task
    await world.sleep(1)
    assert len(kept_parts(world)) == 1
    await world.sleep(STALL_TIMEOUT_S)
    await stuck.wait_done()
    assert (stuck.status, stuck.error["code"]) == (408, "body_timeout")
    assert kept_parts(world) == set()


@scenario_test
async def test_transfers_at_a_time_are_bounded(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    slow = [
        HttpExchange(harness.gateway.http, "POST", "/v1/files", None, FORM, upload=False)
        for _ in range(MAX_TRANSFERS)
    ]
    await world.sleep(1)
    answer = await upload(harness, LINES).wait_done()
    assert (answer.status, answer.error["code"]) == (529, "overloaded")
    for each in slow:
        each.disconnect()
    await world.sleep(1)
    assert (await upload(harness, LINES).wait_done()).status == 200


@scenario_test
async def test_upload_without_a_broker_gets_retry_after(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    world.faults.next_fates("batch-jobs", *[AppendFate.LOST] * 100)
    answer = await upload(harness, LINES).wait_done()
    assert (answer.status, answer.error["code"]) == (503, "log_unavailable")
    assert "retry-after" in answer.headers
