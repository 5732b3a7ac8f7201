"""Tokenizer of one model: the `tokenizers` library, run off the event loop.

Added tokens (`<|user|>` and their kind) are borders that no other token crosses: the text between
two is tokenised by itself, and long pieces are looked up the next time (`PieceCache`). Where a
tokenizer does not work that way, texts are tokenised whole. A text with far more characters than
the limit has tokens is counted in slices before.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import tokenizers

from kvlane.app.preprocess.json_limits import MAX_PROMPT_TOKENS
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.text.detokenize import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowedDetokenizer,
    vocabulary_of,
)

INLINE_CHARS = 1000
"""Shorter texts are tokenised on the loop."""
SLICE_CHARS = 32 * 1024
SLICE_TOKENS = 256
"""Extra tokens of a text that is cut in two, at most: a word, or a run of spaces."""
WINDOW_CHARS = 64 * 1024
"""Borders are sought in so much text at a time: a search holds the interpreter lock."""
USUAL_CHARS = 8
"""Characters of a token, at most: only long runs of spaces and the like have more."""
SAMPLES, SAMPLE_CHARS = 16, 256
"""Size of the sample by which the tokens of a text with more characters are estimated."""
CACHE_BYTES = 64 * 1024 * 1024
MIN_CHARS = 256
"""Shorter pieces of text are tokenised again each time: that is as quick as the cache."""
MAX_SHARES = 256
"""Tenants with a share; a new one takes that of the tenant whose last request is the oldest."""
ENTRY_BYTES = 256


class Scope(NamedTuple):
    """Requests that may find each other's pieces. "" for all without a tenant, or a salt."""

    tenant: str = ""
    salt: str = ""


ANYONE = Scope()


class _Key(NamedTuple):
    model: Hashable
    salt: str
    text: str


class _Share:
    def __init__(self) -> None:
        self.bytes = 0
        self.pieces: OrderedDict[_Key, array[int]] = OrderedDict()

    def evict(self) -> int:
        size = size_of(*_entry(self.pieces.popitem(last=False)))
        self.bytes -= size
        return size


