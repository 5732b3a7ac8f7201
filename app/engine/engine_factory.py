"""Factory of a worker's engine by the settings, with the files of its model.

- `echo`: tokens are bytes; repeats the prompt, or answers from a script.
- `simulated`: readable sentences in the tokens of the model in a folder.
- `vllm`: the model, in vLLM.
- `attached`: a running server, with the tokenizer of a folder, or with bodies passed through.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from kvlane.app.engine.echo import EchoEngine, ScriptedAnswer
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.text_generator import TextGenerator, demo_sentences
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.engine.vllm.versions import INSTALL_VLLM
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, ModelFiles, read_folder
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.settings import Settings, SettingsError
from kvlane.streams.clock import Clock

MODEL_FILE_PATTERNS = ("*.json", "*.jinja")
"""The files that `app/preprocess/models/model_folder.py` reads; vLLM downloads the weights itself.
"""


def model_folder(name: str) -> Path:
    """The folder of a Hugging Face model name, downloaded if needed; a path is returned unchanged.
    Raises BadModel if the download fails."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise BadModel(
            "KVLANE_ENGINE=vllm, and vLLM is not installed", correction=INSTALL_VLLM
        ) from e
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILE_PATTERNS)))
    except Exception as e:
        raise BadModel(f"{name} is not a folder, and cannot be downloaded: {e}") from e


class EngineAndFiles(NamedTuple):
    """An engine before its start, and the files of its model if it has one."""

    engine: Engine
    files: ModelFiles | None


def create_engine(settings: Settings, clock: Clock) -> EngineAndFiles:
    """The engine of the settings. Raises BadModel if the folder of its model cannot be used."""
    choose = {"echo": _echo, "simulated": _simulated, "vllm": _vllm, "attached": _attached}[
        settings.engine
    ]
    choice = choose(settings, clock)
    return (
        choice._replace(engine=ValidatingEngine(choice.engine))
        if settings.validate_engine
        else choice
    )


def text_generator_of(files: ModelFiles) -> TextGenerator:
    """The text of simulated engines in the tokens of a model. Raises BadModel."""
    tokenizer = Tokenizer(files.tokenizer, InlinePool())
    end = files.eos_token_ids[0] if files.eos_token_ids else None
    return TextGenerator(demo_sentences(), tokenizer.encode_now, end)


def _echo(settings: Settings, clock: Clock) -> EngineAndFiles:
    engine = EchoEngine(
        clock,
        settings.echo_itl_ms / 1000,
        model=settings.model,
        context_length=settings.context_length,
        max_num_seqs=settings.max_num_seqs,
        script=None if settings.echo_script is None else _script(settings.echo_script),
    )
    return EngineAndFiles(engine, None)


def _script(file: Path) -> dict[str, ScriptedAnswer]:
    """The answers of a script. Raises SettingsError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, ScriptedAnswer])
    except (OSError, msgspec.MsgspecError) as e:
        raise SettingsError(
            f"KVLANE_ECHO_SCRIPT={file}: {e}: write a JSON object of messages and their answers, "
            "each a text or a list of parts with text and after_ms"
        ) from e


def _vllm(settings: Settings, clock: Clock) -> EngineAndFiles:
    """A folder is served as it is; a name is downloaded from where vLLM would get it."""
    from kvlane.app.engine.vllm.async_llm import VllmEngine, VllmLimits

    folder = settings.model_path or model_folder(settings.model)
    given = settings.model_fields_set
    limits = {"context_length", "max_num_seqs", "block_size"} & given
    engine = VllmEngine(
        clock,
        str(settings.model_path or settings.model),
        model=settings.model,
        limits=VllmLimits(**{name: getattr(settings, name) for name in limits}),
        adapters=settings.adapters,
        arguments=settings.engine_args,
    )
    return EngineAndFiles(engine, read_folder(folder))


def _attached(settings: Settings, clock: Clock) -> EngineAndFiles:
    """The folder has the files of the model that the server serves; no weights are read."""
    from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
    from kvlane.app.engine.attached.server_engine import ServerAddress
    from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine

    where = ServerAddress(
        settings.attach_url,
        settings.attach_events_endpoint,
        settings.attach_replay_endpoint,
        settings.attach_model,
        settings.attach_api_key.get_secret_value(),
        settings.attach_read_timeout_s,
        settings.attach_start_timeout_s,
        settings.attach_max_response_bytes,
    )
    given = settings.model_fields_set
    serves_as = settings.model if "model" in given else ""
    if settings.attach_kind != "tokens":
        length = settings.context_length if "context_length" in given else None
        passing = PassthroughEngine(
            clock, where, settings.attach_kind, context_length=length, served_name=serves_as,
            media_hosts=settings.media_hosts,
        )  # fmt: skip
        return EngineAndFiles(passing, None)
    assert settings.model_path is not None, "checked with the settings"
    files = read_folder(settings.model_path)
    engine = AttachedEngine(
        clock,
        where,
        Tokenizer(files.tokenizer, InlinePool()),
        AssumedLimits(settings.context_length, settings.block_size, settings.cache_blocks),
        served_name=serves_as,
        transfer_lease_s=settings.attach_transfer_lease_s,
        bootstrap=settings.attach_bootstrap_address,
    )
    return EngineAndFiles(engine, files)


def _simulated(settings: Settings, clock: Clock) -> EngineAndFiles:
    cached = settings.block_size * settings.cache_blocks
    if settings.context_length > cached:
        raise SettingsError(
            f"KVLANE_CONTEXT_LENGTH={settings.context_length} exceeds the {cached} tokens of the "
            "cache: raise KVLANE_CACHE_BLOCKS or lower the context"
        )
    files = read_folder(settings.model_path or DEMO_MODEL_FOLDER)
    engine = SimulatedEngine(
        clock,
        EngineLimits(
            block_size=settings.block_size,
            cache_blocks=settings.cache_blocks,
            max_sequences=settings.max_num_seqs,
        ),
        model=settings.model,
        context_length=settings.context_length,
        continuation=text_generator_of(files),
        speedup=settings.engine_speedup,
    )
    return EngineAndFiles(engine, files)
