"""Tests of the wire format: golden bytes of every type, tolerated differences, and refusal of
all else.

A change that makes a golden case fail breaks records that are in a log already: it needs a new
topic name, not new bytes here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvlane.streams import codecs, record_base, response_records
from kvlane.streams import records as r
from kvlane.streams import request as q
from kvlane.streams.codecs import (
    AnyRecord,
    decode,
    encode,
    pack_tokens,
    token_count,
    type_of,
    unpack_tokens,
)
from kvlane.streams.errors import Malformed, NewerRecord, UnknownType
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry, Unreadable
from kvlane.streams.prompt import Prompt, encode_prompt
from kvlane.streams.record_types.candidate_records import ROW, TIMED_ROW
from tests.harness.golden_records import (
    ALIASED_REQUEST,
    BILLED_REQUEST,
    GOLDEN,
    PARSED_REQUEST,
    QUEUED_REQUEST,
    RENEWED_REQUEST,
    REQUEST,
    TRACED_REQUEST,
    WHOLE_REQUEST,
)

TYPES = (*codecs._INNER, *codecs._PUBLIC)

REQUESTS = (
    REQUEST, WHOLE_REQUEST, QUEUED_REQUEST, TRACED_REQUEST, PARSED_REQUEST, RENEWED_REQUEST,
    ALIASED_REQUEST, BILLED_REQUEST,
)  # fmt: skip


def record(
    value: bytes | None, *headers: tuple[str, bytes | None], key: bytes | None = b"job-17"
) -> MemoryRecord:
    return MemoryRecord("topic", 0, 5, 1000, key, value, headers)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given_record", "value"), GOLDEN, ids=lambda x: type(x).__name__)
def test_golden_bytes_are_written(given_record: AnyRecord, value: bytes) -> None:
    entry = encode(given_record, "job-17")
    assert entry.value == value
    assert entry.key == b"job-17"
    assert entry.headers == (("t", type(given_record).__name__.encode()),)


@pytest.mark.parametrize(("given_record", "value"), GOLDEN, ids=lambda x: type(x).__name__)
def test_golden_bytes_are_read(given_record: AnyRecord, value: bytes) -> None:
    decoded = decode(record(value, ("t", type(given_record).__name__.encode())))
    assert type(decoded) is type(given_record)
    assert decoded == given_record


def test_request_of_an_older_version_is_read() -> None:
    """With few fields a map has a shorter header; what it says is the same."""
    assert decode(record(bytes.fromhex("81a26964a66a6f622d3137"), ("t", b"Request"))) == q.Request(
        id="job-17"
    )


def test_golden_request_sets_every_field() -> None:
    for part in (q.Request, q.StopConditions, q.SamplingOptions, q.Hints, q.OutputOptions):
        for field in msgspec.structs.fields(part):
            values = [
                getattr(part_of(request, part), field.name)
                for request in (
                    REQUEST,
                    WHOLE_REQUEST,
                    QUEUED_REQUEST,
                    TRACED_REQUEST,
                    PARSED_REQUEST,
                    RENEWED_REQUEST,
                    ALIASED_REQUEST,
                    BILLED_REQUEST,
                )
            ]
            assert any(value != field.default for value in values), field.name


def part_of(request: q.Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    parts = (request, request.stop, request.sampling, request.hints, request.output)
    return next(part for part in parts if issubclass(kind, type(part)))


def test_every_type_has_golden_bytes() -> None:
    assert {type(golden) for golden, _ in GOLDEN} == set(TYPES)


# --- tombstones -----------------------------------------------------------------------------------


def test_tombstone_names_the_epoch_it_ends_in_a_header() -> None:
    entry = encode(r.Tombstone(key="worker/w1", epoch=12), "worker/w1")
    assert entry == Entry(b"worker/w1", None, (("t", b"Tombstone"), ("epoch", b"12")))
    assert decode(record(None, *entry.headers, key=entry.key)) == r.Tombstone(
        key="worker/w1", epoch=12
    )


def test_tombstone_needs_no_epoch() -> None:
    entry = encode(r.Tombstone(key="worker/w1"), "worker/w1")
    assert entry == Entry(b"worker/w1", None, (("t", b"Tombstone"),))
    assert decode(record(None, *entry.headers, key=entry.key)) == r.Tombstone(key="worker/w1")


def test_null_value_of_any_client_is_a_tombstone() -> None:
    assert decode(record(None, key=b"worker/w1")) == r.Tombstone(key="worker/w1")


@pytest.mark.parametrize(
    ("key", "epoch"),
    [(None, b"12"), (b"\xff", b"12"), (b"worker/w1", b"x"), (b"worker/w1", b""), (b"w", None)],
)
def test_tombstone_with_an_invalid_key_or_epoch_is_malformed(
    key: bytes | None, epoch: bytes | None
) -> None:
    with pytest.raises(Malformed):
        decode(record(None, ("epoch", epoch), key=key))


def test_tombstone_with_a_value_is_malformed() -> None:
    with pytest.raises(Malformed):
        decode(record(b"{}", ("t", b"Tombstone")))


# --- evolution ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_record", "value"), GOLDEN, ids=lambda x: type(x).__name__)
def test_unknown_fields_are_ignored(given_record: AnyRecord, value: bytes) -> None:
    public = isinstance(given_record, record_base.PublicRecord)
    fields = json.loads(value) if public else msgspec.msgpack.decode(value)
    fields["of_a_newer_version"] = {"nested": [1, None, {"deeper": "x"}]}
    wider = json.dumps(fields).encode() if public else msgspec.msgpack.encode(fields)
    decoded = decode(record(wider, ("t", type(given_record).__name__.encode())))
    assert decoded == given_record


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.__name__)
def test_missing_optional_fields_have_their_defaults(kind: type[AnyRecord]) -> None:
    fields = msgspec.structs.fields(kind)
    golden = next(rec for rec, _ in GOLDEN if type(rec) is kind)
    needed = {f.encode_name: getattr(golden, f.name) for f in fields if f.required}
    encoder = msgspec.json if issubclass(kind, record_base.PublicRecord) else msgspec.msgpack
    decoded = decode(record(encoder.encode(needed), ("t", kind.__name__.encode())))
    for field in fields:
        if not field.required:
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            assert getattr(decoded, field.name) == default, field.name


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.__name__)
def test_missing_needed_fields_are_malformed(kind: type[AnyRecord]) -> None:
    encoder = msgspec.json if issubclass(kind, record_base.PublicRecord) else msgspec.msgpack
    with pytest.raises(Malformed, match=kind.__name__):
        decode(record(encoder.encode({}), ("t", kind.__name__.encode())))


def test_reason_of_a_newer_version_still_ends_a_stream() -> None:
    chunk = b'{"t":"Chunk","id":"a","attempt":0,"run":"1","seq":0,"index":0,"finish_reason":"new"}'
    end = b'{"t":"End","id":"a","code":"a_new_code"}'
    last, ended = decode(record(chunk, ("t", b"Chunk"))), decode(record(end, ("t", b"End")))
    assert isinstance(last, r.Chunk)
    assert isinstance(ended, r.End)
    assert (last.finish_reason, ended.code) == ("new", "a_new_code")


def test_type_of_a_newer_version_is_named() -> None:
    with pytest.raises(UnknownType, match="Shiny") as raised:
        decode(record(b"\x80", ("t", b"Shiny")))
    assert raised.value.type_name == "Shiny"


@pytest.mark.parametrize("kind", [b"Ended", b"Shiny", None])
def test_record_that_is_marked_for_newer_readers_is_refused(kind: bytes | None) -> None:
    mark = ("r", b"%d" % (codecs.RECORD_VERSION + 1))
    with pytest.raises(NewerRecord, match=f"record version {codecs.RECORD_VERSION + 1}") as raised:
        decode(record(b"\x80", ("t", kind), mark))
    assert raised.value.required == codecs.RECORD_VERSION + 1
    assert not isinstance(raised.value, Malformed)


@pytest.mark.parametrize("mark", [b"1", b"0", b"", None, b"-2", b"two", b"\xff", b"9" * 5000])
def test_unknown_mark_header_is_ignored(mark: bytes | None) -> None:
    value = next(value for golden, value in GOLDEN if isinstance(golden, r.Deployment))
    assert isinstance(decode(record(value, ("t", b"Deployment"), ("r", mark))), r.Deployment)


def test_unreadable_record_is_malformed_with_its_reason() -> None:
    with pytest.raises(Malformed, match="larger than a whale"):
        decode(record(Unreadable(b"larger than a whale")))


def test_epoch_of_a_tombstone_fits_into_a_snapshot() -> None:
    gone = decode(record(None, ("epoch", b"9" * 4000)))
    assert isinstance(gone, r.Tombstone)
    assert gone.epoch is not None
    assert gone.epoch < 2**63


def test_type_is_also_in_the_value_where_clients_read() -> None:
    for golden, value in GOLDEN:
        if isinstance(golden, record_base.PublicRecord):
            assert json.loads(value)["t"] == type(golden).__name__


def test_value_of_another_type_than_its_header_is_malformed() -> None:
    with pytest.raises(Malformed):
        decode(record(b'{"t":"Chunk","id":"a","attempt":1}', ("t", b"Fence")))


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": b""}, {"rows": bytes(255)}, {"rows": bytes(257)}, {"places": []},
        {"places": [["w1", 12]] * 2}, {"is_timed": False}, {"curves": [[]]}, {"curves": [[]] * 3},
        {"taint_weights": [0.5] * 3}, {"ahead_ms": {"0": [1.5]}}, {"usual_tokens": [0.5]},
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_their_candidates_are_malformed(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match=r"candidate_rows"):
        decode(record(with_rows(**changed), ("t", b"Assigned")))


def test_further_reservations_and_an_absent_choice_are_tolerated() -> None:
    value = with_rows(ahead_ms={5: [1.5]}, planned_ms={-1: 2.5}, places=[["w2", 7, 0]] * 2)
    decision = decode(record(value, ("t", b"Assigned")))
    assert isinstance(decision, r.Assigned)
    assert decision.chosen is None
    assert [(c.worker, c.ahead_ms, c.planned_ms) for c in decision.candidates] == [
        ("w2", (), None)
    ] * 2


def with_rows(**changed: Any) -> bytes:
    """The golden decision between two candidates, with other rows."""
    fields = msgspec.msgpack.decode(
        next(v for each, v in GOLDEN if isinstance(each, r.Assigned) and each.candidate_rows)
    )
    fields["candidate_rows"] |= changed
    return msgspec.msgpack.encode(fields)


# --- nothing else gets through --------------------------------------------------------------------


@pytest.mark.parametrize("headers", [(), (("other", b"x"),), (("t", None),), (("t", b""),)])
def test_record_without_a_type_is_malformed(headers: Sequence[tuple[str, bytes | None]]) -> None:
    with pytest.raises(Malformed):
        decode(record(b"{}", *headers))


@pytest.mark.parametrize(("given_record", "value"), GOLDEN, ids=lambda x: type(x).__name__)
def test_every_truncation_is_malformed(given_record: AnyRecord, value: bytes) -> None:
    for length in range(len(value)):
        with pytest.raises(Malformed):
            decode(record(value[:length], ("t", type(given_record).__name__.encode())))


@pytest.mark.parametrize(
    ("kind", "value"),
    [(b"Chunk", b'{"x":' + b"[" * 100_000), (b"Cancel", b"\x81\xa1x" + b"\x91" * 100_000)],
)
def test_endless_nesting_is_malformed(kind: bytes, value: bytes) -> None:
    with pytest.raises(Malformed):
        decode(record(value, ("t", kind)))


type_names = st.sampled_from([t.__name__.encode() for t in TYPES])
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())


@given(st.binary(max_size=200) | json_like, st.binary(max_size=20) | type_names)
@settings(max_examples=600, deadline=None)
def test_any_bytes_give_a_record_or_a_clear_error(value: bytes, kind: bytes) -> None:
    try:
        decoded = decode(record(value, ("t", kind)))
    except (Malformed, UnknownType):
        return
    assert type(decoded).__name__.encode() == kind


@given(st.sampled_from(GOLDEN), st.data())
@settings(max_examples=600, deadline=None)
def test_damaged_records_give_a_record_or_a_clear_error(
    golden: tuple[AnyRecord, bytes], data: st.DataObject
) -> None:
    value = bytearray(golden[1])
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    kind = type(golden[0]).__name__.encode()
    try:
        decoded = decode(record(bytes(value), ("t", kind)))
    except Malformed:
        return
    assert type(decoded) is type(golden[0])


@given(
    st.none() | st.binary(max_size=8),
    st.lists(st.tuples(st.sampled_from(["t", "epoch", "x"]), st.none() | st.binary(max_size=8))),
)
@settings(max_examples=500, deadline=None)
def test_any_null_value_gives_a_tombstone_or_a_clear_error(
    key: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    try:
        decoded = decode(record(None, *headers, key=key))
    except Malformed:
        return
    assert isinstance(decoded, r.Tombstone)


# --- round trips ----------------------------------------------------------------------------------

st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=3)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field."""
    if hint in (dict[str, Any], dict[str, Any] | None):
        return OBJECT
    if hint == list[dict[str, Any]]:
        return st.lists(OBJECT, max_size=2)
    return st.from_type(hint)


