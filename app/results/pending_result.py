"""The result of one request, from the records of its reply, with a body as of the HTTP endpoints.
Pure: the same `Result` for the same records."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from kvlane.app.http.api_errors import WHOLE_CODES, ApiError, error_of_piece
from kvlane.app.http.openai import openai_responses
from kvlane.app.http.openai.answer_items import AnswerItems
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.logprobs import TokenText
from kvlane.app.http.openai.openai_responses import Choice, EndpointKind, ResponseHeader
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.ids import issued_ms
from kvlane.streams.records import (
    Chunk,
    End,
    Fence,
    LogRecord,
    Refused,
    Result,
    ResultError,
    ResultTimings,
    ResultUsage,
    StoredTurn,
)
from kvlane.streams.request import ReplyAddress, Request, ResultOptions, StoredInput
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.responses.unreadable import RecordPlace

ResultStatus = Literal["completed", "failed", "cancelled"]

_ENDPOINTS: dict[str, EndpointKind] = {
    "chat": "chat",
    "completion": "completion",
    "tokens": "completion",
    "embedding": "embedding",
}
_LOST = End(id="", code="lost", message="part of the answer is no longer kept")
_FAILED = End(id="", code="internal", message="a record of it has values that cannot be processed")
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_MAX_DEADLINE_S = 1e9
"""30 years, longer than any record is kept."""


class PendingResult:
    """A request whose result is not written yet. `offset`: of its record in `requests`."""

    def __init__(
        self, log_record: LogRecord, record: Request | Refused, options: ResultOptions
    ) -> None:
        self.id = record.id
        self.offset = log_record.offset
        self.options = options
        self.appended_ms = log_record.timestamp_ms
        self.is_renewed = isinstance(record, Request) and record.is_renewed
        """Whether its record takes the place of an earlier one."""
        self.ended_ms = 0
        self.may_be_cut = False
        """Whether records of its reply may have been deleted before they were read."""
        self._is_cut = False
        asked = record if isinstance(record, Request) else Request(id=record.id)
        self.begun_ms = record.queued_ms or log_record.timestamp_ms
        """The append time of its prompt, or of its record without one."""
        self.due_ms = self.begun_ms + _deadline_ms(asked.deadline_s)
        """Broker time at which a router ends it at the latest, while there is one."""
        self._model_name = asked.asked_model
        self._target = asked.model if asked.alias else ""
        self.replaced: list[int] = []
        self.renewals: dict[int, int] = {}
        """Append times of later records with the answer so far, by offset, until a Fence names
        one."""
        shown = asked.shown
        self._transcript = Transcript(record.id, keep=options.kind == "tokens", shown_piece=shown)
        self._model: Model | None = None
        self._last: Chunk | End | None = None
        self._first_ms: int | None = None
        self._attempts = 0 if shown is None else shown.attempt + 1
        self._is_continued = shown is not None and _is_content(shown)
        """Whether the answer began before its record, at a time that is not known here."""
        self._has_begun = False
        """Whether a piece of the reply was visible."""
        output = asked.output
        self._spelling: TokenText | None = None
        if output.logprobs is not None:
            as_ids = bool(output.return_tokens_as_token_ids)
            self._spelling = TokenText(self._token_bytes, as_ids=as_ids)
        prompt_tokens = None if asked.body is not None else asked.prompt_tokens
        self._choice = Choice(prompt_tokens, before=options.echo, spelling=self._spelling)
        self._items = None if options.stored is None else AnswerItems()
        """Those of a stored response."""
        self._reply = options.reply
        self._is_oversized = False
        self._is_malformed = False
        if shown is not None:
            self._begin_with(shown, log_record.timestamp_ms)

    @property
    def is_over(self) -> bool:
        return self._last is not None

    @property
    def is_silent(self) -> bool:
        return not (self._has_begun or self._is_cut or self.is_over)

    @property
    def wanted_model(self) -> str | None:
        """The model whose tokens the body spells; None if it spells none."""
        is_spelled = self._spelling is not None and self._choice.shown_tokens > 0
        return (self._target or self._model_name) if is_spelled else None

    def _begin_with(self, piece: Chunk, at_ms: int) -> None:
        self._model_name = self._model_name or piece.model
        try:
            self._choice.add(piece)
        except Exception:  # noqa: BLE001 - values that no process of this project writes
            self.fail(at_ms)

    def renew(self, log_record: LogRecord) -> int:
        """Take another record in the place of its own; returns the offset of the latter."""
        replaced, self.offset = self.offset, log_record.offset
        self.appended_ms, self.is_renewed = log_record.timestamp_ms, True
        return replaced

    def apply(self, record: Chunk | Fence | End, at_ms: int) -> bool:
        """Apply the next record of the reply, appended at broker time `at_ms`; whether it ended.
        Raises any error for a record with values that no process of this project writes."""
        if self.is_over:
            return True
        if not self.is_renewed and self._is_of_earlier_copy(record, at_ms):
            return False  # that has its result
        if not isinstance(record, End):
            self._attempts = max(self._attempts, record.attempt + 1)
        if isinstance(record, Fence) and record.origin in self.renewals:
            self._move_to(record)
        piece = None if self._is_cut else self._transcript.apply(record)
        if piece is not None and not self._is_end_of_cut(piece):
            self._add(piece, at_ms)
        elif self.may_be_cut and not self._has_begun and self._may_be_end(record):
            self.lose(at_ms)
        return self.is_over

    def _is_of_earlier_copy(self, record: Chunk | Fence | End, at_ms: int) -> bool:
        """A prompt may be published again for 7 days; routers do not run it again."""
        if isinstance(record, End) and 0 <= record.origin < self.offset:
            return True
        return at_ms < self.appended_ms - CLOCK_SKEW_MS

    def _move_to(self, fence: Fence) -> None:
        """Take the record that a Fence names in the place of those before it. Not if the attempt
        has begun: then the record is of a router that has lost the lane, and came too late."""
        transcript = self._transcript
        if fence.attempt == transcript.attempt and transcript.awaits_run and not self._is_cut:
            self.replaced += [self.offset, *(each for each in self.renewals if each < fence.origin)]
            self.offset, self.appended_ms = fence.origin, self.renewals[fence.origin]
            self.renewals = {at: ms for at, ms in self.renewals.items() if at > fence.origin}
            self.is_renewed = True

    def apply_unreadable(self, place: RecordPlace, reason: str, at_ms: int) -> bool:
        """Apply a record that cannot be decoded; whether it ended the reply."""
        if not self.is_over and not self._is_cut:
            end = self._transcript.apply_unreadable(place, reason)
            if end is not None:
                self._add(end, at_ms)
        return self.is_over

    def cut(self) -> None:
        """Records of its reply may have been deleted, after those that were read."""
        self.may_be_cut = True
        if self._has_begun:
            self._is_cut, self._has_begun = True, False

    @property
    def is_lost(self) -> bool:
        """Whether it has a beginning here, and its end may have been deleted."""
        return self.may_be_cut and not self._has_begun and not self.is_over

    def _add(self, piece: Chunk | End, at_ms: int) -> None:
        self._has_begun = True
        if isinstance(piece, Chunk):
            self._model_name = self._model_name or piece.model
            if self._first_ms is None and not self._is_continued and _is_content(piece):
                self._first_ms = at_ms
            for _ in () if self._items is None else self._items.add(piece):
                pass
        self._choice.add(piece)
        if _ends(piece):
            self._last, self.ended_ms = piece, at_ms

    def _is_end_of_cut(self, piece: Chunk | End) -> bool:
        """Whether a piece ends an answer as whole whose beginning may be missing."""
        is_whole = isinstance(piece, End) and piece.code in WHOLE_CODES
        return self.may_be_cut and not self._has_begun and is_whole

    def _may_be_end(self, record: Chunk | Fence | End) -> bool:
        """Whether a record that is not shown may be the end of a reply whose beginning is missing.
        The last Chunk of an attempt below a Fence ends nothing, whatever was deleted."""
        is_fenced = isinstance(record, Chunk) and record.attempt < self._transcript.attempt
        return _ends(record) and not is_fenced

    @property
    def status(self) -> ResultStatus:
        return _status(self._failure())

    @property
    def reply(self) -> ReplyAddress | None:
        return self._reply

    def drop_body(self) -> None:
        """Report an error instead of the body: it does not fit into a record."""
        self._is_oversized = True

    def lose(self, at_ms: int) -> None:
        """End it with an error: its answer is no longer in the log."""
        self._last, self.ended_ms = _LOST, at_ms

    def fail(self, at_ms: int) -> None:
        """End it with an error: `apply`, `build`, or the encoding of its result has failed."""
        self._last, self.ended_ms = _FAILED, self.ended_ms or at_ms
        self._is_malformed = True

    def build(self, model: Model | None = None) -> Result:
        """The result, after the end. `model`: of `wanted_model`; without it, tokens are ids. Raises
        any error for values that no process of this project writes; not after `fail`."""
        self._set_model(model)
        options, failure = self.options, self._failure()
        stored = None if self._is_oversized or self._is_malformed else options.stored
        if stored is not None:
            body: dict[str, Any] | None = self._response(stored, failure)
        else:
            body = None if failure is not None else self._body()
        return Result(
            id=self.id,
            status=_status(failure),
            status_code=200 if failure is None else failure.status,
            model=self._model_name,
            kind=options.kind if options.stored is None else "response",
            body=body,
            usage=self._usage(failure),
            error=None if failure is None else msgspec.convert(failure.fields(), ResultError),
            timings=ResultTimings(
                queued_ms=max(0, self.appended_ms - self.begun_ms),
                ttft_ms=None if self._first_ms is None else self._since(self._first_ms),
                total_ms=self._since(self.ended_ms),
                finished_ms=self.ended_ms,
            ),
            attempts=self._attempts,
            metadata={} if self._is_malformed else _decode_object(options.metadata or b"{}"),
            batch_id=options.batch_id,
            custom_id=options.custom_id,
            stored=UNSET
            if stored is None
            else StoredTurn(
                input=_decode_items(stored.input),
                history=stored.history,
                conversation=stored.conversation or UNSET,
            ),
        )

    def _failure(self) -> ApiError | None:
        assert self._last is not None, "the request has not ended"
        failure = error_of_piece(self._last)
        if failure is None and self._is_oversized:
            return ApiError(500, "the result is larger than a record may be", code="too_large")
        return failure

    @property
    def _header(self) -> ResponseHeader:
        created_s = (issued_ms(self.id) or self.begun_ms) // 1000
        return ResponseHeader(_ENDPOINTS[self.options.kind], self.id, self._model_name, created_s)

    def _response(self, stored: StoredInput, failure: ApiError | None) -> dict[str, Any]:
        assert self._items is not None
        options = ResponseOptions(header=self._header, ids=[self.id], stream=False)
        encoder = ResponseEncoder(
            options, [self._choice], (), _decode_object(stored.shown), stored.namespaces
        )
        encoder.items = self._items
        return encoder.whole() if failure is None else encoder.failed(failure)

    def _body(self) -> dict[str, Any]:
        body = openai_responses.full_response(self._header, [self._choice])
        if self.options.kind == "tokens":
            body["choices"][0]["token_ids"] = self._transcript.tokens
        return body

    def _usage(self, failure: ApiError | None) -> ResultUsage | None:
        usage = self._choice.usage
        if usage is None or self._is_malformed:
            return None
        if failure is not None and not self._choice.counted_tokens:
            return None
        unknown, total = usage.unknown, usage.prompt_tokens + usage.completion_tokens
        if "prompt_tokens" in unknown or "completion_tokens" in unknown:
            unknown, total = (*unknown, "total_tokens"), 0
        return ResultUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=total,
            cached_tokens=usage.cached_tokens,
            unknown=unknown or UNSET,
        )

    def _set_model(self, model: Model | None) -> None:
        self._model = model
        if model is None and self._spelling is not None:
            self._spelling = self._choice.spelling = TokenText(self._token_bytes, as_ids=True)

    def _token_bytes(self, token_id: int) -> bytes:
        return b"" if self._model is None else self._model.token_bytes(token_id)

    def _since(self, at_ms: int) -> int:
        return max(0, at_ms - self.begun_ms)


def _deadline_ms(deadline_s: float) -> int:
    """A deadline in milliseconds; 0 for one that routers refuse, such as NaN."""
    return int(min(deadline_s, _MAX_DEADLINE_S) * 1000) if deadline_s >= 0 else 0


def _is_content(piece: Chunk) -> bool:
    return bool(piece.token_ids or piece.text or piece.data)


def _ends(record: Chunk | Fence | End) -> bool:
    """Whether a record ends a reply, if it is visible."""
    return isinstance(record, End) or (
        isinstance(record, Chunk) and record.finish_reason is not None
    )


def _status(failure: ApiError | None) -> ResultStatus:
    if failure is None:
        return "completed"
    return "cancelled" if failure.code == "cancelled" else "failed"
