"""Tests of the tokenizer: the same tokens as the library gives for the whole text, with any
cached pieces."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models

from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.text import tokenizer as tokenizer_module
from kvlane.app.preprocess.text.tokenizer import (
    INLINE_CHARS,
    MIN_CHARS,
    SAMPLE_CHARS,
    SAMPLES,
    SLICE_CHARS,
    AddedTokens,
    PieceCache,
    Scope,
    Tokenizer,
    TooManyTokens,
)
from kvlane.app.preprocess.thread_pool import InlinePool, ThreadPool

SPEC = read_folder(DEMO_MODEL_FOLDER).tokenizer
WHOLE = tokenizers.Tokenizer.from_buffer(SPEC)
SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")

shorts = st.text(max_size=8) | st.sampled_from([*SPECIAL, "<|", "|>", "<|en", " ", "\n\n"])
longs = st.sampled_from(["word " * MIN_CHARS, "\n" * MIN_CHARS, "ß" * MIN_CHARS, "def f("])
texts = st.lists(shorts | longs, max_size=12).map("".join)


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(SPEC) | changes).encode()


def test_demo_tokenizer_is_small_and_has_turn_tokens() -> None:
    tokenizer = Tokenizer(SPEC, InlinePool())
    assert tokenizer.vocabulary_size == 4096
    assert tokenizer.special == {tokenizer._tokenizer.token_to_id(token) for token in SPECIAL}


@given(st.lists(texts, min_size=1, max_size=4))
@example(["<|user|>" + "a" * MIN_CHARS + "<|end|>b", "a" * MIN_CHARS + "b"])
async def test_tokens_are_those_of_the_whole_text_cached_or_not(some: list[str]) -> None:
    tokenizer = Tokenizer(SPEC, InlinePool())
    for text in [*some, *some]:
        expected = WHOLE.encode(text, add_special_tokens=False).ids
        assert list(await tokenizer.encode(text)) == expected


class CountingLibrary:
    """The tokenizer library, with the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.chars = 0
        self._library = tokenizer._tokenizer
        tokenizer._tokenizer = self

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._library.encode_batch_fast(texts, **options)


def counted() -> tuple[Tokenizer, CountingLibrary]:
    tokenizer = Tokenizer(SPEC, InlinePool())
    return tokenizer, CountingLibrary(tokenizer)


WITHIN_THE_LIMIT = ("word ", "<|user|>", "\x01", "ß", "def f(x):\n    return x\n", "字", "🙂")


