"""Which engine a worker has, by the settings, and the files of its model.

The simulated engine serves the model of a folder and says readable sentences in its tokens; the
echo engine has no model: its tokens are bytes, and it says what it was told. vLLM is the real one;
of an attached server the folder has the tokenizer, unless it is asked in OpenAI's own words.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.batch import Shape
from app.engine.continuation import Speaker, corpus
from app.engine.contract import Engine
from app.engine.echo import EchoEngine
from app.engine.simulated import SimulatedEngine
from app.engine.validator import ValidatedEngine
from app.preprocess.modelfolder import DEMO, ModelFiles, read_folder
from app.preprocess.pool import Inline
from app.preprocess.tokenizer import Tokenizer
from app.settings import Settings
from streams.clock import Clock


class Chosen(NamedTuple):
    """An engine that is not started, and the files of its model if it has one."""

    engine: Engine
    files: ModelFiles | None


def chosen(settings: Settings, clock: Clock) -> Chosen:
    """The engine of the settings. Raises BadModel when its model's folder cannot be used."""
    choose = {"echo": _echo, "simulated": _simulated, "vllm": _vllm, "attached": _attached}[
        settings.engine
    ]
    choice = choose(settings, clock)
    return choice._replace(engine=ValidatedEngine(choice.engine)) if settings.debug else choice


def speaker_of(files: ModelFiles) -> Speaker:
    """What simulated engines say in the tokens of a model. Raises BadModel."""
    tokenizer = Tokenizer(files.tokenizer, Inline())
    end = files.eos_token_ids[0] if files.eos_token_ids else None
    return Speaker(corpus(), tokenizer.encode_now, end)


def _echo(settings: Settings, clock: Clock) -> Chosen:
    engine = EchoEngine(
        clock,
        settings.echo_itl_ms / 1000,
        model=settings.model,
        context_length=settings.context_length,
        max_num_seqs=settings.max_num_seqs,
    )
    return Chosen(engine, None)


def _vllm(settings: Settings, clock: Clock) -> Chosen:
    """A folder is served as it is, a name is fetched from where vLLM would get it, too."""
    from app.engine.vllm.engine import Limits, VllmEngine
    from app.engine.vllm.source import folder_of

    folder = settings.model_path or folder_of(settings.model)
    given = settings.model_fields_set
    limits = {"context_length", "max_num_seqs", "block_size"} & given
    engine = VllmEngine(
        clock,
        str(settings.model_path or settings.model),
        model=settings.model,
        limits=Limits(**{name: getattr(settings, name) for name in limits}),
        adapters=settings.adapters,
        arguments=settings.engine_args,
    )
    return Chosen(engine, read_folder(folder))


def _attached(settings: Settings, clock: Clock) -> Chosen:
    """The folder holds the files of the model that the server serves; its weights are not read."""
    from app.engine.attached.beside import Attachment
    from app.engine.attached.engine import AttachedEngine, Guess
    from app.engine.attached.passing import PassingEngine

    where = Attachment(
        settings.attach_url,
        settings.attach_events,
        settings.attach_replay,
        settings.attach_model,
        settings.attach_api_key.get_secret_value(),
        settings.attach_silence_s,
        settings.attach_start_s,
        settings.attach_answer_bytes,
    )
    given = settings.model_fields_set
    serves_as = settings.model if "model" in given else ""
    if settings.attach_kind != "tokens":
        length = settings.context_length if "context_length" in given else None
        passing = PassingEngine(
            clock, where, settings.attach_kind, context_length=length, serves_as=serves_as
        )
        return Chosen(passing, None)
    assert settings.model_path is not None, "checked with the settings"
    files = read_folder(settings.model_path)
    engine = AttachedEngine(
        clock,
        where,
        Tokenizer(files.tokenizer, Inline()),
        Guess(settings.context_length, settings.block_size, settings.cache_blocks),
        serves_as=serves_as,
    )
    return Chosen(engine, files)


def _simulated(settings: Settings, clock: Clock) -> Chosen:
    files = read_folder(settings.model_path or DEMO)
    engine = SimulatedEngine(
        clock,
        Shape(
            block_size=settings.block_size,
            blocks=settings.cache_blocks,
            max_sequences=settings.max_num_seqs,
        ),
        model=settings.model,
        context_length=settings.context_length,
        continuation=speaker_of(files),
        speedup=settings.engine_speedup,
    )
    return Chosen(engine, files)
