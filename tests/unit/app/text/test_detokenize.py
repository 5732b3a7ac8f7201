"""Tests of detokenisation, token by token: together the same as all at once, and never half a
character."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.text.detokenize import Detokenizer

SPEC = read_folder(DEMO_MODEL_FOLDER).tokenizer
WHOLE = tokenizers.Tokenizer.from_buffer(SPEC)
TOKENIZER = Tokenizer(SPEC, InlinePool())

SCRIPTS = (
    "Grüße, Ærø — «ça va»?",
    "Привет, как дела?",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好世界",
    "こんにちは",
    "안녕하세요",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "\U0001d518\U0001d52b 𒀀 \U0010ffff",
    "\ufffd between \ufffd",
)
token_ids = st.lists(st.integers(0, TOKENIZER.vocabulary_size - 1), max_size=40)
texts = st.text(max_size=60) | st.lists(st.sampled_from(SCRIPTS)).map(" ".join)


def pieces(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.end()]


@given(token_ids, st.booleans())
@example([0xF0, 0, 0x9F], True)
def test_any_tokens_give_the_text_of_all_of_them_together(tokens: list[int], skip: bool) -> None:
    shown = "".join(pieces(TOKENIZER.detokenizer(skip_special=skip), tokens))
    assert shown == WHOLE.decode(tokens, skip_special_tokens=skip)


@given(texts)
def test_text_comes_back_as_it_was(text: str) -> None:
    tokens = WHOLE.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(TOKENIZER.detokenizer(skip_special=False), tokens)) == text


@given(texts.filter(lambda text: "\ufffd" not in text))
def test_no_piece_of_a_text_has_half_a_character(text: str) -> None:
    tokens = WHOLE.encode(text, add_special_tokens=False).ids
    assert not any("\ufffd" in piece for piece in pieces(TOKENIZER.detokenizer(), tokens))


@given(texts)
def test_piece_comes_as_soon_as_its_characters_are_whole(text: str) -> None:
    tokens = WHOLE.encode(text, add_special_tokens=False).ids
    assert pieces(TOKENIZER.detokenizer(), tokens)[-1] == ""


def test_special_tokens_have_text_on_request_only() -> None:
    tokens = WHOLE.encode("<|user|>a<|end|>", add_special_tokens=False).ids
    assert "".join(pieces(TOKENIZER.detokenizer(), tokens)) == "a"
    assert "".join(pieces(TOKENIZER.detokenizer(skip_special=False), tokens)) == "<|user|>a<|end|>"


@given(st.sampled_from(SCRIPTS), st.data())
def test_answer_completes_the_character_its_prompt_ends_with(
    text: str, data: st.DataObject
) -> None:
    tokens = byte_tokens(text)
    cut = data.draw(st.integers(0, len(tokens)))
    before, after = tokens[:cut], tokens[cut:]
    half = TOKENIZER.detokenizer()
    known = "".join(half.push(token) for token in before)
    rest = "".join(pieces(TOKENIZER.detokenizer(before), after))
    assert known + rest == text


@given(token_ids, token_ids)
def test_only_the_end_of_a_prompt_matters(before: list[int], tokens: list[int]) -> None:
    whole = TOKENIZER.detokenizer(before)
    fed = TOKENIZER.detokenizer()
    for token in before:
        fed.push(token)
    assert pieces(whole, tokens) == pieces(fed, tokens)


@pytest.mark.parametrize("token", [4096, 2**32 - 1, -1])
def test_id_outside_the_vocabulary_has_no_text(token: int) -> None:
    assert pieces(TOKENIZER.detokenizer(), [token]) == ["", ""]


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    assert pieces(TOKENIZER.detokenizer(), byte_tokens("é")[:1]) == ["", "\ufffd"]


# --- tokenizers that are not byte-level -----------------------------------------------------------


def sentence_pieces() -> bytes:
    """A tokenizer with a mark for spaces and bytes for what it has no token for."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    words = ["▁", "▁hi", "▁there", "a", "b", "é", "▁a"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *bytes_, *words])}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": [],
                "byte_fallback": True,
                "unk_token": "<unk>",
                "fuse_unk": True,
            },
        }
    ).encode()


PIECES = Tokenizer(sentence_pieces(), InlinePool())


@pytest.mark.parametrize("text", ["hi there hi", "a b a", "😀 a 😀😀", "日本 a", "ab" * 40])
async def test_other_tokenizers_give_the_text_of_all_tokens_together(text: str) -> None:
    tokens = await PIECES.encode(text)
    shown = pieces(PIECES.detokenizer(), tokens)
    assert "".join(shown) == PIECES.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in shown)


async def test_other_tokenizers_keep_the_space_after_the_prompt() -> None:
    prompt, answer = await PIECES.encode("hi"), [PIECES._tokenizer.token_to_id("▁there")]
    assert "".join(pieces(PIECES.detokenizer(prompt), answer)) == " there"


def test_other_tokenizers_do_not_wait_for_ever_for_a_character() -> None:
    detokenizer = PIECES.detokenizer()
    lone = PIECES._tokenizer.token_to_id("<0x80>")
    assert lone is not None
    assert "".join(detokenizer.push(lone) for _ in range(1000)).count("\ufffd") > 900
    assert len(detokenizer._window) < 40


def byte_tokens(text: str) -> list[int]:
    by_bytes = {TOKENIZER._vocabulary.pieces[i]: i for i in range(5, 261)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]
