"""Engine interface, and a worker process around an engine of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlane.app.engine.interface import (
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    token_usage,
)
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Request

if TYPE_CHECKING:
    from faststream import FastStream

    from kvlane.app.runtime.process import ProcessContext
    from kvlane.app.settings import Settings
    from kvlane.app.worker import Worker
    from kvlane.streams.ports import Log

__all__ = [
    "Engine", "EngineConfig", "EngineError", "EngineOutput", "GenerateContext", "InvalidRequest",
    "Request", "prompt_tokens", "token_usage", "worker_app",
]  # fmt: skip


def prompt_tokens(request: Request) -> tuple[int, ...]:
    """Token ids of a request: its prompt, and the output of earlier attempts.

    Args:
        request: the argument of `Engine.generate`.

    Returns:
        Ids from 0 to 2^32 - 1; empty for a request with a body (`EngineConfig.kind`).
    """
    return tuple(unpack_tokens(request.token_ids))


def worker_app(engine: Callable[[], Engine]) -> FastStream:
    """A worker process that serves an engine of your own.

    Args:
        engine: makes the engine; called once, when the process starts.

    Returns:
        An application for `faststream run module:app`. It reads `KVLANE_*` settings and ends with
        exit code 1, and a message on standard error, when they cannot work. With
        `KVLANE_MODEL_PATH` the tokenizer and chat template of that directory are published for the
        model; without it tokens are the bytes of the text (`app/text/byte_level.py`).

    Example:
        # my_engine.py; run with: faststream run my_engine:app
        app = worker_app(MyEngine)
    """
    from kvlane.app.runtime.process import faststream_app

    return faststream_app(
        "worker", lambda log, settings, ctx: _worker(engine(), log, settings, ctx)
    )


def _worker(engine: Engine, log: Log, settings: Settings, ctx: ProcessContext) -> Worker:
    from kvlane.app.preprocess.models.model_folder import read_folder
    from kvlane.app.serving.worker_model import ModelPublisher
    from kvlane.app.worker import Worker

    files = None if settings.model_path is None else read_folder(settings.model_path)
    offer = None if files is None else ModelPublisher(log, settings, ctx, files)
    return Worker(log, settings, ctx, engine, offer=offer)
