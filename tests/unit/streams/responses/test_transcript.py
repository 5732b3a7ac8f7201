"""Tests of the stream reconstruction rule: against a second implementation, and honest writers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.streams.records import Chunk, End, Fence, PassthroughDelta, Usage
from kvlane.streams.responses.transcript import Transcript

Line = Chunk | Fence | End


class Seen(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    end: str | None
    attempt: int
    holes: int


def seen(transcript: Transcript) -> Seen:
    return Seen(
        transcript.text,
        tuple(transcript.tokens),
        transcript.finish_reason,
        transcript.end.code if transcript.end else None,
        transcript.attempt,
        transcript.gaps,
    )


def read(log: Sequence[Line]) -> Transcript:
    transcript = Transcript("r")
    for line in log:
        transcript.apply(line)
    return transcript


def read_until(log: Sequence[Line], attempt: int) -> Transcript:
    """The answer that was visible when an attempt began, as failover reads it."""
    transcript = Transcript(until_attempt=attempt)
    for line in log:
        if transcript.is_closed:
            break
        transcript.apply(line)
    return transcript


# --- the rule once more, over the whole list, without a running state ----------------------------


def reference(log: Sequence[Line]) -> Seen:
    """Cut the log into attempts, keep the unbroken beginning of each one's run, cut at the end."""
    shown: list[tuple[int, Chunk]] = []
    broken: list[int] = []
    starts = [0] + [i for i, line in enumerate(log) if raises(log, i)]
    for start, stop in zip(starts, [*starts[1:], len(log)], strict=True):
        attempt = highest(log[: start + 1])
        run = [
            (i, line)
            for i, line in enumerate(log[:stop])
            if i >= start and isinstance(line, Chunk) and line.attempt == attempt
        ]
        run = [(i, line) for i, line in run if line.run == run[0][1].run]
        whole, hole = unbroken(run, sum(len(c.token_ids) for _, c in shown))
        shown += whole
        broken += hole
    ends = [i for i, line in enumerate(log) if isinstance(line, End)]
    ends += [i for i, line in shown if line.finish_reason is not None]
    last = min(ends, default=len(log))
    pieces = [c for i, c in shown if i <= last]
    over = log[last] if last < len(log) else None
    return Seen(
        "".join(c.text for c in pieces),
        tuple(t for c in pieces for t in c.token_ids),
        over.finish_reason if isinstance(over, Chunk) else None,
        over.code if isinstance(over, End) else None,
        highest(log[:last]),
        sum(i < last for i in broken),
    )


def highest(log: Sequence[Line]) -> int:
    return max([0, *(line.attempt for line in log if isinstance(line, Fence))])


def raises(log: Sequence[Line], at: int) -> bool:
    return highest(log[: at + 1]) > highest(log[:at])


def unbroken(run: list[tuple[int, Chunk]], index: int) -> tuple[list[tuple[int, Chunk]], list[int]]:
    """The places and Chunks that show, and the place of the hole, if there is one."""
    whole: list[tuple[int, Chunk]] = []
    for place, chunk in run:
        if chunk.seq < len(whole):
            continue
        if chunk.seq != len(whole) or chunk.index != index:
            return whole, [place]
        whole.append((place, chunk))
        index += len(chunk.token_ids)
    return whole, []


# --- any log at all -------------------------------------------------------------------------------

small = st.integers(0, 3)
any_chunk = st.builds(
    Chunk,
    id=st.just("r"),
    attempt=st.sampled_from([0, 0, 0, 1, 1, 2]),
    run=st.sampled_from(["1", "1", "1", "2"]),
    seq=st.integers(-1, 4),
    index=st.integers(0, 5),
    token_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    text=st.text("abé", max_size=2),
    finish_reason=st.sampled_from([None, None, None, "stop"]),
)
any_fence = st.builds(Fence, id=st.just("r"), attempt=small)
any_end = st.builds(End, id=st.just("r"), code=st.sampled_from(["deadline", "cancelled"]))
any_log = st.lists(st.one_of(any_chunk, any_chunk, any_chunk, any_fence, any_end), max_size=14)


