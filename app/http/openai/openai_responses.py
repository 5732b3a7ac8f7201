"""OpenAI response objects, built from the visible pieces of one answer or several. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from kvlane.app.http.openai import logprobs, passthrough_fields
from kvlane.app.http.openai.logprobs import TokenLogprobs, TokenText
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.streams.records import Chunk, DryRunResult, End, PassthroughDelta, Usage
from kvlane.streams.responses.transcript import Position, rest_after

EndpointKind = Literal["chat", "completion", "embedding"]

_OBJECTS: dict[EndpointKind, str] = {
    "chat": "chat.completion", "completion": "text_completion", "embedding": "list",
}  # fmt: skip
_CHUNK_OBJECTS = _OBJECTS | {"chat": "chat.completion.chunk"}
_encode = msgspec.json.Encoder().encode
_CHARS_PER_TOKEN = 4
_OF_PROMPT = "prompt_tokens_details"
_TEXT = "\x00"
"""Placeholder for the text of a sample chunk; it cannot occur after the text."""
_REASONS = {"eos": "stop"}
_COMPLETE = ("stop", "length", "content_filter", "tool_calls", "function_call")


class ResponseHeader(NamedTuple):
    """Fields shared by all objects of one HTTP response. `created`: seconds since 1970."""

    kind: EndpointKind
    id: str
    model: str
    created: int


class Choice:
    """Accumulated state of one answer. With `keep=False` its text is not kept: it is streamed."""

    def __init__(
        self,
        prompt_tokens: int | None = 0,
        *,
        before: str = "",
        keep: bool = True,
        spelling: TokenText | None = None,
    ) -> None:
        """`prompt_tokens` is used until the answer reports its own count, None for one that only
        its server can count; `before` is sent before the text. `spelling`: text of tokens, if log
        probabilities are requested."""
        self.echoed_text = before
        self.shown_tokens = 0
        self.position = 0
        """Position to resume from, see `streams/responses/transcript.py`."""
        self._reading = Position()
        self.has_started = False
        self.finish_reason: str | None = None
        self.dry_run_result: DryRunResult | None = None
        self._prompt_tokens = prompt_tokens
        self._usage: Usage | None = None
        self._keep = keep
        self.spelling = spelling
        self._log_probs: list[TokenLogprobs] = []
        """Log probabilities of the kept tokens; without `keep`, those of the last piece."""
        self._offset = len(before)
        self._parts: list[str] = []
        self._passthrough: list[PassthroughDelta] = []

    @property
    def text(self) -> str:
        return self.echoed_text + "".join(self._parts)

    @property
    def passthrough(self) -> PassthroughDelta | None:
        """Fields other than text: all of them, or with `keep=False` those of the last piece."""
        if len(self._passthrough) > 1:
            self._passthrough = [passthrough_fields.merge_deltas(*self._passthrough)]
        return self._passthrough[0] if self._passthrough else None

    @property
    def usage(self) -> Usage | None:
        """Token counts, as reported with the last piece if they were; None if they are unknown."""
        if self._usage is not None or self._prompt_tokens is None:
            return self._usage
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self.shown_tokens)

    @property
    def known_tokens(self) -> int | None:
        """Number of tokens so far; without token ids the reported count, if any."""
        if self.shown_tokens:
            return self.shown_tokens
        usage = self.usage
        if usage is None or "completion_tokens" in usage.unknown:
            return None
        return usage.completion_tokens

    @property
    def timed_tokens(self) -> int:
        return self.shown_tokens or self.position

    @property
    def counted_tokens(self) -> int:
        """Number of tokens so far that count towards limits, estimated where it is unknown."""
        known = self.known_tokens
        return -(-self.position // _CHARS_PER_TOKEN) if known is None else known

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason in _COMPLETE

    def add(self, piece: Chunk | End) -> None:
        if not self._keep:
            self._passthrough.clear()
        if piece.usage is not None:
            self._usage = piece.usage
        reason = piece.code if isinstance(piece, End) else piece.finish_reason
        if reason is not None:
            self.finish_reason = _REASONS.get(reason, reason)
        if isinstance(piece, End):
            self.dry_run_result = piece.placed
        if isinstance(piece, Chunk):
            self.shown_tokens = piece.index + len(piece.token_ids)
            self._passthrough += piece.data
            self.position = self._reading.pass_over(piece)
            if self._keep:
                self._parts.append(piece.text)
            if self.spelling is not None:
                self._take_log_probs(piece)

    def rest_of(self, piece: Chunk, position: int) -> Chunk | None:
        """The part of the next piece behind a position; the part before it counts as added."""
        rest = rest_after(piece, self._reading.end_of(piece), position)
        if rest is not None:
            self._reading.skip_known(piece, rest)
        return rest

    def logprobs(self, kind: EndpointKind) -> JsonObject | None:
        """All log probabilities, or with `keep=False` those of the last piece."""
        if self.spelling is None or not self._log_probs:
            return None
        if kind == "chat":
            return logprobs.chat_logprobs(self._log_probs, self.spelling)
        return logprobs.completion_logprobs(self._log_probs, self.spelling)

    def _take_log_probs(self, piece: Chunk) -> None:
        assert self.spelling is not None
        if not self._keep:
            self._log_probs.clear()
        if piece.log_probs is None:
            self._offset += sum(piece.token_chars)
        else:
            # A reader that resumes lacks the pieces before.
            offset = max(self._offset, piece.chars - len(piece.text))
            found, self._offset = logprobs.tokens_with_offsets(piece, offset, self.spelling)
            self._log_probs += found


def chunk(
    header: ResponseHeader, choice: Choice, piece: Chunk | End, index: int = 0, *, with_usage: bool
) -> JsonObject | None:
    """The event of a piece that `choice` has taken; None for none, e.g. half a character.
    `with_usage`: the stream ends with token counts, and all chunks before have `usage: null`."""
    text = piece.text if isinstance(piece, Chunk) else ""
    if not choice.has_started:
        text = choice.echoed_text + text
    log_probs = choice.logprobs(header.kind)
    if (
        not text
        and log_probs is None
        and choice.passthrough is None
        and choice.finish_reason is None
    ):
        return None
    passthrough = choice.passthrough or PassthroughDelta()
    fields: JsonObject = {"index": index}
    if header.kind == "chat":
        delta: JsonObject = {} if choice.has_started else {"role": "assistant"}
        if text or not choice.has_started:
            delta["content"] = text
        fields["delta"] = delta | passthrough.delta
    else:
        fields["text"] = text
    choice.has_started = True
    fields["logprobs"] = log_probs
    fields["finish_reason"] = choice.finish_reason
    more: JsonObject = {"usage": None} if with_usage else {}
    more |= passthrough.event | _dry_run_fields([choice])
    return _object(header, _CHUNK_OBJECTS, [fields | passthrough.choice], more)


class ChunkEncoder:
    """Encoder of the chunks of one choice, as `chunk` makes them. All but the first and the last
    differ only in their text, so the rest is encoded once."""

    def __init__(self, header: ResponseHeader, index: int, *, with_usage: bool) -> None:
        self._header = header
        self._index = index
        self._with_usage = with_usage
        begun = Choice()
        begun.has_started = True
        piece = Chunk(id="", attempt=0, run="", seq=0, index=0, text=_TEXT)
        sample = chunk(header, begun, piece, index, with_usage=with_usage)
        self._is_chat = header.kind == "chat"
        self._before, _, self._after = _encode(sample).rpartition(_encode(self._content(_TEXT)))

    def encode_text(self, text: str) -> bytes:
        return self._before + _encode(self._content(text)) + self._after

    def _content(self, text: str) -> str | JsonObject:
        return {"content": text} if self._is_chat else text

    def encode(self, choice: Choice, piece: Chunk | End) -> bytes | None:
        """The chunk for a piece that was added to `choice`; None if there is nothing to send."""
        is_between = choice.has_started and choice.finish_reason is None
        if is_between and isinstance(piece, Chunk) and choice.logprobs("chat") is None:
            passthrough = choice.passthrough
            if passthrough is None:
                return self.encode_text(piece.text) if piece.text else None
            if self._is_chat and not (passthrough.choice or passthrough.event):
                content: JsonObject = {"content": piece.text} if piece.text else {}
                return self._before + _encode(content | passthrough.delta) + self._after
        fields = chunk(self._header, choice, piece, self._index, with_usage=self._with_usage)
        return None if fields is None else _encode(fields)


def usage_chunk(header: ResponseHeader, choices: Sequence[Choice], n: int = 1) -> JsonObject | None:
    """Token counts, sent at the end of a stream with `include_usage`; None if none are known."""
    counts = usage(choices, n)
    return _object(header, _CHUNK_OBJECTS, [], {"usage": counts}) if counts else None


def full_response(header: ResponseHeader, choices: Sequence[Choice], n: int = 1) -> JsonObject:
    """The complete response as one object; all choices have ended."""
    if header.kind == "embedding":
        return _embedded(header, choices[0])
    fields = [_choice_object(header.kind, number, choice) for number, choice in enumerate(choices)]
    more: JsonObject = {}
    for choice in choices:
        more |= choice.passthrough.event if choice.passthrough else {}
    if counts := usage(choices, n):
        more["usage"] = counts
    more |= _dry_run_fields(choices)
    return _object(header, _OBJECTS, fields, more)


def _embedded(header: ResponseHeader, choice: Choice) -> JsonObject:
    passthrough, counts = choice.passthrough or PassthroughDelta(), usage([choice])
    more: JsonObject = {"model": header.model}
    names = ("prompt_tokens", "total_tokens")
    if fields := {name: counts[name] for name in names if name in counts}:
        more["usage"] = fields
    more |= _dry_run_fields([choice])
    return {"object": "list", "data": []} | passthrough.event | more


def usage(choices: Sequence[Choice], n: int = 1) -> JsonObject:
    """Token counts summed over choices; `n` successive choices share a prompt. Counts that are
    unknown for one of them are left out."""
    found = [choice.usage for choice in choices]
    answers = [counts for counts in found if counts is not None]
    if len(answers) < len(found):
        return {}
    prompts = answers[::n]
    unknown = {name for counts in answers for name in counts.unknown}
    prompt_tokens = sum(u.prompt_tokens for u in prompts)
    completion_tokens = sum(u.completion_tokens for u in answers)
    fields: JsonObject = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if unknown.isdisjoint(fields):
        fields["total_tokens"] = prompt_tokens + completion_tokens
    fields[_OF_PROMPT] = {"cached_tokens": sum(u.cached_tokens for u in prompts)}
    fields = {name: value for name, value in fields.items() if name not in unknown}
    if "cached_tokens" in unknown:
        del fields[_OF_PROMPT]
    of_prompts = [{_OF_PROMPT: (u.details or {}).get(_OF_PROMPT, {})} for u in prompts]
    of_answers = [{n: d for n, d in (u.details or {}).items() if n != _OF_PROMPT} for u in answers]
    counts = passthrough_fields.merge_fields(
        fields,
        passthrough_fields.sum_counts(*of_prompts),
        passthrough_fields.sum_counts(*of_answers),
    )
    return {name: value for name, value in counts.items() if value != {}}


def _dry_run_fields(choices: Sequence[Choice]) -> JsonObject:
    """Result of a dry run, which has one choice; empty for other requests."""
    result = choices[0].dry_run_result
    if result is None:
        return {}
    where: JsonObject = {"worker_id": result.worker_id, "dp_rank": result.dp_rank}
    if result.prefill_worker_id:
        where["prefill_worker_id"] = result.prefill_worker_id
        where["prefill_dp_rank"] = result.prefill_dp_rank
    return {"nvext": where | {"token_ids": result.token_ids}}


def _choice_object(kind: EndpointKind, index: int, choice: Choice) -> JsonObject:
    passthrough = choice.passthrough or PassthroughDelta()
    content: JsonObject = {"text": choice.text}
    if kind == "chat":
        message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
        if passthrough.delta:
            message |= {"content": choice.text or None} | passthrough_fields.to_message(
                passthrough.delta
            )
        content = {"message": message}
    return (
        {"index": index}
        | content
        | {"logprobs": choice.logprobs(kind), "finish_reason": choice.finish_reason}
        | passthrough.choice
    )


def _object(
    header: ResponseHeader,
    names: dict[EndpointKind, str],
    choices: list[JsonObject],
    more: JsonObject,
) -> JsonObject:
    kind, answer_id, model, created = header
    named: JsonObject = {"id": answer_id, "object": names[kind], "created": created, "model": model}
    return named | {"choices": choices} | more
