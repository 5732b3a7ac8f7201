"""Every record that kvlane writes: import them from here; fields are in `streams/record_types/`.

Inner records travel as msgpack maps, `Chunk`, `Fence` and `End` as JSON, for clients of any
language. The header `t` names the type, in JSON the field `t` as well. `streams/topics.py` has the
topic of each, and its writers; `streams/request.py` the `Request`, `streams/prompt.py` the prompts.

Evolution: fields are only added, optional, at the end; unknown fields are ignored; defaults are
left out. A change that breaks this is a new topic name.

Terms: a *run* is one execution of an *attempt* of a request in a *phase*; (id, attempt, phase) is
its run key, `run` a random number that distinguishes two executions of one run key. An *epoch* is
one life of a worker. `*_ms` points in time are broker append time.
"""

from __future__ import annotations

from kvlane.streams.record_base import MAX_ID_CHARS, Account, EndCode, LogRecord, Phase, RunKey
from kvlane.streams.record_types.candidate_records import Candidate, CandidateRows
from kvlane.streams.record_types.ledger_records import (
    RUN_CODES,
    Assigned,
    Cancel,
    Ended,
    EndedIds,
    Fencing,
    Finished,
    HandOverChoice,
    PrefillDone,
    Refused,
    RequestOffset,
    RunCode,
    SessionUse,
    Started,
)
from kvlane.streams.record_types.registry_records import (
    GUIDED_DECODING_FEATURE,
    LOGPROBS_FEATURE,
    ROUTING_FORMAT,
    AliasTarget,
    Artifact,
    Cordon,
    Deployment,
    EngineConfig,
    ModelAlias,
    ModelCard,
    Role,
    RoutingOrder,
    Skip,
    SnapshotPointer,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.record_types.worker_records import (
    Assignment,
    Blocks,
    CancelRun,
    EngineStats,
    Heartbeat,
    LimitClaims,
    Lost,
    Probe,
    ReportedWaits,
    RouterCapacity,
    RoutingReport,
    RunProgress,
    WorkerState,
)
from kvlane.streams.response_records import (
    Chunk,
    DryRunResult,
    End,
    Fence,
    FinishReason,
    LogProb,
    PassthroughDelta,
    RequestUsage,
    Result,
    ResultError,
    ResultTimings,
    ResultUsage,
    StoredTurn,
    Usage,
)
