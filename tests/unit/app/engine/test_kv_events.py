"""Tests of cache events in vLLM's wire formats: as vLLM sends them, and malformed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.engine.kv_events import (
    END_OF_REPLAY,
    BatchNumberTracker,
    EngineEventBatch,
    UnreadableEvents,
    decode_batch,
    recovered_events,
)
from kvlane.indexer.block_hashes import derive_secret, local_hashes, multimodal_hash, prompt_keys
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EventsLost,
    UnreadableEvent,
)
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer, NormalizerCounters
from workbench.reference_index import CacheId, ReferenceIndex

SECRET = derive_secret(b"s")
HOLDER = CacheId("w", 0)
IMAGE = "0123456789abcdef" * 4
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
}


class Step(NamedTuple):
    """A prompt that a real engine served, and the messages it sent about it."""

    name: str
    prompt: list[int]
    output: list[int]
    cached_tokens: int
    cache_salt: str
    lora_name: str
    messages: list[list[bytes]]


def number(n: int) -> bytes:
    return n.to_bytes(8, "big", signed=True)


@cache
def recording() -> tuple[Step, ...]:
    path = Path(__file__).parents[3] / "recordings" / "vllm_cache_events.json"
    return tuple(
        Step(
            step["step"], step["prompt"], step["output"], step["cached_tokens"],
            step["cache_salt"], step["lora_name"],
            [
                [f["topic"].encode(), number(f["sequence"]), bytes.fromhex(f["payload"])]
                for f in step["frames"]
            ],
        )
        for step in json.loads(path.read_text())["steps"]
    )  # fmt: skip


MESSAGES = [message for step in recording() for message in step.messages]
SIZE = 32


def message(*events: Any, n: int = 0, rank: int | None = 0) -> list[bytes]:
    return [b"topic", number(n), msgspec.msgpack.encode([1.5, events, rank])]


def events_in(*events: Any) -> tuple[EngineEvent, ...]:
    batch = decode_batch(message(*events))
    assert batch is not None
    return batch.events


def stored(**more: Any) -> BlocksStored:
    (event,) = events_in(STORED | more)
    assert isinstance(event, BlocksStored)
    return event


# --- a real engine, end to end -------------------------------------------------------------------


class Followed:
    """A real engine's messages behind a bridge and an index."""

    def __init__(self) -> None:
        self.bridge = EventNormalizer(SIZE, SECRET)
        self.index = ReferenceIndex()

    def receive(self, step: Step) -> None:
        for frames in step.messages:
            batch = decode_batch(frames)
            assert batch is not None
            self.bridge.on_events(batch.events, 0.0)
        while taken := self.bridge.take_batch():
            self.index.apply_events(0, HOLDER, 1, taken.first_event_id, taken.events)

    def depth(self, step: Step, tokens: list[int]) -> int:
        local = local_hashes(tokens, SIZE, lora_name=step.lora_name, cache_salt=step.cache_salt)
        found = self.index.match_prefix(prompt_keys(local, SECRET).tolist())
        return found[HOLDER].device if HOLDER in found else 0


@pytest.mark.parametrize("last", range(len(recording())), ids=[s.name for s in recording()])
def test_prompt_that_was_served_is_found_by_its_tokens(last: int) -> None:
    followed = Followed()
    for step in recording()[: last + 1]:
        followed.receive(step)
    served = recording()[last]
    assert followed.depth(served, served.prompt) == len(served.prompt) // SIZE
    counters = followed.bridge.counters
    assert counters.orphans == counters.malformed == counters.unknown_removed == 0
    assert counters.unknown_types == 0


@pytest.mark.parametrize("next_", range(1, len(recording())), ids=[s.name for s in recording()[1:]])
def test_matches_are_the_blocks_that_the_engine_had_cached(next_: int) -> None:
    followed = Followed()
    for step in recording()[:next_]:
        followed.receive(step)
    requested = recording()[next_]
    # The engine computes a prompt's last token even when it has its block.
    depth = followed.depth(requested, requested.prompt[:-1])
    assert depth * SIZE == requested.cached_tokens or requested.name == "after_reset"


