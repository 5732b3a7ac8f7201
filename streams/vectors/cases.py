"""The cases behind the JSON files: logs written by hand, with what a reader must show of each.

The expectations stand here as literals; they are never computed from
`streams/responses/transcript.py`, which has to meet them.
"""

from __future__ import annotations

from typing import NamedTuple

from streams.records import Chunk, End, Fence, FinishReason, Usage

REQUEST = "job-17"
Line = Chunk | Fence | End


class Case(NamedTuple):
    """A log of one request in log order, and what a reader has shown when it has read all of it."""

    name: str
    why: str
    log: tuple[Line, ...]
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    end: str | None = None
    attempt: int = 0
    holes: int = 0


def chunk(
    text: str,
    *,
    seq: int,
    index: int,
    run: str = "11",
    attempt: int = 0,
    fin: FinishReason | None = None,
    usage: Usage | None = None,
) -> Chunk:
    """A Chunk whose tokens are the UTF-8 bytes of its text."""
    return Chunk(
        id=REQUEST,
        attempt=attempt,
        run=run,
        seq=seq,
        index=index,
        token_ids=tuple(text.encode()),
        text=text,
        chars=index + len(text),
        finish_reason=fin,
        usage=usage,
    )


def fence(attempt: int, reason: str = "lost") -> Fence:
    """A Fence of the vectors' request."""
    return Fence(id=REQUEST, attempt=attempt, reason=reason)


def end(code: str, message: str = "") -> End:
    """An End of the vectors' request."""
    return End(id=REQUEST, code=code, message=message)


HI = tuple(b"hi")
HELLO = tuple(b"hello")

