"""Hooks of schemathesis: cases name the model that is served, and mostly a response that exists."""

from __future__ import annotations

import os
import zlib
from typing import Any

import schemathesis

KNOWN_ID = "KVLANE_TEST_KNOWN_ID"
"""Environment variable with the id of a stored response."""
MODEL = "scripted"
PLACES = (
    "backend_instance_id", "prefill_worker_id", "decode_worker_id", "allowed_worker_ids", "dp_rank",
    "prefill_dp_rank", "routing_constraints",
)  # fmt: skip
"""Options without which no case names a worker that does not exist: the answer is a 503 then."""


@schemathesis.hook
def before_call(_: Any, case: Any, __: Any) -> None:
    """Put existing names into a case, where it has any name of that type."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        if isinstance(options := case.body.get("nvext"), dict):
            for name in PLACES:
                options.pop(name, None)
    given = case.path_parameters.get("request_id") if case.path_parameters else None
    if given is not None and zlib.crc32(repr(given).encode()) % 50:
        case.path_parameters["request_id"] = os.environ[KNOWN_ID]
