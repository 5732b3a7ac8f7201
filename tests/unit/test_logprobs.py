"""Log probabilities as OpenAI clients read them."""

from __future__ import annotations

import msgspec
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.http.openai.logprobs import TokenText
from app.http.openai.openai_responses import Choice, ChunkEncoder, ResponseHeader, full_response
from streams.records import Chunk, LogProb

CHAT = ResponseHeader("chat", "id-1", "demo", 1700000000)
COMPLETION = ResponseHeader("completion", "id-1", "demo", 1700000000)
PIECES = {1: b"Hi", 2: b" you", 3: b"\xc3", 4: b"\xa9", 5: b"!"}
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
        {"!": -2.0},
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
