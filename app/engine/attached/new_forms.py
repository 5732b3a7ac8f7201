"""Forms of answers that a server has not compiled yet, by tenant.

A server compiles a form (schema, grammar, regular expression) before the first token, in threads
that nothing here can end: a request that is cut off leaves its compile behind. So a new form has a
time limit, and a tenant few at a time: one without an output keeps its place for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgspec

from kvlane.app.engine.interface import (
    COMPILE_TIMEOUT_S,
    MAX_KNOWN_FORMS,
    EngineError,
    EngineOutput,
    GenerateContext,
    not_compiled,
)
from kvlane.app.preprocess.requests.guided_decoding import forwarded_forms
from kvlane.streams.clock import Clock
from kvlane.streams.request import Request

PLACES = 4
"""New forms of a tenant that a server compiles at a time; others wait for their first output."""
UNFINISHED_S = 600.0
"""Time for which a form without an output keeps its place: it may still be compiled."""

FormKey = tuple[str, bytes]
"""Tenant, and digest of a form."""


class NewForms:
    """The new forms of one server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._compiled: OrderedDict[FormKey, None] = OrderedDict()
        self._places: dict[object, tuple[str, float]] = {}
        """Tenants, and until when at most they keep these places; the oldest first."""
        self._changed = asyncio.Event()

    async def first(
        self, outputs: AsyncGenerator[EngineOutput, None], key: FormKey, context: GenerateContext
    ) -> EngineOutput | None:
        """The first output of a new form, once it has a place; None for a known form. Raises
        InvalidRequest if there is none within COMPILE_TIMEOUT_S."""
        if key in self._compiled:
            return None
        place, limit = object(), asyncio.timeout(COMPILE_TIMEOUT_S)
        try:
            async with limit:
                await self._wait_for_place(key, context)
                self._places[place] = (key[0], self._clock.now() + UNFINISHED_S)
                output = await anext(outputs, None)
        except TimeoutError:
            if not limit.expired():
                raise
            raise not_compiled() from None
        except EngineError as e:
            if not (e.is_stall or context.is_stopped):
                self._leave(place)
            raise
        if output is not None and output.finish_reason != "cancelled":
            self._compiled[key] = None
            if len(self._compiled) > MAX_KNOWN_FORMS:
                self._compiled.popitem(last=False)
            self._leave(place)
        return output

    def wake(self) -> None:
        """Let requests that wait for a place look for one, and whether they are cancelled."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _leave(self, place: object) -> None:
        self._places.pop(place, None)
        self.wake()

    async def _wait_for_place(self, key: FormKey, context: GenerateContext) -> None:
        while self._is_full(key[0]) and key not in self._compiled:
            if context.is_stopped:
                raise EngineError("it was cancelled before its form had a place")
            left_s = next(iter(self._places.values()))[1] - self._clock.now()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _is_full(self, tenant: str) -> bool:
        now = self._clock.now()
        while self._places and next(iter(self._places.values()))[1] <= now:
            del self._places[next(iter(self._places))]
        return sum(owner == tenant for owner, _ in self._places.values()) >= PLACES


def form_key(request: Request, body: Mapping[str, Any] | None = None) -> FormKey | None:
    """The key of the form that an answer must have; None without one. `body`: of a request that is
    forwarded."""
    form: object = request.sampling.guided_decoding if body is None else forwarded_forms(body)
    if not form:
        return None
    return request.tenant, blake2b(msgspec.json.encode(form)).digest()