@st.composite
def nearly_whole_logs(draw: st.DrawFn) -> list[Line]:
    """Chunks that mostly fit, so that long prefixes show; every third line is any line."""
    log: list[Line] = []
    attempt = seq = index = 0
    for _ in range(draw(st.integers(0, 16))):
        kind = draw(st.integers(0, 8))
        if kind == 0:
            attempt, seq = attempt + 1, 0
            log.append(Fence(id="r", attempt=attempt))
        elif kind <= 2:
            log.append(draw(st.one_of(any_chunk, any_fence, any_end)))
        elif kind == 3 and log:
            log.append(draw(st.sampled_from(log)))
        else:
            log.append(
                Chunk(id="r", attempt=attempt, run="1", seq=seq, index=index, token_ids=(7,))
            )
            seq, index = seq + 1, index + 1
    return log


@given(st.one_of(any_log, nearly_whole_logs()))
@settings(max_examples=1500, deadline=None)
def test_transcript_and_the_reference_agree_on_any_log(log: list[Line]) -> None:
    assert seen(read(log)) == reference(log)


@given(st.one_of(any_log, nearly_whole_logs()))
@settings(max_examples=300, deadline=None)
def test_shown_text_is_never_withdrawn(log: list[Line]) -> None:
    transcript = Transcript()
    for line in log:
        tokens, text, over = list(transcript.tokens), transcript.text, transcript.is_over
        visible = transcript.apply(line)
        assert transcript.tokens[: len(tokens)] == tokens
        assert transcript.text.startswith(text)
        assert transcript.is_over >= over
        assert (visible is None) or (visible is line)


@given(st.one_of(any_log, nearly_whole_logs()))
@settings(max_examples=300, deadline=None)
def test_no_text_is_shown_after_the_end(log: list[Line]) -> None:
    transcript = Transcript()
    for line in log:
        if transcript.is_over:
            before = seen(transcript)
            assert transcript.apply(line) is None
            assert seen(transcript) == before
        else:
            transcript.apply(line)


@given(st.one_of(any_log, nearly_whole_logs()))
@settings(max_examples=300, deadline=None)
def test_pieces_equal_the_answer(log: list[Line]) -> None:
    transcript = Transcript(keep=False)
    pieces = [piece for line in log if isinstance(piece := transcript.apply(line), Chunk)]
    kept = read(log)
    assert "".join(p.text for p in pieces) == kept.text
    assert [t for p in pieces for t in p.token_ids] == kept.tokens
    assert (transcript.shown_tokens, transcript.chars) == (len(kept.tokens), len(kept.text))
    assert transcript.tokens == []
    assert [p.index for p in pieces] == [
        sum(len(p.token_ids) for p in pieces[:i]) for i in range(len(pieces))
    ]


