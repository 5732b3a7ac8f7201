"""Tests of log probabilities as OpenAI clients read them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvlane.app.http.openai.logprobs import TokenText
from kvlane.app.http.openai.openai_responses import (
    Choice,
    ChunkEncoder,
    ResponseHeader,
    full_response,
)
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.streams.records import Chunk, LogProb
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.responses.reply_stream import merge_chunks

CHAT = ResponseHeader("chat", "id-1", "demo", 1700000000)
COMPLETION = ResponseHeader("completion", "id-1", "demo", 1700000000)
PIECES = {1: b"Hi", 2: b" you", 3: b"\xc3", 4: b"\xa9", 5: b"!", 6: b" \xf0\x9f", 7: b""}
SPELLING = TokenText(PIECES.__getitem__)


def piece(
    seq: int, tokens: tuple[int, ...], text: str, before: str, reason: str | None = None
) -> Chunk:
    likely = tuple((LogProb(t, -0.5), LogProb(t, -0.5), LogProb(5, -2.0)) for t in tokens)
    return Chunk(
        id="id-1", attempt=0, run="1", seq=seq, index=seq, token_ids=tokens, text=text,
        chars=len(before + text), log_probs=likely, finish_reason=reason,
    )  # fmt: skip


ANSWER = (
    piece(0, (1,), "Hi", ""),
    piece(1, (2,), " you", "Hi"),
    piece(2, (5,), "!", "Hi you", "stop"),
)


def got(choice: Choice) -> Choice:
    for each in ANSWER:
        choice.add(each)
    return choice


def test_whole_chat_has_each_token_with_its_alternatives() -> None:
    answer = ChatCompletion.model_validate(full_response(CHAT, [got(Choice(spelling=SPELLING))]))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(t.token, t.logprob, t.bytes) for t in logprobs.content] == [
        ("Hi", -0.5, [72, 105]),
        (" you", -0.5, [32, 121, 111, 117]),
        ("!", -0.5, [33]),
    ]
    assert [t.token for t in logprobs.content[0].top_logprobs] == ["Hi", "!"]


def test_whole_completion_has_columns_and_offsets() -> None:
    choice = got(Choice(spelling=SPELLING, before="So "))
    answer = Completion.model_validate(full_response(COMPLETION, [choice]))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hi", " you", "!"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [3, 5, 9]
    assert logprobs.top_logprobs == [
        {"Hi": -0.5, "!": -2.0},
        {" you": -0.5, "!": -2.0},
        {"!": -0.5},
    ]


def test_stream_has_logprobs_of_each_piece_even_of_a_partial_character() -> None:
    choice = Choice(keep=False, spelling=SPELLING)
    words = ChunkEncoder(CHAT, 0, with_usage=False)
    tokens = []
    for each in (piece(0, (1,), "Hi", ""), piece(1, (3,), "", "Hi"), piece(2, (4,), "é", "Hi")):
        choice.add(each)
        encoded = words.encode(choice, each)
        assert encoded is not None
        chunk = ChatCompletionChunk.model_validate(msgspec.json.decode(encoded))
        likely = chunk.choices[0].logprobs
        assert likely is not None
        assert likely.content is not None
        tokens.append([entry.bytes for entry in likely.content])
    assert tokens == [[[72, 105]], [[0xC3]], [[0xA9]]]


def test_offsets_of_a_streamed_completion_count_from_its_beginning() -> None:
    choice = Choice(keep=False, spelling=SPELLING)
    words = ChunkEncoder(COMPLETION, 0, with_usage=False)
    offsets = []
    for each in ANSWER:
        choice.add(each)
        encoded = words.encode(choice, each)
        assert encoded is not None
        offsets += msgspec.json.decode(encoded)["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 2, 6]


def pieces_of(
    tokens: list[int], sizes: list[int], stop: tuple[str, ...], resumed_at: int
) -> list[Chunk]:
    """The Chunks of an answer of bytes in several tokens each, of two runs: one that ended after
    the Chunk with token `resumed_at`, and one that continued it."""
    model, pieces, at, chars = ByteModel(), list[Chunk](), 0, 0
    request = Request(id="id-1", stop=StopConditions(stop=stop))
    text = model.text_stream(request)
    text.token_chars = []
    for size in sizes:
        if at > resumed_at:
            text, resumed_at = model.text_stream(request, tokens[:at]), len(tokens)
            text.token_chars = []
        fed = text.feed(tokens[at : at + size])
        ids = tuple(tokens[at : at + fed.tokens])
        chars += len(fed.text)
        likely = tuple((LogProb(t, -0.5), LogProb(t ^ 1, -1.0)) for t in ids)
        piece = Chunk(
            id="id-1", attempt=0, run="1", seq=len(pieces), index=at, token_ids=ids,
            text=fed.text, chars=chars, log_probs=likely, token_chars=tuple(text.token_chars),
            finish_reason=fed.finish_reason,
        )  # fmt: skip
        pieces.append(piece)
        text.token_chars.clear()
        at += len(ids)
        if fed.finish_reason is not None:
            break
    return pieces


@given(
    st.text("ab😀é👩‍👩‍👧", min_size=1, max_size=12),
    st.lists(st.integers(1, 6), min_size=60, max_size=60),
    st.lists(st.sampled_from(["b", "ab", "😀a", "éb"]), max_size=2),
    st.integers(0, 40),
    st.sampled_from(["", "So "]),
)
def test_offset_of_a_token_is_the_text_before_it_in_stream_and_whole_response(
    text: str, sizes: list[int], stop: list[str], resumed_at: int, before: str
) -> None:
    tokens = list(text.encode())
    pieces = pieces_of(tokens, sizes, tuple(stop), resumed_at)
    spelling = TokenText(ByteModel().token_bytes)
    whole = Choice(spelling=spelling, before=before)
    streamed, offsets = Choice(keep=False, spelling=spelling, before=before), list[int]()
    for each in pieces:
        whole.add(each)
        streamed.add(each)
        found = streamed.logprobs("completion")
        offsets += found["text_offset"] if found else []
    counted = sum(len(each.token_ids) for each in pieces)
    assert offsets == [
        len(before) + len(bytes(tokens[:n]).decode(errors="ignore")) for n in range(counted)
    ]
    columns = whole.logprobs("completion")
    assert columns is not None
    assert columns["text_offset"] == offsets
    merged = Choice(spelling=spelling, before=before)
    merged.add(merge_chunks(pieces))
    assert merged.logprobs("completion") == columns


def test_token_that_is_no_text_is_named_by_its_bytes() -> None:
    likely = ((LogProb(3, -0.5), LogProb(6, -0.7), LogProb(4, -1.0)),)
    choice = Choice(spelling=SPELLING)
    choice.add(msgspec.structs.replace(ANSWER[0], token_ids=(3,), text="", log_probs=likely))
    columns = choice.logprobs("completion")
    assert columns is not None
    assert columns["tokens"] == ["bytes:\\xc3"]
    assert columns["top_logprobs"] == [
        {"bytes:\\xc3": -0.5, "bytes: \\xf0\\x9f": -0.7, "bytes:\\xa9": -1.0}
    ]
    content = choice.logprobs("chat")
    assert content is not None
    assert [(t["token"], t["bytes"]) for t in content["content"]] == [("\\xc3", [0xC3])]
    assert [t["bytes"] for t in content["content"][0]["top_logprobs"]] == [
        [0x20, 0xF0, 0x9F],
        [0xA9],
    ]


def test_chosen_token_is_among_the_top_ones_even_if_it_is_unlikely() -> None:
    likely = ((LogProb(2, -9.0), LogProb(1, -0.1)), (LogProb(5, -0.1), LogProb(5, -0.1)), ())
    choice = Choice(spelling=SPELLING)
    choice.add(msgspec.structs.replace(ANSWER[0], token_ids=(2, 5, 1), log_probs=likely))
    columns = choice.logprobs("completion")
    assert columns is not None
    assert columns["top_logprobs"] == [{" you": -9.0, "Hi": -0.1}, {"!": -0.1}, None]
    assert columns["token_logprobs"] == [-9.0, -0.1, None]


def test_token_without_bytes_has_none_in_a_chat() -> None:
    choice = Choice(spelling=SPELLING)
    likely = ((LogProb(7, -0.1),),)
    choice.add(msgspec.structs.replace(ANSWER[0], token_ids=(7,), log_probs=likely))
    content = choice.logprobs("chat")
    assert content is not None
    assert content["content"][0]["bytes"] is None


def test_answer_without_logprobs_has_null() -> None:
    choice = Choice(spelling=SPELLING)
    choice.add(msgspec.structs.replace(ANSWER[0], log_probs=None, finish_reason="stop"))
    assert full_response(CHAT, [choice])["choices"][0]["logprobs"] is None


def test_logprobs_are_left_out_unless_requested() -> None:
    assert full_response(CHAT, [got(Choice())])["choices"][0]["logprobs"] is None


def test_tokens_can_be_given_as_ids() -> None:
    choice = got(Choice(spelling=TokenText(PIECES.__getitem__, as_ids=True)))
    assert full_response(COMPLETION, [choice])["choices"][0]["logprobs"]["tokens"] == [
        "token_id:1",
        "token_id:2",
        "token_id:5",
    ]