class PieceCache:
    """Tokens of long pieces of text, for all models and tenants of a process.

    A piece is found again only in its `Scope`: the time that a prompt takes says nothing about the
    prompts of others. When the cache is full, the tenant with the largest share loses its least
    recently used piece.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._shares: OrderedDict[str, _Share] = OrderedDict()

    def get(self, model: Hashable, scope: Scope, text: str) -> array[int] | None:
        share = self._shares.get(scope.tenant)
        if share is None or len(text) < MIN_CHARS:
            return None
        self._shares.move_to_end(scope.tenant)
        key = _Key(model, scope.salt, text)
        tokens = share.pieces.get(key)
        if tokens is not None:
            share.pieces.move_to_end(key)
        return tokens

    def put(self, model: Hashable, scope: Scope, text: str, tokens: array[int]) -> None:
        size = size_of(text, tokens)
        if len(text) < MIN_CHARS or size > self._most_bytes:
            return
        share = self._shares.get(scope.tenant)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self.bytes -= self._shares.popitem(last=False)[1].bytes
            share = self._shares[scope.tenant] = _Share()
        key = _Key(model, scope.salt, text)
        if key in share.pieces:
            return
        share.pieces[key] = tokens
        share.bytes += size
        self.bytes += size
        while self.bytes > self._most_bytes:
            self.bytes -= max(self._shares.values(), key=lambda share: share.bytes).evict()


def size_of(text: str, tokens: array[int]) -> int:
    return text.__sizeof__() + tokens.__sizeof__() + ENTRY_BYTES


def _entry(item: tuple[_Key, array[int]]) -> tuple[str, array[int]]:
    key, tokens = item
    return key.text, tokens


class Tokenizer:
    """One model's tokenizer. Everything but `encode` is quick and may be called on the loop."""

    def __init__(self, spec: bytes, pool: WorkPool, pieces: PieceCache | None = None) -> None:
        """`spec`: a tokenizer.json. `pieces`: by default a cache of its own. Raises BadModel."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(spec)
        except Exception as e:  # the library raises no narrower one
            raise BadModel(f"tokenizer.json: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pool = pool
        self._pieces = PieceCache() if pieces is None else pieces
        self._key = object()  # of this model in the cache
        if (resize := getattr(self._tokenizer.model, "_resize_cache", None)) is not None:
            resize(0)  # the library keeps words of all texts: their time would tell of others
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(tokens.values(), default=-1) + 1
        fields: dict[str, Any] = json.loads(spec)
        self._borders = _borders(fields)
        is_byte_level = (fields.get("decoder") or {}).get("type") == "ByteLevel"
        self._vocabulary = vocabulary_of(tokens, self.special) if is_byte_level else None

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        most: int = MAX_PROMPT_TOKENS,
        scope: Scope = ANYONE,
    ) -> Sequence[int]:
        """The tokens of a text. Special tokens in it count as such.

        `add_special_tokens`: with those around any text, as for completions. `scope`: of the cache.
        A text that clearly has more than `most` tokens is not read to its end. Raises
        UnicodeEncodeError for lone surrogates, TooManyTokens and PreprocessorOverloaded.
        """
        text.encode()  # the library would raise a TypeError
        if add_special_tokens or self._borders is None:
            return (await self._encode([text], most, add_special_tokens=add_special_tokens))[0]
        pieces = await self._cut(text, self._borders)
        known = [self._pieces.get(self._key, scope, piece) for piece in pieces]
        missing = [p for p, tokens in zip(pieces, known, strict=True) if tokens is None]
        left = most - sum(len(tokens) for tokens in known if tokens is not None)
        if missing and left < 0:
            raise TooManyTokens(most)
        try:
            made = await self._encode(missing, left) if missing else []
        except TooManyTokens:
            raise TooManyTokens(most) from None
        new = iter(made)
        tokens = array("I")
        for piece in known:
            tokens += next(new) if piece is None else piece
        for piece_text, piece_tokens in zip(missing, made, strict=True):
            self._pieces.put(self._key, scope, piece_text, piece_tokens)
        return tokens

    async def _cut(self, text: str, borders: AddedTokens) -> list[str]:
        if len(text) < INLINE_CHARS:
            return _pieces(text, borders)
        return await self._pool.run(lambda: _pieces(text, borders))

    def encode_now(self, text: str) -> Sequence[int]:
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def _encode(
        self, texts: list[str], most: int, *, add_special_tokens: bool = False
    ) -> list[array[int]]:
        """The tokens of each text. Raises TooManyTokens for clearly more than `most` in all."""

        def work() -> list[array[int]]:
            # The batch form releases the interpreter lock, the plain one does not.
            encode = partial(
                self._tokenizer.encode_batch_fast, add_special_tokens=add_special_tokens
            )
            if sum(map(len, texts)) <= max(USUAL_CHARS * most, SLICE_CHARS):
                encodings = encode(texts)
            else:
                encodings = []
                for text in texts:
                    left = most - sum(map(len, encodings))
                    if left < 0:
                        break
                    self._check_length(text, left)
                    encodings += encode([text])
            # To take the tokens from the library takes 0.1 us each and holds the interpreter lock.
            if len(encodings) < len(texts) or sum(map(len, encodings)) > 2 * most:
                raise TooManyTokens(most)
            return [array("I", encoding.ids) for encoding in encodings]

        if sum(map(len, texts)) < INLINE_CHARS:
            return work()
        return await self._pool.run(work)

    def _check_length(self, text: str, most: int) -> None:
        """Raise TooManyTokens for a text with many more tokens than `most`. Of an unusually long
        text a sample is tokenised, from places that a client cannot foresee (Python's hash has a
        secret); one that seems too long is counted in slices until it is."""
        if len(text) <= max(USUAL_CHARS * most, SLICE_CHARS):
            return
        stride = len(text) // SAMPLES
        first = hash(text) % (stride - SAMPLE_CHARS)
        places = range(first, len(text), stride)
        counted = sum(self._count([text[at : at + SAMPLE_CHARS] for at in places]))
        if counted * len(text) <= 2 * most * SAMPLES * SAMPLE_CHARS:
            return
        tokens = 0
        for at in range(0, len(text), SLICE_CHARS):
            tokens += sum(self._count([text[at : at + SLICE_CHARS]])) - SLICE_TOKENS
            if tokens > most:
                raise TooManyTokens(most)

    def _count(self, texts: list[str]) -> list[int]:
        return [
            len(encoding)
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a single token; empty for an id without one."""
        if self._vocabulary is not None:
            pieces = self._vocabulary.pieces
            return pieces[token_id] if 0 <= token_id < len(pieces) else b""
        return self.decode([token_id], skip_special=False).encode()

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
        return text

    def detokenizer(self, before: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """For one answer that follows the tokens `before`."""
        if self._vocabulary is not None:
            return ByteLevelDetokenizer(self._vocabulary, before, skip_special=skip_special)
        return WindowedDetokenizer(lambda ids: self.decode(ids, skip_special=skip_special), before)


class TooManyTokens(Exception):
    def __init__(self, most: int) -> None:
        super().__init__(f"has more than {most} tokens")
        self.most = most


class AddedTokens:
    """Finds added tokens in a text: the longest one that begins at a place, from left to right."""

    def __init__(self, tokens: Sequence[str]) -> None:
        # Side by side they would be tried one after the other at each place where they could
        # begin: 0.5 to 4 us a character for vocabularies with hundreds of reserved tokens.
        self._pattern = re.compile(_any_of(sorted(set(tokens) - {""})))
        self._longest = max(map(len, tokens))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        while at < len(text):
            end = at + WINDOW_CHARS
            for found in self._pattern.finditer(text, at, end + self._longest):
                if found.start() >= end:
                    break
                at = found.end()
                yield found.span()
            at = max(at, end)


def _any_of(texts: Sequence[str]) -> str:
    """The pattern of the longest of some sorted texts: their common beginning stands in it once."""
    patterns = []
    for _, begun_alike in groupby(texts, key=lambda text: text[0]):
        group = list(begun_alike)
        prefix = _common_prefix(group[0], group[-1])
        rest = [text[len(prefix) :] for text in group if text != prefix]
        longer = f"(?:{_any_of(rest)})" if rest else ""
        patterns.append(re.escape(prefix) + longer + ("?" if rest and prefix in group else ""))
    return "|".join(patterns)


def _common_prefix(first: str, last: str) -> str:
    length = 0
    for one, other in zip(first, last, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]


def _pieces(text: str, borders: AddedTokens) -> list[str]:
    """A text in pieces that are tokenised by themselves: long ones between two borders, and the
    rest."""
    cuts = [0]
    last = 0
    for begin, end in borders.find(text):
        if begin - last >= MIN_CHARS:
            cuts += [last, begin]
        last = end
    if len(text) - last >= MIN_CHARS:
        cuts.append(last)
    cuts.append(len(text))
    return [text[a:b] for a, b in pairwise(cuts) if a < b]


def _borders(spec: dict[str, Any]) -> AddedTokens | None:
    """Finds added tokens in a text, if the text between two of them is tokenised by itself. Not
    where an added token swallows spaces, or where the beginning of a text is special."""
    added = [t for t in spec.get("added_tokens") or [] if not t["normalized"]]
    if any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added):
        return None
    steps = spec.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if not added or not all(map(_is_local, steps)):
        return None
    return AddedTokens([token["content"] for token in added])


def _is_local(step: dict[str, Any]) -> bool:
    """Whether a step of pre-tokenising looks at one stretch between added tokens at a time."""
    kind = step.get("type")
    if kind == "Metaspace":
        return step.get("prepend_scheme") in ("always", "never")
    return kind in (None, "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace")
