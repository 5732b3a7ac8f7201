"""The reader's rule: which records of a request's stream are part of its answer.

One fold over the records of one request, in log order, used by everything that reads `responses`:
gateways, clients, and routers that look for what was shown before a worker died. Whatever was
duplicated on the way (a producer's retry, a request delivered twice, two routers at once, a worker
that was given up and still writes) shows once, and two readers show the same.

1. The attempt is the highest Fence seen, 0 before any. Chunks of other attempts are skipped.
2. The first Chunk of an attempt decides its run. Chunks of other runs are skipped.
3. Within the run `seq` must be the next one and `index` the number of tokens shown so far. A lower
   `seq` is a producer's retry and skipped. Anything else is a hole: this and every later Chunk of
   the run is skipped, one with a finish reason too, since the text before it is not whole.
4. A shown Chunk with a finish reason, or an End, ends the request. Whatever comes later is ignored.

`streams/vectors` holds the rule as test vectors for other languages. This module never reads the
log, never waits, and trusts nothing but the order of the records.
"""

from __future__ import annotations

from collections.abc import Iterable

from streams.records import Chunk, End, Fence, Usage


class Transcript:
    """What a reader has seen of one request. Feed it the records of that request only.

    With `keep=False` tokens and text are counted, not kept: for readers that pass them on.

    With `until_attempt` it is what a reader had seen when that attempt began: from the first Fence
    of it, or of a higher one, on (`closed`) nothing counts. However many routers fence an attempt,
    all of them continue from the same token.
    """

    __slots__ = (
        "_keep",
        "_next",
        "_parts",
        "_run",
        "_until",
        "asides",
        "attempt",
        "chars",
        "closed",
        "end",
        "finish_reason",
        "holes",
        "over",
        "request_id",
        "shown",
        "skipped",
        "tokens",
        "usage",
    )

    def __init__(
        self, request_id: str = "", *, keep: bool = True, until_attempt: int | None = None
    ) -> None:
        self.request_id = request_id
        self.attempt = 0
        """The attempt that is shown now; it stays what it was at the end."""
        self.tokens: list[int] = []
        self.shown = 0
        """How many tokens were shown: the `index` that the next Chunk must have."""
        self.chars = 0
        """How long the shown text is, in Unicode code points."""
        self.asides = 0
        """How much was shown that is no text."""
        self.finish_reason: str | None = None
        self.end: End | None = None
        self.over = False
        self.usage: Usage | None = None
        self.holes = 0
        """Runs that lost a Chunk; not 0 means that a writer broke its promise."""
        self.skipped = 0
        """Chunks that were not shown, for whatever reason."""
        self.closed = False
        self._keep = keep
        self._until = until_attempt
        self._parts: list[str] = []
        self._run: str | None = None
        self._next: int | None = 0
        """The `seq` that will be shown; None when no Chunk of this attempt will be any more."""

    @property
    def text(self) -> str:
        """The text shown so far."""
        parts = self._parts
        if len(parts) > 1:
            parts[:] = ["".join(parts)]
        return parts[0] if parts else ""

    def feed(self, record: Chunk | Fence | End) -> Chunk | End | None:
        """Take the next record; give what becomes visible by it, if anything does."""
        if type(record) is not Chunk:
            return self._turn(record)
        if record.attempt != self.attempt or self._next is None:
            self.skipped += 1
            return None
        if record.run != self._run:
            if self._run is not None:
                self.skipped += 1
                return None
            self._run = record.run
        if record.seq != self._next or record.index != self.shown:
            self.skipped += 1
            if record.seq >= self._next:
                self._next = None
                self.holes += 1
            return None
        self._next += 1
        self.shown += len(record.token_ids)
        self.chars += len(record.text)
        self.asides += len(record.data)
        if self._keep:
            self.tokens += record.token_ids
            self._parts.append(record.text)
        if record.usage is not None:
            self.usage = record.usage
        if record.finish_reason is not None:
            self.finish_reason = record.finish_reason
            self._finish()
        return record

    def _turn(self, record: Chunk | Fence | End) -> End | None:
        if self.over or self.closed:
            return None
        if type(record) is Fence:
            if self._until is not None and record.attempt >= self._until:
                self.closed, self._next = True, None
            elif record.attempt > self.attempt:
                self.attempt, self._run, self._next = record.attempt, None, 0
        elif type(record) is End:
            self.end = record
            if record.usage is not None:
                self.usage = record.usage
            self._finish()
            return record
        return None

    def _finish(self) -> None:
        self.over = True
        self._next = None


def gather(records: Iterable[Chunk | Fence | End], before_attempt: int) -> Transcript:
    """What a reader had seen of a request, of these records of it, when an attempt began."""
    transcript = Transcript(until_attempt=before_attempt)
    for record in records:
        if transcript.closed:
            break
        transcript.feed(record)
    return transcript
