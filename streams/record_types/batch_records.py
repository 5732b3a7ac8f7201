"""Records of the Files and Batch API on the compacted topic `batch-jobs`, keyed by file or job.

Of two records of a job the one with the higher `fence` counts, then the one with more `writes`.
Compaction keeps the last, so the owner repeats the one that counts (`app/batches/batch_log.py`).
The content of files is on `file-parts` (`streams/codecs.py`). A removed key is never used again.
"""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Literal

import msgspec

from kvlane.streams.record_base import InternalRecord
from kvlane.streams.topics import FILE_RETENTION_MS

FilePurpose = Literal["batch", "batch_output"]
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"
]
"""State of a job. `cancelling` is none: it is a job with a cancel that has not ended."""
BatchEnding = Literal["cancelled", "expired"]
"""End of a job before all its requests are run."""
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileCard(InternalRecord, frozen=True):
    """A complete file. Key `file/<id>`. Its parts are on one partition of `file-parts`, from offset
    `first` to before `end`; `created_s` is before the first of them. A tombstone deletes it."""

    id: str
    purpose: FilePurpose
    partition: int
    first: int
    end: int
    size: int
    sha256: str
    created_s: int
    filename: str = ""
    tenant: str = ""

    @property
    def expires_s(self) -> int:
        """Time from which its first parts may be deleted, in seconds since 1970."""
        return self.created_s + FILE_RETENTION_MS // 1000


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """An error of a batch's input, of a line (from 1) if it is about one. Part of a BatchJob."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchJob(InternalRecord, frozen=True):
    """A batch job. Key `batch/<id>`. Times in seconds since 1970; 0: not reached.

    `fence`: offset, in the job's partition of `file-parts`, by which its owner began to write; -1
    before. `outputs_from`: of the first such record. `results_from`: offset by partition of
    `results` before the first prompt. `lines`: of the input; `published`: all lines up to it are
    prompts or have an output. `ending`: its status at the end, set once prompts are withdrawn.
    `cache_salt`: of its tenant. `window_s`: completion window. `writes`: number of the record.
    `attempts`: runs since the last progress. `most_open`: the job exists if fewer of its tenant are
    open before it in its partition; 0: no limit. `key_id`: of the API key that created it.
    """

    id: str
    endpoint: BatchEndpoint
    input_file_id: str
    created_s: int
    window_s: int
    completion_window: str = "24h"
    tenant: str = ""
    cache_salt: str = ""
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    ending: BatchEnding | None = None
    fence: int = -1
    outputs_from: int = -1
    results_from: dict[int, int] = {}
    lines: int = 0
    published: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    output_file_id: str = ""
    error_file_id: str = ""
    in_progress_s: int = 0
    finalizing_s: int = 0
    ended_s: int = 0
    writes: int = 0
    attempts: int = 0
    most_open: int = 0
    key_id: str = ""

    @property
    def expires_s(self) -> int:
        """End of the completion window, in seconds since 1970."""
        return self.created_s + self.window_s

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchCancel(InternalRecord, frozen=True):
    """The client cancels a batch job. Key `cancel/<id>`; `at_s` in seconds since 1970."""

    id: str
    at_s: int


class ResponseDeletion(InternalRecord, frozen=True):
    """A stored response counts as deleted. Key `response/<id>`."""

    id: str
    tenant: str = ""