@given(nearly_whole_logs(), st.lists(any_chunk, max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_start_before_the_first_record_does_not_change_the_text(
    log: list[Line], before: list[Line], data: st.DataObject
) -> None:
    strangers = [Chunk(id="other", attempt=0, run="9", seq=i, index=i) for i in range(len(before))]
    lane: list[Line] = [*strangers, *log]
    starts = data.draw(st.lists(st.integers(0, len(before)), min_size=2, max_size=2))
    first, second = (read([r for r in lane[start:] if r.id == "r"]) for start in starts)
    assert seen(first) == seen(second)


@given(st.one_of(any_log, nearly_whole_logs()), st.integers(1, 4))
@settings(max_examples=500, deadline=None)
def test_gathered_text_is_that_before_the_first_fence_of_the_attempt(
    log: list[Line], attempt: int
) -> None:
    fences = [i for i, r in enumerate(log) if isinstance(r, Fence) and r.attempt >= attempt]
    stop = fences[0] if fences else len(log)
    gathered = read_until(log, attempt)
    assert seen(gathered) == seen(read(log[:stop])) == reference(log[:stop])
    assert gathered.attempt < attempt
    assert read(log).tokens[: gathered.shown_tokens] == gathered.tokens


# --- honest writers: every run computes the same answer from the text before its fence ------------

ANSWER = tuple(range(100, 112))


class Writers:
    """Runs of one request on one lane, with whatever may happen to them; losses on request."""

    def __init__(self, draw: st.DrawFn, *, losses: bool) -> None:
        self.log: list[Line] = []
        self._draw = draw
        self._losses = losses
        self._attempt = 0
        self._runs = 0
        self._unsent: list[list[Chunk]] = []
        self._start(0)

    def step(self) -> None:
        kind = self._draw(st.integers(0, 9))
        if kind == 0 and self._attempt < 4:
            self._attempt += 1
            self.log += [Fence(id="r", attempt=self._attempt)] * self._draw(st.integers(1, 2))
            self._start(self._attempt)
        elif kind == 1:
            self._start(self._draw(st.integers(0, self._attempt)))  # a twin, even of an old attempt
        elif kind == 2 and self._losses and self._unsent:
            self._draw(st.sampled_from(self._unsent)).pop(0)
        elif self._unsent:
            chunk = self._draw(st.sampled_from(self._unsent)).pop(0)
            self.log += [chunk] * self._draw(st.sampled_from([1, 1, 1, 2]))
        self._unsent = [run for run in self._unsent if run]

    def _start(self, attempt: int) -> None:
        base = read_until(self.log, attempt) if attempt else Transcript()
        if base.is_over:
            return
        self._runs += 1
        run: list[Chunk] = []
        at = base.shown_tokens
        while at < len(ANSWER):
            part = ANSWER[at : at + self._draw(st.integers(1, 4))]
            last = at + len(part) == len(ANSWER)
            run.append(
                Chunk(
                    id="r",
                    attempt=attempt,
                    run=str(self._runs),
                    seq=len(run),
                    index=at,
                    token_ids=part,
                    text="".join(map(chr, part)),
                    finish_reason="length" if last else None,
                )
            )
            at += len(part)
        self._unsent.append(run)


@st.composite
def honest_logs(draw: st.DrawFn, *, losses: bool) -> list[Line]:
    writers = Writers(draw, losses=losses)
    for _ in range(draw(st.integers(1, 40))):
        writers.step()
    return writers.log


@given(honest_logs(losses=True))
@settings(max_examples=300, deadline=None)
def test_only_the_answer_is_shown_for_any_writer_faults(log: list[Line]) -> None:
    transcript = read(log)
    assert tuple(transcript.tokens) == ANSWER[: transcript.shown_tokens]
    assert transcript.text == "".join(map(chr, transcript.tokens))
    assert (transcript.finish_reason is not None) == (tuple(transcript.tokens) == ANSWER)


@given(honest_logs(losses=False))
@settings(max_examples=300, deadline=None)
def test_no_lost_chunk_means_no_hole(log: list[Line]) -> None:
    assert read(log).gaps == 0


@given(honest_logs(losses=True), st.data())
@settings(max_examples=200, deadline=None)
def test_two_readers_agree_wherever_the_slower_one_is(log: list[Line], data: st.DataObject) -> None:
    behind = read(log[: data.draw(st.integers(0, len(log)))])
    ahead = read(log)
    assert ahead.tokens[: behind.shown_tokens] == behind.tokens
    assert ahead.text.startswith(behind.text)


# --- single facts ---------------------------------------------------------------------------------


def test_usage_is_that_of_the_last_record_that_has_one() -> None:
    first, last = Usage(prompt_tokens=3), Usage(prompt_tokens=3, completion_tokens=2)
    log = (
        Chunk(id="r", attempt=0, run="1", seq=0, index=0, token_ids=(1,), usage=first),
        Chunk(id="r", attempt=0, run="1", seq=1, index=1, token_ids=(2,)),
        End(id="r", code="deadline", usage=last),
    )
    assert read(log[:2]).usage == first
    assert read(log).usage == last


def test_every_skipped_chunk_is_counted() -> None:
    def chunk(seq: int, run: str = "1", attempt: int = 0, fin: str | None = None) -> Chunk:
        return Chunk(id="r", attempt=attempt, run=run, seq=seq, index=seq, finish_reason=fin)

    log = [
        Chunk(id="r", attempt=0, run="1", seq=0, index=0),
        Chunk(id="r", attempt=0, run="1", seq=0, index=0),  # retry
        chunk(0, run="2"),
        chunk(0, attempt=1),
        Chunk(id="r", attempt=0, run="1", seq=5, index=0),  # hole
        Chunk(id="r", attempt=0, run="1", seq=6, index=0),
    ]
    transcript = read(log)
    assert (transcript.skipped_chunks, transcript.gaps) == (5, 1)


def test_characters_of_data_do_not_depend_on_its_division() -> None:
    def item(text: str, **more: Any) -> PassthroughDelta:
        call = {"index": 0, "function": {"arguments": text, **more}}
        return PassthroughDelta(delta={"tool_calls": [call], "reasoning": text * 2})

    shown = []
    for division in (("a", "bc", "", "d"), ("abcd",), ("ab", "cd")):
        transcript = Transcript("r")
        data = (item(division[0], name="f"), *map(item, division[1:]))
        transcript.apply(Chunk(id="r", attempt=0, run="1", seq=0, index=0, data=data))
        shown.append((transcript.data_chars, transcript.passthrough_count))
    assert shown == [(13, 4), (13, 1), (13, 2)]
