"""Rules of gateways, preprocessors and readers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from kvlane.app.access import api_key_store, quota
from kvlane.app.batches import batch_log
from kvlane.app.http.batches import files_endpoint
from kvlane.app.http.openai import stream_resume
from kvlane.app.http.server import authentication, caller
from kvlane.app.lanes import admission, owner
from kvlane.app.prompts import prompt_credit, prompt_source
from kvlane.app.routing.selection import eligibility
from kvlane.app.routing.selection.decision import Rejection
from kvlane.streams import ids
from kvlane.streams.errors import RecordError
from kvlane.streams.ports import Partition
from kvlane.streams.records import Chunk
from kvlane.streams.responses import reply_reader, transcript
from kvlane.streams.views import tail_reader
from tests.simulation.replacements import Replacement

# --- the edge ------------------------------------------------------------------------------------


def commit_prompts_early() -> Iterator[Replacement]:
    original = prompt_source.PromptSource.publish_requests

    async def handle(self: Any, records: Any) -> None:
        self._ctx.spawn("handling", original(self, list(records)))

    yield prompt_source.PromptSource, "publish_requests", handle


def commit_whole_polls() -> Iterator[Replacement]:
    """A prompt is done with all others that were read together."""

    def acknowledge(self: Any) -> None:
        self.appends -= 1

    yield prompt_source._OpenPrompt, "acknowledge", acknowledge


def prompts_are_refused() -> Iterator[Replacement]:
    def excess(self: Any, _: Any, wanted: Any, __: Any) -> Any:
        crowded = self._context.queue.waiting.is_full(wanted.queue_key)
        return Rejection("queue_full", "as over HTTP") if crowded else None

    yield admission.Admission, "_excess", excess


def prompts_paused_for_ever() -> Iterator[Replacement]:
    def resume(self: Any) -> None:
        self._is_paused = False

    yield prompt_source.PromptSource, "_resume", resume


def acknowledged_requests_return_credit() -> Iterator[Replacement]:
    original = prompt_source.PromptSource._acknowledged

    def acknowledged(self: Any, *args: Any) -> None:
        original(self, *args)
        for lane in self._credit._lanes.values():
            lane.read_to(sys.maxsize)

    yield prompt_source.PromptSource, "_acknowledged", acknowledged


def late_reports_return_credit() -> Iterator[Replacement]:
    original = prompt_credit._UnreadLane.read_to

    def read_to(self: Any, _: int) -> None:
        original(self, sys.maxsize)

    yield prompt_credit._UnreadLane, "read_to", read_to


def room_is_not_shared() -> Iterator[Replacement]:
    def shares(self: Any) -> None:
        self._credit.prompts_share = 1.0
        self._credit.credit_changed.notify_all()

    yield prompt_source.PromptSource, "_shares", shares


def answers_from_their_beginning() -> Iterator[Replacement]:
    yield stream_resume, "_positions", lambda _, count: [0] * count


def answers_from_now_on() -> Iterator[Replacement]:
    async def attach(self: Any, request_id: str, **_: Any) -> Any:
        return await self.subscribe(request_id)

    yield reply_reader.ReplyReader, "attach", attach


def any_model() -> Iterator[Replacement]:
    make = eligibility.CandidatePools._make

    def pool(self: Any, _: str, *more: Any) -> Any:
        return make(self, "", *more)

    yield eligibility.CandidatePools, "_make", pool


def any_lane() -> Iterator[Replacement]:
    received = owner.LaneOwner.on_request_record

    def capture_shifted(self: Any, log_record: Any) -> None:
        try:
            received(self, log_record)
        except RecordError:
            self.claim.mark_done(log_record.offset)

    yield owner.LaneOwner, "on_request_record", capture_shifted


def no_objections() -> Iterator[Replacement]:
    yield owner, "_objection", lambda _: ""


# --- keys and tenants ----------------------------------------------------------------------------


def revoked_keys_are_kept() -> Iterator[Replacement]:
    yield api_key_store.ApiKeyStore, "_take", lambda *_: None


def streams_are_read_by_any_tenant() -> Iterator[Replacement]:
    yield ids.TenantTag, "matches", lambda *_: True


def tenants_share_sessions_and_caches() -> Iterator[Replacement]:
    def with_tenant(self: Any, request: Any, _: Any) -> Any:
        return msgspec.structs.replace(request, tenant=self.tenant)

    yield caller.Caller, "with_tenant", with_tenant


def ended_requests_count_on() -> Iterator[Replacement]:
    yield quota.QuotaLease, "release", lambda *_: None


def limits_hold_for_each_gateway() -> Iterator[Replacement]:
    yield authentication.AccessControl, "share_limits", lambda *_: None


def files_count_at_each_gateway() -> Iterator[Replacement]:
    async def check_kept(*_: Any) -> None:
        pass

    yield files_endpoint.FilesEndpoint, "_check_kept", check_kept


def batches_count_at_each_gateway() -> Iterator[Replacement]:
    original = batch_log.BatchView._is_later

    def is_later(self: Any, source: Any, job: Any) -> bool:
        return original(self, source, msgspec.structs.replace(job, most_open=0))

    yield batch_log.BatchView, "_is_later", is_later


# --- readers -------------------------------------------------------------------------------------


def joining_views_skip_records() -> Iterator[Replacement]:
    def positions(self: Any) -> dict[Partition, int]:
        highest: dict[Partition, int] = {}
        for subscription in self._subscriptions:
            for source, position in subscription.positions.items():
                highest[source] = max(position, highest.get(source, position))
        return highest

    yield tail_reader.TailReader, "_positions", positions


def lower_attempts_are_accepted() -> Iterator[Replacement]:
    original = transcript.Transcript.apply

    def feed(self: Any, record: Any) -> Any:
        if isinstance(record, Chunk) and record.attempt < self.attempt:
            record = msgspec.structs.replace(record, attempt=self.attempt)
        return original(self, record)

    yield transcript.Transcript, "apply", feed