def test_blocks_of_an_answer_are_found_too() -> None:
    followed = Followed()
    first = recording()[0]
    followed.receive(first)
    assert followed.depth(first, first.prompt + first.output) == 3


def test_evicted_or_cleared_blocks_are_gone() -> None:
    followed = Followed()
    for step in recording():
        followed.receive(step)
    *before, last = recording()
    gone = [step for step in before if step.prompt != last.prompt]
    assert {followed.depth(step, step.prompt) for step in gone} == {0}
    assert followed.bridge.held_blocks == 1


def test_prompts_of_other_tenants_and_adapters_are_not_found() -> None:
    followed = Followed()
    steps = {step.name: step for step in recording()}
    followed.receive(steps["cache_salt"])
    followed.receive(steps["lora"])
    tokens = steps["lora"].prompt
    assert followed.depth(steps["cache_salt"], tokens) == 2
    assert followed.depth(steps["lora"], tokens) == 2
    assert followed.depth(steps["lora_salt_session"], tokens) == 0
    assert followed.depth(steps["root_plus_decode_block"], tokens) == 0


def test_real_batches_are_numbered_one_after_the_other() -> None:
    numbers = BatchNumberTracker()
    for frames in MESSAGES:
        batch = decode_batch(frames)
        assert batch is not None
        assert numbers.advance(batch.number) == (False, range(batch.number, batch.number))
    assert numbers.next_number == len(MESSAGES) == 14


# --- shapes --------------------------------------------------------------------------------------


def test_message_has_a_number_and_a_rank() -> None:
    assert decode_batch(message(n=2**40, rank=3)) == EngineEventBatch(2**40, 3, ())
    assert decode_batch(message(rank=None)) == EngineEventBatch(0, 0, ())


def test_message_without_a_rank_is_of_the_first_one() -> None:
    frames = [b"", number(4), msgspec.msgpack.encode([1.5, []])]
    assert decode_batch(frames) == EngineEventBatch(4)


def test_events_are_maps_or_arrays() -> None:
    row = ["BlockStored", [7], 5, [1, 2], 2, None, "CPU", "ada", [["ada"]]]
    row += [None, None, None, None, "and", "more"]
    expected = BlocksStored([7], 5, [1, 2], 2, "CPU", "ada")
    assert events_in(row, ["BlockRemoved", [7], "CPU"], ["AllBlocksCleared"]) == (
        expected,
        BlocksRemoved([7], "CPU"),
        AllCleared(),
    )
    as_map = STORED | {"parent_block_hash": 5, "medium": "CPU", "lora_name": "ada"}
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    assert events_in(as_map, removed, {"type": "AllBlocksCleared"}) == (
        expected,
        BlocksRemoved([7], "CPU"),
        AllCleared(),
    )


def test_map_without_a_parent_begins_a_sequence() -> None:
    fields = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
    assert events_in(fields) == events_in(fields | {"parent_block_hash": None})
    assert isinstance(events_in(fields)[0], BlocksStored)


def test_rows_of_the_oldest_engines_are_short() -> None:
    assert events_in(["BlockStored", [7], None, [1, 2], 2], ["BlockRemoved", [7]]) == (
        BlocksStored([7], None, [1, 2], 2),
        BlocksRemoved([7]),
    )


def test_removals_in_a_row_are_one_event() -> None:
    row = ["BlockRemoved", [1]], ["BlockRemoved", [2, 3]]
    assert events_in(*row) == (BlocksRemoved([1, 2, 3]),)
    other = {"type": "BlockRemoved", "block_hashes": [4], "group_idx": 1}
    assert events_in(row[0], other, row[1]) == (
        BlocksRemoved([1]),
        BlocksRemoved([4], group=1),
        BlocksRemoved([2, 3]),
    )


def test_events_may_have_many_fields() -> None:
    many = {f"field {n}": n for n in range(20)}
    assert stored(**many) == stored()


