"""CPU time of a token's text with parsers of calls and reasoning, and without, in one run.

    python -m tests.parser_times

Beside it the time to read again what readers have, as a worker does that continues an answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.request import AnswerParsing, Request

PARTS = {
    "content": ("", "Here is what I found there. "),
    "reasoning": ("<think>", "I think about the weather in a few towns. "),
    "call": ('<tool_call>\n{"name": "f", "arguments": {"a": "', "x y z "),
}
TOKENS, ROUNDS = 4000, 15
PARSING = AnswerParsing(tools="hermes", reasoning="qwen3")


def cpu_us(stream: TextStream | ParsedStream, tokens: list[int], step: int) -> float:
    """CPU time of a token, fed `step` at a time."""
    steps = [tokens[at : at + step] for at in range(0, len(tokens), step)]
    began = time.process_time()
    for each in steps:
        stream.feed(each)
    return 1e6 * (time.process_time() - began) / len(tokens)


def main() -> None:
    model, request = ByteModel(), Request(id="a")

    def parsed(taken: list[int]) -> ParsedStream:
        return ParsedStream(model.text_stream(request), PARSING, "a", taken)

    for name, (prefix, text) in PARTS.items():
        tokens, taken = [*(text * TOKENS)[:TOKENS].encode()], [*prefix.encode()]
        for step in (1, 8):
            rounds = [
                (
                    cpu_us(model.text_stream(request), tokens, step),
                    cpu_us(parsed(taken), tokens, step),
                )
                for _ in range(ROUNDS)
            ]
            plain, with_parser = (median(column) for column in zip(*rounds, strict=True))
            sys.stdout.write(f"{name}, {step} a step: {plain:.2f}, parsed {with_parser:.2f} us\n")
        replay = median(_ms(lambda: parsed([*taken, *tokens[:1000]])) for _ in range(ROUNDS))  # noqa: B023
        sys.stdout.write(f"{name}: 1000 tokens read again in {replay:.1f} ms\n")


def _ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


if __name__ == "__main__":
    main()