def built(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any instance of a record, with any of its optional fields at their defaults."""
    hints = get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    needed = {f.name: values_of(hints[f.name]) for f in fields if f.required}
    optional = {f.name: values_of(hints[f.name]) for f in fields if not f.required}
    values = st.fixed_dictionaries(needed, optional=optional)
    return values.map(lambda given_fields: kind(**given_fields))


MODULES = (*vars(r).values(), *vars(q).values(), response_records.StoredTurn)
STRUCTS = [t for t in MODULES if isinstance(t, type) and issubclass(t, msgspec.Struct)]
for struct in STRUCTS:
    st.register_type_strategy(struct, built)


def fitting_rows(count: int) -> st.SearchStrategy[r.CandidateRows]:
    """Rows of `count` candidates; curves and weights are there for all or for none."""

    def each(kind: Any) -> st.SearchStrategy[Any]:
        return st.lists(st.from_type(kind), min_size=count, max_size=count).map(tuple)

    def rows(is_timed: bool) -> st.SearchStrategy[r.CandidateRows]:
        size = count * (TIMED_ROW if is_timed else ROW).size
        return st.builds(
            r.CandidateRows,
            places=each(tuple[str, int, int]),
            rows=st.binary(min_size=size, max_size=size),
            curves=st.just(()) | each(tuple[float, ...]),
            taint_weights=st.just(()) | each(float),
            usual_tokens=st.just(()) | each(float),
            is_timed=st.just(is_timed),
        )

    return st.booleans().flatmap(rows)


def waits_with(reasons: list[str]) -> st.SearchStrategy[r.ReportedWaits]:
    """Waits for these reasons."""
    position = st.integers(0, max(0, len(reasons) - 1))
    requests = st.lists(
        st.tuples(st.text(), st.from_type(int), position), max_size=3 if reasons else 0
    )
    left_out = st.from_type(int)
    return st.builds(
        r.ReportedWaits,
        reasons=st.just(tuple(reasons)), requests=requests.map(tuple), left_out=left_out,
    )  # fmt: skip


st.register_type_strategy(r.ReportedWaits, st.lists(st.text(), max_size=3).flatmap(waits_with))
st.register_type_strategy(r.CandidateRows, st.integers(0, 3).flatmap(fitting_rows))


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.__name__)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_encoded_record_is_decoded_to_the_same(kind: type[AnyRecord], data: st.DataObject) -> None:
    written = data.draw(built(kind))
    entry = encode(written, "job-17")
    read = decode(record(entry.value, *entry.headers, key=entry.key))
    assert type(read) is kind
    assert read == written


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_tokens_are_unpacked(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert list(unpack_tokens(packed)) == token_ids
    assert token_count(packed) == len(token_ids)


def test_tokens_are_packed_as_u32_little_endian() -> None:
    assert pack_tokens([1, 256, 2**32 - 1]) == bytes.fromhex("0100000000010000ffffffff")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_outside_u32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_tokens_of_an_odd_length_are_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        unpack_tokens(bytes(length))


def test_type_is_read_without_decoding() -> None:
    assert type_of(record(b"garbage", ("x", b"y"), ("t", b"Chunk"))) == b"Chunk"
    assert type_of(record(b"garbage")) == b""


# --- prompts --------------------------------------------------------------------------------------

PROMPT = Prompt(
    id="job-17",
    kind="tokens",
    body={"model": "demo", "token_ids": [104, 105, 258], "max_tokens": 32},
    tenant="acme",
    deadline_s=30.0,
)
PROMPT_JSON = (
    b'{"id":"job-17","kind":"tokens",'
    b'"body":{"model":"demo","token_ids":[104,105,258],"max_tokens":32},'
    b'"tenant":"acme","deadline_s":30.0}'
)


def test_prompt_is_written_as_json_under_its_id() -> None:
    assert encode_prompt(PROMPT) == (b"job-17", PROMPT_JSON, (("t", b"Prompt"),))


def test_prompt_of_a_newer_version_is_read() -> None:
    assert Prompt.model_validate_json(PROMPT_JSON) == PROMPT
    assert Prompt.model_validate_json(PROMPT_JSON[:-1] + b',"newer":[1]}') == PROMPT


def test_prompt_needs_its_id_only() -> None:
    assert encode_prompt(Prompt(id="a")).value == b'{"id":"a"}'
    assert Prompt.model_validate_json(b'{"id":"a"}') == Prompt(
        id="a", kind="chat", body={}, tenant="", deadline_s=600.0
    )


@given(st.none() | st.binary(max_size=100) | json_like)
@settings(max_examples=300)
def test_any_bytes_give_a_prompt_or_a_clear_error(value: bytes | None) -> None:
    try:
        prompt = Prompt.model_validate_json(value or b"")
    except ValidationError:
        return
    assert prompt.id


@pytest.mark.parametrize(
    "value",
    [
        b"{}",
        b'{"id":""}',
        b'{"id":7}',
        b'{"id":"a","kind":"poem"}',
        b'{"id":"a","deadline_s":0}',
        b'{"id":"a","deadline_s":604801}',
        b'{"id":"a","body":[]}',
    ],
)
def test_value_that_is_no_prompt_is_refused(value: bytes) -> None:
    with pytest.raises(ValidationError):
        Prompt.model_validate_json(value)
