"""From what becomes visible of a request to what an OpenAI client reads.

Pure functions: pieces of one answer or several (`Chunk`, `End`) in, objects of the OpenAI API out,
as they are encoded to JSON. Knows no HTTP and no log. Pieces that are failures have no form here
(`app/http/errors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from app.http import asides, logprobs
from app.http.logprobs import Likely, Spelling
from streams.records import Aside, Chunk, End, Placed, Usage

Kind = Literal["chat", "completion", "embedding"]
Json = dict[str, Any]

_OBJECTS: dict[Kind, str] = {
    "chat": "chat.completion", "completion": "text_completion", "embedding": "list",
}  # fmt: skip
_CHUNK_OBJECTS = _OBJECTS | {"chat": "chat.completion.chunk"}
_encode = msgspec.json.Encoder().encode
_OF_PROMPT = "prompt_tokens_details"
_TEXT = "\x00"
"""Stands for the text while a chunk is taken apart; what follows the text holds no such thing."""
_REASONS = {"eos": "stop"}
"""Finish reasons of the log that OpenAI knows by another name; all others are passed on."""


class Heading(NamedTuple):
    """What all objects of one HTTP answer have in common. `created`: seconds since 1970."""

    kind: Kind
    id: str
    model: str
    created: int


class Choice:
    """One of the answers to a request, as far as it has come.

    With `keep=False` its text is not kept: for answers that are passed on as they come.
    """

    def __init__(
        self,
        prompt_tokens: int = 0,
        *,
        before: str = "",
        keep: bool = True,
        spelling: Spelling | None = None,
    ) -> None:
        """`prompt_tokens` counts until the answer says what its prompt had; `before` is told
        first. `spelling`: of its tokens, if their log probabilities are wanted."""
        self.before = before
        self.tokens = 0
        """How many tokens of it were shown."""
        self.position = 0
        """Where a broken connection goes on from: behind so many tokens; of an answer without any,
        behind so many characters and asides."""
        self.begun = False
        self.finish_reason: str | None = None
        self.placed: Placed | None = None
        """Of a request that only asked where it would go."""
        self._prompt_tokens = prompt_tokens
        self._usage: Usage | None = None
        self._keep = keep
        self._spelling = spelling
        self._likely: list[Likely] = []
        """Of the tokens that are kept; without `keep` those of the last piece."""
        self._offset = len(before)
        """Characters of the text before those."""
        self._parts: list[str] = []
        self._asides = 0
        self._said: list[Aside] = []

    @property
    def text(self) -> str:
        """Its text, if it is kept, and what comes before it."""
        return self.before + "".join(self._parts)

    @property
    def said(self) -> Aside | None:
        """What is no text: all there is, or with `keep=False` that of the last piece."""
        if len(self._said) > 1:
            self._said = [asides.put_together(*self._said)]
        return self._said[0] if self._said else None

    @property
    def usage(self) -> Usage:
        """Token counts, by the writer of its end if that one gave any."""
        return self._usage or Usage(
            prompt_tokens=self._prompt_tokens, completion_tokens=self.tokens
        )

    @property
    def counted_tokens(self) -> int:
        """How many tokens it has so far; of an answer without any, as counted at its end."""
        return self.tokens or self.usage.completion_tokens

    def take(self, piece: Chunk | End) -> None:
        """The next piece, in order."""
        if not self._keep:
            self._said.clear()
        if piece.usage is not None:
            self._usage = piece.usage
        reason = piece.code if isinstance(piece, End) else piece.finish_reason
        if reason is not None:
            self.finish_reason = _REASONS.get(reason, reason)
        if isinstance(piece, End):
            self.placed = piece.placed
        if isinstance(piece, Chunk):
            self.tokens = piece.index + len(piece.token_ids)
            self._take_asides(piece)
            self.position = self.tokens or piece.chars + self._asides
            if self._keep:
                self._parts.append(piece.text)
            if self._spelling is not None:
                self._take_likely(piece)

    def logprobs(self, kind: Kind) -> Json | None:
        """Log probabilities: all there are, or with `keep=False` those of the last piece."""
        if self._spelling is None or not self._likely:
            return None
        if kind == "chat":
            return logprobs.of_chat(self._likely, self._spelling)
        return logprobs.of_completion(self._likely, self._spelling, self._offset)

    def _take_asides(self, piece: Chunk) -> None:
        self._asides += len(piece.data)
        self._said += piece.data

    def _take_likely(self, piece: Chunk) -> None:
        if not self._keep:
            self._likely.clear()
            self._offset = len(self.before) + piece.chars - len(piece.text)
        if piece.log_probs is not None:
            told = zip(piece.token_ids, piece.log_probs, strict=True)
            self._likely += [Likely(token_id, ranked) for token_id, ranked in told]


def chunk(
    heading: Heading, choice: Choice, piece: Chunk | End, index: int = 0, *, with_usage: bool
) -> Json | None:
    """What a stream tells of a piece that `choice` has taken; None for nothing, e.g. half a letter.

    `with_usage`: the stream ends with token counts, and all chunks before say that they have none.
    """
    text = piece.text if isinstance(piece, Chunk) else ""
    if not choice.begun:
        text = choice.before + text
    likely = choice.logprobs(heading.kind)
    if not text and likely is None and choice.said is None and choice.finish_reason is None:
        return None
    said = choice.said or Aside()
    told: Json = {"index": index}
    if heading.kind == "chat":
        delta: Json = {} if choice.begun else {"role": "assistant"}
        if text or not choice.begun:
            delta["content"] = text
        told["delta"] = delta | said.delta
    else:
        told["text"] = text
    choice.begun = True
    told["logprobs"] = likely
    told["finish_reason"] = choice.finish_reason
    more: Json = {"usage": None} if with_usage else {}
    more |= said.event | _placed([choice])
    return _object(heading, _CHUNK_OBJECTS, [told | said.choice], more)


class Words:
    """The chunks of one choice as JSON: what `chunk` gives, encoded.

    All but the first and the last differ in their text alone, so the rest is encoded once.
    """

    def __init__(self, heading: Heading, index: int, *, with_usage: bool) -> None:
        self._heading = heading
        self._index = index
        self._with_usage = with_usage
        begun = Choice()
        begun.begun = True
        piece = Chunk(id="", attempt=0, run="", seq=0, index=0, text=_TEXT)
        sample = chunk(heading, begun, piece, index, with_usage=with_usage)
        self._before, _, self._after = _encode(sample).rpartition(_encode(_TEXT))

    def encode(self, choice: Choice, piece: Chunk | End) -> bytes | None:
        """A piece that `choice` has taken; None for nothing."""
        plain = choice.begun and choice.finish_reason is None and choice.said is None
        if plain and choice.logprobs("chat") is None and isinstance(piece, Chunk):
            return self._before + _encode(piece.text) + self._after if piece.text else None
        told = chunk(self._heading, choice, piece, self._index, with_usage=self._with_usage)
        return None if told is None else _encode(told)


def last_chunk(heading: Heading, choices: Sequence[Choice], n: int = 1) -> Json:
    """The token counts at the end of a stream that was asked for them."""
    return _object(heading, _CHUNK_OBJECTS, [], {"usage": usage(choices, n)})


def whole(heading: Heading, choices: Sequence[Choice], n: int = 1) -> Json:
    """The answer in one object; all choices have ended."""
    if heading.kind == "embedding":
        return _embedded(heading, choices[0])
    told = [_told(heading.kind, number, choice) for number, choice in enumerate(choices)]
    more: Json = {}
    for choice in choices:
        more |= choice.said.event if choice.said else {}
    more |= {"usage": usage(choices, n)} | _placed(choices)
    return _object(heading, _OBJECTS, told, more)


def _embedded(heading: Heading, choice: Choice) -> Json:
    """Embeddings are all in an aside: they are no text and make no tokens."""
    said, counts = choice.said or Aside(), usage([choice])
    told = {name: counts[name] for name in ("prompt_tokens", "total_tokens")}
    more = {"model": heading.model, "usage": told} | _placed([choice])
    return {"object": "list", "data": []} | said.event | more


def usage(choices: Sequence[Choice], n: int = 1) -> Json:
    """Token counts of all choices together; `n` successive choices share a prompt."""
    answers = [choice.usage for choice in choices]
    prompts = answers[::n]
    prompt_tokens = sum(u.prompt_tokens for u in prompts)
    completion_tokens = sum(u.completion_tokens for u in answers)
    told: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
    }
    of_prompts = [{_OF_PROMPT: (u.details or {}).get(_OF_PROMPT, {})} for u in prompts]
    of_answers = [{n: d for n, d in (u.details or {}).items() if n != _OF_PROMPT} for u in answers]
    return asides.merged(told, asides.added(*of_prompts), asides.added(*of_answers))


def _placed(choices: Sequence[Choice]) -> Json:
    """Where the request would go, if it only asked for that; it has one choice then."""
    placed = choices[0].placed
    if placed is None:
        return {}
    where = {"worker_id": placed.worker_id, "dp_rank": placed.dp_rank}
    return {"nvext": where | {"token_ids": placed.token_ids}}


def _told(kind: Kind, index: int, choice: Choice) -> Json:
    besides = choice.said or Aside()
    said: Json = {"text": choice.text}
    if kind == "chat":
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if besides.delta:
            message |= {"content": choice.text or None} | asides.message_of(besides.delta)
        said = {"message": message}
    return (
        {"index": index}
        | said
        | {"logprobs": choice.logprobs(kind), "finish_reason": choice.finish_reason}
        | besides.choice
    )


def _object(heading: Heading, names: dict[Kind, str], choices: list[Json], more: Json) -> Json:
    kind, answer_id, model, created = heading
    named: Json = {"id": answer_id, "object": names[kind], "created": created, "model": model}
    return named | {"choices": choices} | more
