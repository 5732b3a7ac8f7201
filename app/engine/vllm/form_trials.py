"""Trials of the forms that answers must have: each new one is compiled in a process that is killed
when it takes too long, before vLLM compiles it in a thread that nothing can end.

    VllmEngine ─► FormTrials ─► this module as a process ─► a fork of it for each form

No estimate from the text replaces a trial: 2000 optional fields, or a chain of rules that may be
empty, take minutes. A tenant has one trial at a time, in turn with the others. A form that xgrammar
refuses is left to vLLM, which may have another backend.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import select
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from kvlane.app.engine.interface import MAX_KNOWN_FORMS, EngineError, InvalidRequest
from kvlane.streams.request import GuidedDecoding

log = logging.getLogger(__name__)

TRIAL_CPU_S = 5
"""Processor time of a trial. 8192 choices of 30 characters take 2 s with 127 000 tokens, a schema
of 20 fields 0.04 s (xgrammar 0.2.8)."""
TRIAL_MEMORY_GB = 2
"""Beyond that of the process which it is a fork of."""
MAX_TRIALS = 4
"""Trials at a time: a prompt on Kafka names its tenant itself."""
TRIAL_TOKENS = 64
"""Tokens that are taken after the compile: the steps of the engine must not slow down either."""
TRIAL_TIMEOUT_S = 120.0
"""For a trial on a machine without a free processor, and for the start of the process."""
_NICENESS = 5
"""So that the steps of the engine come first."""
_READ_BYTES = 1 << 16


class Form(NamedTuple):
    """A form for xgrammar. `kind`: json, regex, grammar, or structural_tag."""

    kind: str
    text: str


class FormTrials:
    """The trials of one engine. `close` ends their process."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        """`tokenizer`: xgrammar's `TokenizerInfo` of the model, as JSON; called in a thread."""
        self._tokenizer = tokenizer
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._open: dict[int, asyncio.Future[bool]] = {}
        self._known: OrderedDict[tuple[str, bytes], bool] = OrderedDict()
        """By tenant and form: whether it may be compiled."""
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places = asyncio.Semaphore(MAX_TRIALS)

    async def start(self) -> None:
        """Start the process, unless it runs. Raises EngineError."""
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            await self.close()
            tokenizer = await asyncio.to_thread(self._tokenizer)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __spec__.name, str(TRIAL_CPU_S), stdin=PIPE, stdout=PIPE
            )
            self._send(tokenizer)
            self._reading = asyncio.create_task(self._read(self._process))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def check(self, guided: GuidedDecoding, tenant: str) -> None:
        """Raises InvalidRequest for a form that takes too long to compile; EngineError if its trial
        failed."""
        form = form_of(guided)
        key = (tenant, blake2b("\0".join(form).encode(errors="replace")).digest())
        lock = self._tenants.setdefault(tenant, asyncio.Lock())
        if key not in self._known:
            await lock.acquire()
            # A task of its own holds the lock: the trial goes on after its client has left.
            trial = asyncio.create_task(self._try(key, form))
            trial.add_done_callback(partial(_release, lock))
            await asyncio.shield(trial)
        if not self._known.get(key, True):
            raise InvalidRequest(
                f"the form of the answer was not compiled within {TRIAL_CPU_S} s of processor time "
                f"and {TRIAL_MEMORY_GB} GB of memory: use a simpler schema, grammar or regular "
                "expression"
            )

    async def _try(self, key: tuple[str, bytes], form: Form) -> None:
        if key in self._known:
            return
        number = next(self._numbers)
        try:
            async with self._places, asyncio.timeout(TRIAL_TIMEOUT_S):
                await self.start()
                verdict = self._open[number] = asyncio.get_running_loop().create_future()
                self._send(json.dumps([number, *form]))
                self._known[key] = await verdict
        except TimeoutError:
            raise _failure("gives no answer") from None
        finally:
            self._open.pop(number, None)
        if len(self._known) > MAX_KNOWN_FORMS:
            self._known.popitem(last=False)

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            number, is_compiled = json.loads(line)
            if number in self._open:
                self._open.pop(number).set_result(is_compiled)
        await process.wait()
        for verdict in self._open.values():
            verdict.set_exception(_failure("has ended"))
        self._open.clear()