@pytest.mark.parametrize("text", WITHIN_THE_LIMIT)
@pytest.mark.parametrize("chars", [SLICE_CHARS, SLICE_CHARS + 64, 3 * SLICE_CHARS])
async def test_text_within_the_limit_is_tokenised_once(text: str, chars: int) -> None:
    tokenizer, library = counted()
    whole = text * (chars // len(text))
    tokens = WHOLE.encode(whole, add_special_tokens=False).ids
    for most, special in ((len(tokens), False), (2**18, False), (2**18, True)):
        library.chars = 0
        found = await tokenizer.encode(
            whole, most=most, add_special_tokens=special, scope=Scope(salt=str(most))
        )
        assert list(found) == tokens
        assert library.chars == len(whole)


async def test_text_of_long_tokens_is_tokenised_once_and_a_sample_of_it_twice() -> None:
    tokenizer, library = counted()
    spaces = " " * (8 * SLICE_CHARS)
    tokens = WHOLE.encode(spaces, add_special_tokens=False).ids
    assert list(await tokenizer.encode(spaces, most=len(tokens))) == tokens
    assert library.chars <= len(spaces) + SAMPLES * SAMPLE_CHARS


@pytest.mark.parametrize("most", [60_000, 131_072])
async def test_of_a_long_chat_the_new_turn_alone_is_tokenised(most: int) -> None:
    tokenizer, library = counted()
    chat = ""
    for number in range(20):
        turn = f"<|user|>turn {number}: " + "once upon a time " * 600 + "<|end|>"
        library.chars = 0
        chat += turn
        await tokenizer.encode(chat, most=most)
        assert library.chars <= len(turn) + 20 * len("<|end|><|user|>")
    assert len(chat) > 6 * SLICE_CHARS


async def test_known_turns_above_the_limit_are_refused_without_the_library() -> None:
    tokenizer, library = counted()
    chat = "<|user|>" + "once upon a time " * 600 + "<|end|>"
    await tokenizer.encode(chat)
    library.chars = 0
    with pytest.raises(TooManyTokens, match="more than 100 tokens"):
        await tokenizer.encode(chat + "a new turn " * 100, most=100)
    assert library.chars == 0


async def test_cache_of_a_process_is_shared_by_models_that_find_their_own_pieces() -> None:
    pieces = PieceCache()
    spec = changed(**VARIANTS["spaced"])
    text = "once upon a time " * 50
    for tokenizer in (Tokenizer(SPEC, InlinePool(), pieces), Tokenizer(spec, InlinePool(), pieces)):
        library = tokenizer._tokenizer
        for _ in range(2):
            expected = library.encode(text, add_special_tokens=False).ids
            assert list(await tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    "other", [Scope("evil"), Scope("acme", "salt"), Scope("", "salt"), Scope()]
)
async def test_pieces_of_another_tenant_or_salt_cost_as_much_as_unknown_ones(other: Scope) -> None:
    tokenizer, library = counted()
    victim, unknown = ("<|user|>" + word * 200 + "<|end|>" for word in ("merger ", "orchid "))
    await tokenizer.encode(victim, scope=Scope("acme"))
    work = []
    for text in (victim, unknown):
        library.chars = 0
        await tokenizer.encode(text, scope=other)
        work.append(library.chars)
    assert work == [len(victim), len(unknown)]


def test_library_keeps_no_words_of_texts() -> None:
    """Its own cache would be shared by all tenants."""
    resized: list[int] = []

    class Model:
        def _resize_cache(self, capacity: int) -> None:
            resized.append(capacity)

    class Library:
        model = Model()

        def __getattr__(self, name: str) -> Any:
            return getattr(WHOLE, name)

    class Namespace:
        class Tokenizer:
            @staticmethod
            def from_buffer(_: bytes) -> Any:
                return Library()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "tokenizers", Namespace)
        Tokenizer(SPEC, InlinePool())
    assert resized == [0]
    assert all(hasattr(kind, "_resize_cache") for kind in (models.BPE, models.Unigram))