@pytest.mark.parametrize("block_hash", [0, -(2**63), 2**64 - 1, b"x" * 32])
def test_hashes_are_of_any_form(block_hash: int | bytes) -> None:
    event = stored(block_hashes=[block_hash], parent_block_hash=block_hash)
    assert (event.block_hashes, event.parent) == ([block_hash], block_hash)
    removed = {"type": "BlockRemoved", "block_hashes": [block_hash]}
    assert events_in(removed) == (BlocksRemoved([block_hash]),)


def test_group_kind_and_locality_are_read() -> None:
    event = stored(group_idx=2, kv_cache_spec_kind="mla_attention", locality="REMOTE")
    assert (event.group, event.kind, event.locality) == (2, "mla_attention", "REMOTE")
    removed = {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2, "locality": "REMOTE"}
    assert events_in(removed) == (BlocksRemoved([1], "", 2, "REMOTE"),)


def test_arrays_have_group_kind_and_locality_behind_the_fields_of_older_engines() -> None:
    row = ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None]
    removed = ["BlockRemoved", [7], "GPU"]
    assert events_in(
        [*row, 1, "sliding_window", 128], [*row, 0, "full_attention", None, "REMOTE"],
        [*removed, 1], [*removed, 0, "REMOTE"],
    ) == (
        BlocksStored([7], None, [1, 2], 2, "GPU", group=1, kind="sliding_window"),
        BlocksStored([7], None, [1, 2], 2, "GPU", kind="full_attention", locality="REMOTE"),
        BlocksRemoved([7], "GPU", 1), BlocksRemoved([7], "GPU", 0, "REMOTE"),
    )  # fmt: skip


def in_form(form: str, name: str, **fields: Any) -> Any:
    """An event of an engine with cache groups, as an array or as a map."""
    return [name, *fields.values()] if form == "array" else {"type": name} | fields


@pytest.mark.parametrize("batch", ["array", "map"])
@pytest.mark.parametrize("form", ["array", "map"])
def test_blocks_of_a_window_serve_no_prefix_and_their_removal_leaves_other_groups_alone(
    form: str, batch: str
) -> None:
    shared: dict[str, Any] = {
        "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": list(range(2 * SIZE)),
        "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None,
    }  # fmt: skip
    of_window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "window": 128}
    of_group = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    removed = {"block_hashes": [1, 2], "medium": "GPU"}
    followed = Followed()

    def receive(n: int, *events: Any) -> int:
        content: Any = {"ts": 1.5, "events": events, "data_parallel_rank": 0}
        content = [1.5, events, 0] if batch == "array" else content
        found = decode_batch([b"", number(n), msgspec.msgpack.encode(content)])
        assert found is not None
        followed.bridge.on_events(found.events, 0.0)
        return followed.bridge.held_blocks

    assert receive(0, in_form(form, "BlockStored", **shared, **of_window)) == 0
    assert receive(1, in_form(form, "BlockStored", **shared, **of_group)) == 2
    assert receive(2, in_form(form, "BlockRemoved", **removed, group_idx=1)) == 2
    assert receive(3, in_form(form, "BlockRemoved", **removed, group_idx=0)) == 0
    assert followed.bridge.counters.unknown_removed == 0


def test_messages_that_cannot_be_read_are_counted_each_and_logged_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    normalizer, unreadable = EventNormalizer(SIZE, SECRET), UnreadableEvents("tcp://engine")
    odd = [msgspec.msgpack.encode(content) for content in ({"odd": 1}, [1.5, 2], "events")]
    for payload in odd * 50:
        frames = [b"", number(1), payload]
        normalizer.on_events(unreadable.readable_events(decode_batch(frames)), 0.0)
    normalizer.on_events(unreadable.readable_events(decode_batch(message({"x": 1}))), 0.0)
    assert normalizer.counters == NormalizerCounters(malformed=150, unknown_types=1)
    assert [r.args[1] for r in caplog.records if r.args] == [1, 10, 100]  # type: ignore[index]
    assert "tcp://engine" in caplog.text