PLAIN = (
    Case("nothing", "no record yet", ()),
    Case(
        "whole",
        "three Chunks of one run, the last with a finish reason and the usage",
        (
            chunk("he", seq=0, index=0),
            chunk("ll", seq=1, index=2),
            chunk(
                "o",
                seq=2,
                index=4,
                fin="stop",
                usage=Usage(prompt_tokens=7, completion_tokens=5),
            ),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
    ),
    Case(
        "unfinished",
        "a reader shows what is there, without waiting for the end",
        (chunk("he", seq=0, index=0), chunk("ll", seq=1, index=2)),
        text="hell",
        tokens=tuple(b"hell"),
    ),
    Case(
        "last Chunk without tokens",
        "a finish reason may come alone; a missing text is an empty one, missing tokens are none",
        (chunk("hi", seq=0, index=0), chunk("", seq=1, index=2, fin="length")),
        text="hi",
        tokens=HI,
        finish_reason="length",
    ),
    Case(
        "text later than its tokens",
        "a character of several tokens shows as text when it is whole; `index` counts tokens",
        (
            Chunk(id=REQUEST, attempt=0, run="11", seq=0, index=0, token_ids=(240, 159)),
            Chunk(
                id=REQUEST,
                attempt=0,
                run="11",
                seq=1,
                index=2,
                token_ids=(152, 128),
                text="😀",
                chars=1,
            ),
            Chunk(
                id=REQUEST,
                attempt=0,
                run="11",
                seq=2,
                index=4,
                token_ids=(33,),
                text="!",
                chars=2,
                finish_reason="stop",
            ),
        ),
        text="😀!",
        tokens=(240, 159, 152, 128, 33),
        finish_reason="stop",
    ),
    Case(
        "large run number",
        "`run` is a u64 in decimals: compare it as a string, never as a JSON number",
        (
            chunk("h", seq=0, index=0, run="18446744073709551615"),
            chunk("X", seq=0, index=0, run="18446744073709551614"),
            chunk("i", seq=1, index=1, run="18446744073709551615", fin="stop"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
    ),
)

REPEATS = (
    Case(
        "producer retry",
        "a Chunk appended twice shows once",
        (
            chunk("h", seq=0, index=0),
            chunk("h", seq=0, index=0),
            chunk("i", seq=1, index=1, fin="stop"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
    ),
    Case(
        "late retry",
        "a Chunk that comes again after later ones is skipped and is no hole",
        (
            chunk("he", seq=0, index=0),
            chunk("ll", seq=1, index=2),
            chunk("he", seq=0, index=0),
            chunk("o", seq=2, index=4, fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
    ),
    Case(
        "two runs of one attempt",
        "the run of the attempt's first Chunk is shown, the other one is skipped to its end",
        (
            chunk("he", seq=0, index=0, run="11"),
            chunk("hello", seq=0, index=0, run="22", fin="stop"),
            chunk("llo", seq=1, index=2, run="11", fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
    ),
    Case(
        "other run's next Chunk",
        "a Chunk that would fit is skipped when another run wrote it",
        (chunk("he", seq=0, index=0, run="11"), chunk("llo", seq=1, index=2, run="22", fin="stop")),
        text="he",
        tokens=tuple(b"he"),
    ),
)

FENCES = (
    Case(
        "fail-over",
        "after a Fence a new run continues where the shown text ends",
        (
            chunk("he", seq=0, index=0, run="11"),
            fence(1),
            chunk("llo", seq=0, index=2, run="33", attempt=1, fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
        attempt=1,
    ),
    Case(
        "zombie",
        "Chunks of the old attempt behind the Fence are not part of the answer, even its end",
        (
            chunk("he", seq=0, index=0, run="11"),
            fence(1),
            chunk("ll", seq=1, index=2, run="11"),
            chunk("l", seq=0, index=2, run="33", attempt=1),
            chunk("o", seq=2, index=4, run="11", fin="stop"),
            chunk("lo", seq=1, index=3, run="33", attempt=1, fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
        attempt=1,
    ),
    Case(
        "same Fence twice",
        "two routers may fence the same attempt: the second Fence changes nothing",
        (
            fence(1),
            chunk("h", seq=0, index=0, run="33", attempt=1),
            fence(1),
            chunk("i", seq=1, index=1, run="33", attempt=1, fin="stop"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
        attempt=1,
    ),
    Case(
        "lower Fence late",
        "a Fence of an attempt that is over changes nothing",
        (
            fence(2),
            chunk("h", seq=0, index=0, run="44", attempt=2),
            fence(1),
            chunk("i", seq=1, index=1, run="44", attempt=2, fin="stop"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
        attempt=2,
    ),
    Case(
        "attempt without a Fence",
        "a Chunk of a higher attempt than the highest Fence is skipped",
        (
            chunk("X", seq=0, index=0, run="33", attempt=1),
            chunk("hi", seq=0, index=0, run="11", fin="stop"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
    ),
    Case(
        "same run number in two attempts",
        "`seq` starts again with every attempt, whatever the run is called",
        (
            chunk("he", seq=0, index=0),
            chunk("l", seq=1, index=2),
            fence(1),
            chunk("l", seq=0, index=3, attempt=1),
            chunk("o", seq=1, index=4, attempt=1, fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
        attempt=1,
    ),
)

HOLES = (
    Case(
        "lost Chunk",
        "nothing of the run shows behind a lost Chunk, and its finish reason ends nothing",
        (
            chunk("he", seq=0, index=0),
            chunk("l", seq=2, index=3),
            chunk("o", seq=3, index=4, fin="stop"),
        ),
        text="he",
        tokens=tuple(b"he"),
        holes=1,
    ),
    Case(
        "lost first Chunk",
        "the first Chunk decides the run even when it cannot be shown",
        (
            chunk("llo", seq=1, index=2, run="11", fin="stop"),
            chunk("hello", seq=0, index=0, run="22", fin="stop"),
        ),
        holes=1,
    ),
    Case(
        "late Chunk fills no hole",
        "a run with a hole stays silent, even when the lost Chunk comes after all",
        (
            chunk("he", seq=0, index=0),
            chunk("o", seq=2, index=4, fin="stop"),
            chunk("ll", seq=1, index=2),
            chunk("o", seq=2, index=4, fin="stop"),
        ),
        text="he",
        tokens=tuple(b"he"),
        holes=1,
    ),
    Case(
        "index does not fit",
        "`seq` is the next one but `index` is not the number of tokens shown: a hole",
        (chunk("he", seq=0, index=0), chunk("o", seq=1, index=4, fin="stop")),
        text="he",
        tokens=tuple(b"he"),
        holes=1,
    ),
    Case(
        "lost Chunk without tokens",
        "`index` fits but `seq` does not: a hole, since the lost Chunk may have held text",
        (
            Chunk(id=REQUEST, attempt=0, run="11", seq=0, index=0, token_ids=(195,)),
            chunk("!", seq=2, index=1, fin="stop"),
        ),
        tokens=(195,),
        holes=1,
    ),
    Case(
        "hole healed by a fail-over",
        "the next attempt starts anew, from the tokens that were shown",
        (
            chunk("he", seq=0, index=0),
            chunk("o", seq=2, index=4, fin="stop"),
            fence(1, "broken"),
            chunk("llo", seq=0, index=2, run="33", attempt=1, fin="stop"),
        ),
        text="hello",
        tokens=HELLO,
        finish_reason="stop",
        attempt=1,
        holes=1,
    ),
)

ENDS = (
    Case(
        "refused",
        "a router ends a request without any Chunk",
        (end("refused", "the queue is full"),),
        end="refused",
    ),
    Case(
        "deadline",
        "what was shown stays, an End adds no text",
        (chunk("he", seq=0, index=0), end("deadline")),
        text="he",
        tokens=tuple(b"he"),
        end="deadline",
    ),
    Case(
        "End counts in every attempt",
        "an End has no attempt; it ends the request whichever is shown",
        (chunk("he", seq=0, index=0), fence(1), end("attempts")),
        text="he",
        tokens=tuple(b"he"),
        end="attempts",
        attempt=1,
    ),
    Case(
        "after the finish reason",
        "whatever follows the end is ignored: Fences, Chunks, Ends",
        (
            chunk("hi", seq=0, index=0, fin="stop"),
            fence(1),
            chunk("X", seq=0, index=2, run="33", attempt=1, fin="stop"),
            end("cancelled"),
        ),
        text="hi",
        tokens=HI,
        finish_reason="stop",
    ),
    Case(
        "after the End",
        "a Chunk that comes behind the End is ignored, and so is a second End",
        (
            chunk("h", seq=0, index=0),
            end("cancelled"),
            chunk("i", seq=1, index=1, fin="stop"),
            end("deadline"),
        ),
        text="h",
        tokens=tuple(b"h"),
        end="cancelled",
    ),
    Case(
        "whole without its last Chunk",
        "an End says that the answer was whole: the code is the finish reason that got lost",
        (chunk("hi", seq=0, index=0), end("stop")),
        text="hi",
        tokens=HI,
        end="stop",
    ),
    Case(
        "unknown reason",
        "a finish reason of a newer version ends the request like any other",
        (
            Chunk(
                id=REQUEST,
                attempt=0,
                run="11",
                seq=0,
                index=0,
                token_ids=(104,),
                text="h",
                chars=1,
                finish_reason="a_newer_reason",
            ),
        ),
        text="h",
        tokens=(104,),
        finish_reason="a_newer_reason",
    ),
)

WRITTEN = {
    "plain": PLAIN,
    "repeats": REPEATS,
    "fences": FENCES,
    "holes": HOLES,
    "ends": ENDS,
}
