"""One request in the simulated engine: its tokens, the names of its blocks, and how it ends.

Owns what an answer is made of. When a token is made, and where blocks are, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from array import array
from hashlib import blake2b

from app.engine.batch import Sequence, StoredRun
from app.engine.continuation import Continuation
from app.engine.contract import EngineError, EngineOutput, GenerateContext, usage
from indexer.engine_events import BlocksStored
from streams.codecs import pack_tokens, unpack_tokens
from streams.records import FinishReason, Request, StopConditions

MEDIUM = "GPU"


class SimulatedRun:
    """See the module. `limit`: the most tokens of an answer; `sequence` stands for it in the model.

    Blocks are named by a chain of digests over adapter, salt and tokens: opaque to all others.
    """

    def __init__(
        self,
        request: Request,
        context: GenerateContext,
        continuation: Continuation,
        limit: int,
        block_size: int,
    ) -> None:
        self.context = context
        self.tokens = array("I", unpack_tokens(request.token_ids))
        """Prompt and answer so far."""
        self.prompt_tokens = len(self.tokens)
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.changed = asyncio.Event()
        """Set when there is something to yield or to raise."""
        self._request = request
        self._block_size = block_size
        self._source = continuation(self.tokens[:], request.stop.max_tokens)
        self._ends = _ends(request.stop, request.eos_token_ids)
        self._ready: list[int] = []
        """Made and not yet yielded; never more than the limit."""
        self.sequence = Sequence(
            self,
            self.prompt_tokens,
            limit,
            self._prompt_names(),
            priority=request.hints.priority or 0,
            shares_output=True,
        )

    @property
    def made(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    def make_token(self, *, last: bool) -> None:
        """The next token of the answer, which may end it; `last`: by its limit."""
        token = next(self._source, None)
        if token is None:
            self.finish("stop")
            return
        self.tokens.append(token)
        self._ready.append(token)
        self.changed.set()
        if len(self.tokens) % self._block_size == 0:
            names = self.sequence.identities
            names.append(self._name(names, self.tokens[-self._block_size :]))
        if token in self._ends and self.made >= self._request.stop.min_tokens:
            self.finish("stop")
        elif last:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """The answer is over."""
        self.finish_reason = reason
        self.changed.set()

    def fail(self, error: EngineError) -> None:
        """There will be no end of the answer."""
        self.error = error
        self.changed.set()

    def output(self) -> EngineOutput:
        """What has become ready since the last time; with counts at first and when it is over."""
        tokens, self._ready = tuple(self._ready), []
        if self.finish_reason is None and len(tokens) < self.made:
            return EngineOutput(token_ids=tokens)
        counts = usage(self.prompt_tokens, self.made, self.sequence.cached_tokens)
        return EngineOutput(token_ids=tokens, finish_reason=self.finish_reason, usage=counts)

    def stored(self, blocks: StoredRun) -> BlocksStored:
        """The event of blocks of this sequence that the cache has from now on."""
        start, end, size = blocks.start, blocks.end, self._block_size
        names = self.sequence.identities
        return BlocksStored(
            block_hashes=tuple(names[start:end]),
            parent=names[start - 1] if start else None,
            token_ids=self.tokens[start * size : end * size],
            block_size=size,
            medium=MEDIUM,
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
        """The name of the block that follows those before it."""
        if before:
            parent = before[-1].to_bytes(8, "little")
        else:
            request = self._request
            parent = f"{request.hints.lora_name or ''}\0{request.cache_salt}\0".encode()
        digest = blake2b(parent + pack_tokens(block), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _ends(stop: StopConditions, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Tokens that end an answer."""
    hidden = () if stop.ignore_eos else (*eos_token_ids, *stop.stop_token_ids_hidden)
    return frozenset((*stop.stop_token_ids, *hidden))