@given(
    st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=8),
    st.text("abcd", max_size=60),
    st.integers(1, 12),
)
def test_borders_are_the_longest_tokens_from_left_to_right(
    tokens: list[str], text: str, window: int
) -> None:
    longest_first = sorted(tokens, key=len, reverse=True)
    whole = re.compile("|".join(map(re.escape, longest_first)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "WINDOW_CHARS", window)
        found = list(AddedTokens(tokens).find(text))
    assert found == [match.span() for match in whole.finditer(text)]


def test_added_tokens_with_a_common_start_are_tried_together() -> None:
    """Side by side, each place of such a text would be tried for all of them."""
    borders = AddedTokens([f"<unused{number}>" for number in range(6242)])
    assert borders._pattern.pattern.count("unused") == 1


@pytest.mark.parametrize("text", ["word ", "<|user|>", "\x01", "字", " x"])
@pytest.mark.parametrize("special", [False, True])
async def test_text_that_is_far_too_long_is_not_read_to_its_end(
    text: str, *, special: bool
) -> None:
    tokenizer, library = counted()
    with pytest.raises(TooManyTokens, match="more than 5000 tokens"):
        await tokenizer.encode(text * (2**21 // len(text)), most=5000, add_special_tokens=special)
    assert 0 < library.chars <= 3 * SLICE_CHARS


async def test_chat_that_is_far_too_long_is_not_read_to_its_end() -> None:
    tokenizer, library = counted()
    chat = "".join(f"<|user|>turn {n}: " + "word " * 200 + "<|end|>" for n in range(2000))
    with pytest.raises(TooManyTokens, match="more than 5000 tokens"):
        await tokenizer.encode(chat, most=5000)
    assert 0 < library.chars <= 2 * SLICE_CHARS


@pytest.mark.parametrize("text", ["word ", "<|user|>", "\x01", "ß"])
async def test_long_text_that_fits_is_never_refused(text: str) -> None:
    long = text * (3 * SLICE_CHARS // len(text))
    tokens = WHOLE.encode(long, add_special_tokens=False).ids
    assert list(await Tokenizer(SPEC, InlinePool()).encode(long, most=len(tokens))) == tokens


async def test_long_texts_are_tokenised_on_threads() -> None:
    threads = ThreadPool(threads=1)
    text = "over the lazy dog " * INLINE_CHARS
    try:
        tokens = await Tokenizer(SPEC, threads).encode(text)
    finally:
        threads.close()
    assert list(tokens) == WHOLE.encode(text, add_special_tokens=False).ids


def metaspace(scheme: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": scheme},
        "decoder": None,
    }


def with_first_added_token(**changes: Any) -> dict[str, Any]:
    first, *others = json.loads(SPEC)["added_tokens"]
    return {"added_tokens": [first | changes, *others]}


def with_longer_token() -> dict[str, Any]:
    """With an added token that begins as another one does."""
    spec = json.loads(SPEC)
    longer = spec["added_tokens"][0] | {"id": 5, "content": "<|end|>>"}
    vocabulary = {token: number + (number > 4) for token, number in spec["model"]["vocab"].items()}
    spec["model"]["vocab"] = vocabulary | {"<|end|>>": 5}
    return {"added_tokens": [*spec["added_tokens"], longer], "model": spec["model"]}


SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "normalised": {"normalizer": {"type": "NFC"}},
    "prefixed": {"normalizer": {"type": "Prepend", "prepend": "_"}},
    "spaced": {"pre_tokenizer": SPACED},
    "uncut": {"pre_tokenizer": None},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, SPACED],
        }
    },
    "metaspace always": metaspace("always"),
    "metaspace first": metaspace("first"),
    "spaces left": with_first_added_token(lstrip=True),
    "spaces right": with_first_added_token(rstrip=True),
    "single word": with_first_added_token(single_word=True),
    "one begins another": with_longer_token(),
}
parts = st.sampled_from(["<|endoftext|>", "<|end|>", "<|end|>>", " ", "e\u0301", "7 1", "word "])
long_parts = st.sampled_from(["word " * 60, " 12" * 100, "e\u0301" * 150])


@pytest.mark.parametrize("variant", VARIANTS)
@given(st.lists(parts | long_parts, max_size=8).map("".join))
@example("word " * 60 + " <|endoftext|> " + "word " * 60)
@example("<|end|>" + "word " * 60)
@example("<|end|>>" + "word " * 60)
async def test_other_tokenizers_give_the_tokens_of_the_whole_text(variant: str, text: str) -> None:
    tokenizer, library = both(variant)
    expected = library.encode(text, add_special_tokens=False).ids
    assert list(await tokenizer.encode(text)) == expected


@cache
def both(variant: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    spec = changed(**VARIANTS[variant])
    return Tokenizer(spec, InlinePool()), tokenizers.Tokenizer.from_buffer(spec)


async def test_special_tokens_are_put_around_a_text_on_request() -> None:
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    spec = changed(
        post_processor={
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        }
    )
    tokenizer = Tokenizer(spec, InlinePool())
    plain = list(await tokenizer.encode("hi"))
    assert list(await tokenizer.encode("hi", add_special_tokens=True)) == [0, *plain]


async def test_settings_that_cut_or_fill_texts_are_ignored() -> None:
    spec = changed(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    )
    assert len(await Tokenizer(spec, InlinePool()).encode("one two three four five six")) > 3


async def test_lone_surrogates_are_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        await Tokenizer(SPEC, InlinePool()).encode("a\ud800")


@pytest.mark.parametrize("spec", [b"", b"{}", b"[]", b"\xff", SPEC[:-1]])
def test_file_that_is_no_tokenizer_is_a_bad_model(spec: bytes) -> None:
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        Tokenizer(spec, InlinePool())