def _release(lock: asyncio.Lock, trial: asyncio.Task[None]) -> None:
    lock.release()
    if not trial.cancelled():
        trial.exception()  # of no interest if its client has left


def _failure(what: str) -> EngineError:
    return EngineError(f"the process that compiles forms for a trial {what}", retryable=True)


def form_of(guided: GuidedDecoding) -> Form:
    """The form as vLLM passes it to xgrammar."""
    if guided.json is not None:
        return Form("json", guided.json.decode())
    if guided.regex is not None:
        return Form("regex", guided.regex)
    if guided.choice is not None:
        return Form("grammar", "root ::= " + " | ".join(map(json.dumps, guided.choice)))
    if guided.grammar is not None:
        return Form("grammar", guided.grammar)
    return Form("structural_tag", (guided.structural_tag or b"").decode())


# --- the process ----------------------------------------------------------------------------------


def main(limit_s: int) -> None:
    """Compile the forms that come on stdin; write by number whether each one was in time. Ends with
    its input."""
    os.nice(_NICENESS)
    compiler, rest = None, b""
    running: dict[int, tuple[int, int]] = {}
    """By descriptor: process, and number of its form."""
    while True:
        for ready in select.select([0, *running], [], [])[0]:
            if ready:
                pid, number = running.pop(ready)
                os.close(ready)
                is_compiled = os.waitpid(pid, 0)[1] == 0
                sys.stdout.write(f"{json.dumps([number, is_compiled])}\n")
                sys.stdout.flush()
                continue
            if not (data := os.read(0, _READ_BYTES)):
                return
            *lines, rest = (rest + data).split(b"\n")
            if lines and compiler is None:
                compiler = _compiler(lines.pop(0).decode())
            for line in lines:
                number, *form = json.loads(line)
                pid = _fork(compiler, Form(*form), limit_s)
                running[os.pidfd_open(pid)] = (pid, number)


def _compiler(tokenizer: str) -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _fork(compiler: Any, form: Form, limit_s: int) -> int:
    """The process that compiles a form. Its status is 0 unless that takes too much."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (TRIAL_MEMORY_GB << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        _generate(_compile(compiler, form))
        status = 0
    except Exception as e:  # noqa: BLE001 - as C++ gives them
        status = int(isinstance(e, MemoryError) or "bad_alloc" in str(e))
    finally:
        os._exit(status)


def _compile(compiler: Any, form: Form) -> Any:
    match form.kind:
        case "json":
            return compiler.compile_json_schema(form.text)
        case "regex":
            return compiler.compile_regex(form.text)
        case "structural_tag":
            return compiler.compile_structural_tag(form.text)
        case _ if "::=" in form.text:
            return compiler.compile_grammar(form.text)
    return compiler.compile_lark(form.text)


def _generate(compiled: Any) -> None:
    """Take some allowed tokens that do not end the answer, as the engine does in its steps. There,
    each token of rules that may all be empty takes twice as long as the one before."""
    import xgrammar

    tokenizer = compiled.tokenizer_info
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    for step in range(TRIAL_TOKENS):
        matcher.fill_next_token_bitmask(bits)
        words = bits[0].tolist()
        for end in tokenizer.stop_token_ids:
            words[end // 32] &= ~(1 << end % 32)
        order = sorted(range(len(words)), key=lambda n: (n - 7 * step) % len(words))
        token = next((32 * n + _lowest_bit(words[n]) for n in order if words[n]), None)
        if token is None or not matcher.accept_token(token) or matcher.is_terminated():
            return


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
