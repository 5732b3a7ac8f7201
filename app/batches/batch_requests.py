"""Lines of a batch's input: their form, their errors, and the prompts that they become.

A file arrives in pieces: one line is in memory at a time, and other tasks run after each piece.
A line has the bounds of a body over HTTP. Only its form is checked here; an invalid body shows when
it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Container, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from kvlane.app.preprocess.json_limits import UNCHECKED_BYTES, json_error, parse_json
from kvlane.app.preprocess.prompt_errors import TooLarge
from kvlane.app.preprocess.thread_pool import Steps, run_cooperatively
from kvlane.streams.ids import SALT_CHARS
from kvlane.streams.prompt import MAX_CUSTOM_ID_CHARS, Prompt
from kvlane.streams.record_types.batch_records import BatchEndpoint, BatchError, BatchJob
from kvlane.streams.topics import MAX_RECORD_BYTES

_BOM = b"\xef\xbb\xbf"
_MOST_BLANKS = 100


class JsonlLine(NamedTuple):
    """A line that is not blank. `number`: from 1, blank ones count; None: longer than allowed."""

    number: int
    content: bytes | None


async def lines_of(
    pieces: AsyncIterable[bytes], most_bytes: int
) -> AsyncGenerator[JsonlLine, None]:
    """The lines of a file, without their ends. Of a line above `most_bytes` only the number."""
    held, number, is_long = bytearray(), 0, False
    blanks = re.compile(rb"(?:[ \t\r\v\f]{0,%d}+\n)++" % min(_MOST_BLANKS, most_bytes))
    async for piece in pieces:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            number += 1
            if (line := _line(number, held, piece[start:end], most_bytes, is_long)) is not None:
                yield line
            held.clear()
            start, is_long = end + 1, False
            if line is None and (skipped := blanks.match(piece, start)) is not None:
                number += piece.count(b"\n", start, skipped.end())
                start = skipped.end()
        if is_long or len(held) + len(piece) - start > most_bytes:
            is_long = True
            held.clear()
        else:
            held += piece[start:]
        await asyncio.sleep(0)
    if (line := _line(number + 1, held, b"", most_bytes, is_long)) is not None:
        yield line


def _line(
    number: int,
    held: bytearray,
    rest: bytes,
    most_bytes: int,
    is_long: bool,  # noqa: FBT001
) -> JsonlLine | None:
    if is_long or len(held) + len(rest) > most_bytes:
        return JsonlLine(number, None)
    whole = bytes(held) + rest
    content = (whole.removeprefix(_BOM) if number == 1 else whole).strip()
    return JsonlLine(number, content) if content else None


MAX_LINE_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""A line becomes one record of `batch`, with its ids and headers."""
KINDS: dict[BatchEndpoint, Literal["chat", "completion", "embedding"]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
}


class JobRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of a batch. `index`: from 1, among the lines that are not blank."""

    index: int
    line: int
    custom_id: str
    body: dict[str, Any]


class InputLine(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    body: dict[str, Any]
    url: str
    method: str | None = None


async def requests_of(
    pieces: AsyncIterable[bytes],
    endpoint: BatchEndpoint,
    is_wanted: Callable[[int], bool] = lambda _: True,
) -> AsyncGenerator[JobRequest | BatchError, None]:
    """The requests of a file, or the errors of their lines, in order. `is_wanted`: by index."""
    index = size = 0
    async for line in lines_of(pieces, MAX_LINE_BYTES):
        index += 1
        size += len(line.content or b"")
        if size >= UNCHECKED_BYTES:
            size = 0
            await asyncio.sleep(0)
        if is_wanted(index):
            yield await run_cooperatively(parse_line(line, index, endpoint))


def parse_line(
    line: JsonlLine, index: int, endpoint: BatchEndpoint
) -> Steps[JobRequest | BatchError]:
    if line.content is None:
        message = f"a line may have {MAX_LINE_BYTES} bytes"
        return BatchError(code="line_too_large", message=message, line=line.number)
    try:
        value, _ = yield from parse_json(line.content)
        parsed = msgspec.convert(value, InputLine)
    except msgspec.ValidationError as e:
        return BatchError(code="invalid_request", message=str(e), line=line.number)
    except TooLarge as e:
        message = f"the line is too large: {e}"
        return BatchError(code="invalid_request", message=message, line=line.number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        message = f"no JSON object in UTF-8: {json_error(line.content, e)}"
        return BatchError(code="invalid_json_line", message=message, line=line.number)
    for is_wrong, code, param, message in (
        ((parsed.method or "POST") != "POST", "invalid_method", "method", "POST is the one method"),
        (parsed.url != endpoint, "mismatched_url", "url", f"the batch is for {endpoint}"),
        *_body_rules(parsed.body),
    ):
        if is_wrong:
            text = f"{param}: {message}"
            return BatchError(code=code, message=text, line=line.number, param=param)
    return JobRequest(index, line.number, parsed.custom_id, parsed.body)


def _body_rules(body: Mapping[str, Any]) -> list[tuple[bool, str, str, str]]:
    """Rules of a body: whether it is violated, and the code, the field and the message of each."""
    model, unsupported = body.get("model"), "unsupported_parameter"
    return [
        (
            not isinstance(model, str) or not model,
            "missing_required_parameter", "body.model", "is needed, the name of a model",
        ),
        (bool(body.get("stream")), unsupported, "body.stream", "a batch streams no answers"),
        (
            body.get("nvext") is not None,
            unsupported, "body.nvext", "a batch takes no routing options",
        ),
    ]  # fmt: skip


def request_id(job_id: str, index: int) -> str:
    """The id of a request of a batch: the same at each attempt to publish it."""
    return f"{_uuid(job_id)}-{index}"


def request_index(job_id: str, name: str) -> int | None:
    index = name.removeprefix(f"{_uuid(job_id)}-")
    is_number = index != name and index.isascii() and index.isdigit() and len(index) < 10
    return int(index) if is_number else None


def output_file_id(job_id: str) -> str:
    return f"file-{_uuid(job_id)}-output"


def error_file_id(job_id: str) -> str:
    return f"file-{_uuid(job_id)}-errors"


class RequestKeys(Container[bytes | None]):
    """The keys of all requests of a batch, as a filter for readers."""

    def __init__(self, job_id: str) -> None:
        self._prefix = f"{_uuid(job_id)}-".encode()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key.startswith(self._prefix)


def prompt_of(job: BatchJob, request: JobRequest, deadline_s: float) -> Prompt:
    """The prompt of a request. Raises pydantic's ValidationError."""
    return Prompt(
        id=request_id(job.id, request.index),
        kind=KINDS[job.endpoint],
        body=_salted(job, request.body),
        tenant=job.tenant,
        key_id=job.key_id,
        deadline_s=deadline_s,
        batch_id=job.id,
        custom_id=request.custom_id,
    )


def _salted(job: BatchJob, body: dict[str, Any]) -> dict[str, Any]:
    """The body with its tenant's cache salt, so that tenants share no cached blocks."""
    if not job.cache_salt:
        return body
    own = body.get("cache_salt")
    if not own or not isinstance(own, str):
        return body | {"cache_salt": job.cache_salt}
    both = f"{job.cache_salt}\0{own}".encode(errors="surrogatepass")
    return body | {"cache_salt": hashlib.sha256(both).hexdigest()[:SALT_CHARS]}


def _uuid(job_id: str) -> str:
    return job_id.removeprefix("batch_")