def test_unknown_fields_and_events_are_skipped() -> None:
    normalizer = EventNormalizer(SIZE, SECRET)
    news = STORED | {"lookahead_token_ids": [1], "ownership": {"a": 1}}
    found = events_in({"type": "Moved", "x": 1}, ["Moved", 1], news, 5)
    unknown = UnreadableEvent(is_known=False)
    assert found == (unknown, unknown, BlocksStored([7], None, [1, 2], 2), unknown)
    normalizer.on_events(found, 0.0)
    assert normalizer.counters.unknown_types == 3


@pytest.mark.parametrize(
    "broken",
    [
        {"block_hashes": "x"},
        {"block_hashes": [[1]]},
        {"block_hashes": [1.5]},
        {"token_ids": [1, "a"]},
        {"token_ids": None},
        {"block_size": None},
        {"extra_keys": 5},
        {"group_idx": "x"},
        {"parent_block_hash": {}},
    ],
)
def test_event_of_another_shape_is_counted_and_the_others_are_read(broken: dict[str, Any]) -> None:
    normalizer = EventNormalizer(SIZE, SECRET)
    found = events_in(STORED | broken, {"type": "AllBlocksCleared"})
    assert found == (UnreadableEvent(is_known=True), AllCleared())
    normalizer.on_events(found, 0.0)
    assert normalizer.counters == NormalizerCounters(malformed=1)


# --- what else is in a block ---------------------------------------------------------------------


def of_prompt(*extra: Any, **more: Any) -> BlocksStored:
    """A prompt's first blocks."""
    return stored(extra_keys=[*extra], **more)


def test_salt_is_in_the_first_block_of_a_prompt() -> None:
    assert of_prompt(["tenant"], None).cache_salt == "tenant"
    assert of_prompt([IMAGE]).cache_salt == IMAGE, "a salt may look like a digest"


def test_adapter_is_not_mistaken_for_a_salt() -> None:
    event = of_prompt(["ada"], ["ada"], lora_name="ada", lora_id=1)
    assert (event.lora_name, event.cache_salt, event.mm_hashes) == ("ada", "", None)
    event = of_prompt(["ada", "ada"], ["ada"], lora_name="ada", lora_id=1)
    assert (event.lora_name, event.cache_salt, event.mm_hashes) == ("ada", "ada", None)


def test_adapter_without_a_name_is_not_the_base_model() -> None:
    event = of_prompt([1], lora_id=1)
    assert (event.lora_name, event.cache_salt, event.mm_hashes) == ("adapter 1", "", None)


def test_multimodal_objects_come_with_their_offsets() -> None:
    event = of_prompt(["ada", [IMAGE, 0], ["b", 4], "salt"], [[IMAGE, -2]], None, lora_name="ada")
    image, other = multimodal_hash(IMAGE), multimodal_hash("b")
    assert event.mm_hashes == [{image, other}, {image}, set()]
    assert event.cache_salt == "salt"


def test_older_engines_name_multimodal_objects_without_an_offset() -> None:
    event = of_prompt([IMAGE], parent_block_hash=3)
    assert (event.cache_salt, event.mm_hashes) == ("", [{multimodal_hash(IMAGE)}])
    event = of_prompt([IMAGE, "salt"])
    assert (event.cache_salt, event.mm_hashes) == ("salt", [{multimodal_hash(IMAGE)}])


def test_embeddings_make_a_block_that_no_tokens_match() -> None:
    event = of_prompt([b"d" * 32], parent_block_hash=3)
    assert event.mm_hashes is not None
    assert event.mm_hashes != of_prompt([b"e" * 32], parent_block_hash=3).mm_hashes
    assert len(event.mm_hashes[0] or ()) == 1


