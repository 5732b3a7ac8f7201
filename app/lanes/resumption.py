"""Whether an answer that broke off can be continued, and whether anything of it is left to say.

Pure, about one request and the tokens that its readers have. The engines' own rule is that of
`app/preprocess/stops.py`; here it is asked of the last token alone, since an engine that had
stopped at an earlier one would not have gone on. Stop strings are not looked for: the Chunk that
brings the last character of one carries the finish reason too.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.records import EndCode, Request
from streams.transcript import Transcript


def end_of_answer(request: Request, taken: Sequence[int]) -> EndCode | None:
    """What the answer ended with, if these tokens are all of it: only its last Chunk was lost."""
    stop = request.stop
    if taken and len(taken) >= stop.min_tokens:
        hidden = () if stop.ignore_eos else (*request.eos_token_ids, *stop.stop_token_ids_hidden)
        if taken[-1] in hidden or taken[-1] in stop.stop_token_ids:
            return "stop"
    if stop.max_tokens is not None and len(taken) >= stop.max_tokens:
        return "length"
    return None


def obstacle(request: Request, shown: Transcript) -> str:
    """Why no engine can go on where this answer broke off; "" when one can."""
    if (shown.chars or shown.asides) and not shown.tokens:
        return "its engine gives no token ids to continue from"
    if shown.tokens and request.sampling.guided_decoding is not None:
        return "an answer of a prescribed form cannot be continued in its middle"
    return ""
