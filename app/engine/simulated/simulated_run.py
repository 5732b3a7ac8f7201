"""One request in the simulated engine: its tokens, the hashes of its blocks, and its end.

The times of tokens and the cache are in `app/engine/simulated/step.py`.
"""

from __future__ import annotations

import asyncio
from array import array
from hashlib import blake2b

from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, token_usage
from kvlane.app.engine.simulated.batch import BatchSequence, StoredBlocks
from kvlane.app.engine.simulated.text_generator import Continuation
from kvlane.indexer.cache_events.engine_events import BlocksStored
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.record_base import JsonText
from kvlane.streams.records import FinishReason
from kvlane.streams.request import Request, StopConditions

STORAGE_MEDIUM = "GPU"


class SimulatedRun:
    """One request. `limit`: maximum tokens of its answer; `sequence`: its sequence in the model.

    Block hashes are a chain of digests over adapter, salt and tokens, opaque to other components.
    """

    def __init__(
        self,
        request: Request,
        context: GenerateContext,
        continuation: Continuation,
        limit: int,
        block_size: int,
        *,
        is_received: bool = False,
    ) -> None:
        """`is_received`: its prompt was computed by another engine."""
        self.context = context
        self.tokens = array("I", unpack_tokens(request.token_ids))
        """Prompt and answer so far."""
        self.prompt_tokens = len(self.tokens)
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.changed = asyncio.Event()
        """Set when there is an output to yield or an error to raise."""
        self._request = request
        self._block_size = block_size
        self._source = continuation(self.tokens[:], request.stop.max_tokens)
        self._ends = _ends(request.stop, request.eos_token_ids)
        self._ready: list[int] = []
        """Generated and not yet yielded; bounded by the limit."""
        self.transfer: JsonText | None = None
        """Of a prefill that ended: the parameters for the decode engine."""
        self.sequence = BatchSequence(
            self,
            self.prompt_tokens,
            1 if context.phase == "prefill" else limit,
            self._prompt_names(),
            priority=request.hints.priority or 0,
            caches_output=True,
            is_received=is_received,
            is_handed_over=context.phase == "prefill",
        )

    @property
    def room(self) -> int | None:
        info = self._request.bootstrap_info
        return None if info is None else info.bootstrap_room

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def make_token(self, *, last: bool) -> None:
        """Generate the next token, which may end the answer; `last`: its limit is reached."""
        token = next(self._source, None)
        if token is None:
            self.finish("stop")
            return
        self.tokens.append(token)
        self._ready.append(token)
        self.changed.set()
        if len(self.tokens) % self._block_size == 0:
            names = self.sequence.block_ids
            names.append(self._name(names, self.tokens[-self._block_size :]))
        if token in self._ends and self.generated_count >= self._request.stop.min_tokens:
            self.finish("stop")
        elif last:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.changed.set()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.changed.set()

    def next_output(self) -> EngineOutput:
        """The tokens since the previous output; with counts in the first and the last one."""
        tokens, self._ready = tuple(self._ready), []
        if self.finish_reason is None and len(tokens) < self.generated_count:
            return EngineOutput(token_ids=tokens)
        counts = token_usage(self.prompt_tokens, self.generated_count, self.sequence.cached_tokens)
        return EngineOutput(
            token_ids=tokens, finish_reason=self.finish_reason, usage=counts, transfer=self.transfer
        )

    def stored_event(self, blocks: StoredBlocks) -> BlocksStored:
        """The event of blocks of this sequence that were added to the cache."""
        start, end, size = blocks.start, blocks.end, self._block_size
        names = self.sequence.block_ids
        return BlocksStored(
            block_hashes=tuple(names[start:end]),
            parent=names[start - 1] if start else None,
            token_ids=self.tokens[start * size : end * size],
            block_size=size,
            medium=STORAGE_MEDIUM,
            lora_name=self._request.hints.lora_name or "",
            cache_salt="" if start else self._request.cache_salt,
        )

    def _prompt_names(self) -> list[int]:
        size = self._block_size
        names: list[int] = []
        for end in range(size, self.prompt_tokens + 1, size):
            names.append(self._name(names, self.tokens[end - size : end]))
        return names

    def _name(self, before: list[int], block: array[int]) -> int:
        """The hash of a block that follows the blocks `before`."""
        if before:
            parent = before[-1].to_bytes(8, "little")
        else:
            request = self._request
            parent = f"{request.hints.lora_name or ''}\0{request.cache_salt}\0".encode()
        digest = blake2b(parent + pack_tokens(block), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _ends(stop: StopConditions, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    hidden = () if stop.ignore_eos else (*eos_token_ids, *stop.stop_token_ids_hidden)
    return frozenset((*stop.stop_token_ids, *hidden))