# --- what is broken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"topic", b"123", MESSAGES[0][2]],
        [b"topic", number(-2), MESSAGES[0][2]],
        [b"topic", number(0), b""],
        [b"topic", number(0), MESSAGES[0][2][:-1]],
        [b"topic", number(0), b"\x91" * 5000],
        [b"topic", number(0), msgspec.msgpack.encode({"a": 1})],
        [b"topic", number(0), msgspec.msgpack.encode([1.0, "x"])],
    ],
)
def test_invalid_batches_are_counted(frames: list[bytes]) -> None:
    assert decode_batch(frames) is None


@given(
    which=st.sampled_from(MESSAGES),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    noise=st.binary(max_size=40),
)
def test_no_input_raises(which: list[bytes], edits: list[tuple[int, int]], noise: bytes) -> None:
    payload = bytearray(which[2])
    for at, value in edits:
        payload[at % len(payload)] = value
    bridge = EventNormalizer(SIZE, SECRET)
    for sent in (bytes(payload), noise, bytes(payload) + noise):
        batch = decode_batch([b"", which[1], sent])
        if batch is not None:
            bridge.on_events(batch.events, 0.0)


# --- numbers and replay --------------------------------------------------------------------------


def test_gap_names_the_missing_batches() -> None:
    numbers = BatchNumberTracker()
    assert numbers.advance(0) == (False, range(0))
    assert numbers.advance(3) == (False, range(1, 3))
    assert numbers.advance(4) == (False, range(4, 4))


def test_late_subscriber_misses_the_beginning() -> None:
    assert BatchNumberTracker().advance(5) == (False, range(5))


def test_smaller_numbers_belong_to_a_restarted_engine() -> None:
    numbers = BatchNumberTracker()
    numbers.advance(0)
    numbers.advance(1)
    assert numbers.advance(1) == (True, range(1))
    assert numbers.advance(2) == (False, range(2, 2))


def test_replies_to_a_replay_are_read_with_or_without_a_topic() -> None:
    topic, count, payload = MESSAGES[0]
    live = decode_batch(MESSAGES[0])
    assert decode_batch([b"", topic, count, payload]) == live
    assert decode_batch([b"", count, payload]) == live
    assert decode_batch([b"", b"", b"\xff" * 8, b""]) == EngineEventBatch(END_OF_REPLAY)
    assert decode_batch([b"", b"\xff" * 8, b""]) == EngineEventBatch(END_OF_REPLAY)


def batch(n: int) -> EngineEventBatch:
    return EngineEventBatch(n, 0, (BlocksRemoved([n]),))


def test_replay_fills_a_gap() -> None:
    replay = [batch(n) for n in (2, 1, 3, 4)] + [EngineEventBatch(END_OF_REPLAY)]
    assert recovered_events(range(1, 4), replay) == (
        BlocksRemoved([1]),
        BlocksRemoved([2]),
        BlocksRemoved([3]),
    )
    assert recovered_events(range(4, 4), []) == ()


def test_incomplete_replay_is_reported() -> None:
    assert recovered_events(range(1, 4), [batch(2), batch(3)]) == (
        EventsLost(),
        BlocksRemoved([2]),
        BlocksRemoved([3]),
    )
    assert recovered_events(range(10**12), []) == (EventsLost(),)


def test_batches_replayed_before_a_gap_do_not_count() -> None:
    assert recovered_events(range(1, 4), [batch(1), batch(3)]) == (EventsLost(), BlocksRemoved([3]))
    assert recovered_events(range(1, 4), [batch(1), batch(2)]) == (EventsLost(),)


def test_filled_gap_leaves_no_trace() -> None:
    whole, gappy = EventNormalizer(SIZE, SECRET), EventNormalizer(SIZE, SECRET)
    batches = [found for frames in MESSAGES if (found := decode_batch(frames))]
    numbers = BatchNumberTracker()
    for found in batches:
        whole.on_events(found.events, 0.0)
    for found in [*batches[:2], *batches[9:]]:
        step = numbers.advance(found.number)
        gappy.on_events(recovered_events(step.missing, batches), 0.0)
        gappy.on_events(found.events, 0.0)
    assert gappy.take_batch() == whole.take_batch()
    assert gappy.counters == whole.counters
