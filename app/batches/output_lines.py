"""Lines of a batch's output and error files, in OpenAI's form. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kvlane.app.batches.batch_requests import request_id
from kvlane.streams.records import Result

_OK = 200


class OutputLine(msgspec.Struct, frozen=True):
    """A line of one of the two files: the output file if `is_output`."""

    index: int
    is_output: bool
    content: bytes


def result_line(index: int, result: Result) -> OutputLine:
    """The line of a request that ended."""
    body: Any = result.body
    if body is None or result.status_code != _OK:
        error = result.error and msgspec.to_builtins(result.error)
        body = {"error": error or {"message": result.status, "type": "server_error"}}
    response = {"status_code": result.status_code, "request_id": result.id, "body": body}
    is_output = result.status_code == _OK and result.body is not None
    return _line(index, result.id, result.custom_id, response, None, is_output=is_output)


def failure_line(job_id: str, index: int, custom_id: str, code: str, message: str) -> OutputLine:
    """The line of a request that was not run."""
    error = {"code": code, "message": message}
    return _line(index, request_id(job_id, index), custom_id, None, error, is_output=False)


def _line(
    index: int, name: str, custom_id: str, response: dict[str, Any] | None,
    error: dict[str, str] | None, *, is_output: bool,
) -> OutputLine:  # fmt: skip
    content = {
        "id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error,
    }  # fmt: skip
    return OutputLine(index, is_output, msgspec.json.encode(content) + b"\n")
