"""A model's folder in the Hugging Face layout: its files for the preparation of prompts.

tokenizer.json           the tokenizer; without it there is no text
tokenizer_config.json    special tokens by name, perhaps the chat template
chat_template.json       the chat template of models of several media; goes before the one above
chat_template.jinja      the chat template; goes before both
additional_chat_templates/NAME.jinja   other templates by name
generation_config.json   end tokens and sampling, as defaults of requests
config.json              length of the context, and ends that the former does not name
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.streams.records import Artifact, ModelCard
from kvlane.streams.request import SamplingOptions

T = TypeVar("T")

DEMO_MODEL_FOLDER = Path(str(files("kvlane.app"))) / "data" / "demo-model"
"""A small tokenizer, with its template."""


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _Config(msgspec.Struct):
    """Of config.json. Models of several media keep the numbers of their language inside."""

    eos_token_id: int | list[int] | None = None
    max_position_embeddings: int | None = None
    text_config: _Config | None = None


class ModelFiles(NamedTuple):
    tokenizer: bytes
    template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    defaults: SamplingOptions
    context_length: int | None


def read_folder(folder: Path) -> ModelFiles:
    """Raises BadModel when there is no tokenizer.json, or a file is invalid."""
    try:
        tokenizer = (folder / "tokenizer.json").read_bytes()
        named = _read(folder / "tokenizer_config.json", dict[str, Any])
        generation = _read(folder / "generation_config.json", _GenerationConfig)
        config = _read(folder / "config.json", _Config)
        text = config.text_config or config
        special = _special_tokens(named)
        return ModelFiles(
            tokenizer=tokenizer,
            template=_template(folder, named),
            special_tokens=special,
            eos_token_ids=_ids(generation.eos_token_id)
            or _ids(config.eos_token_id)
            or _ids(text.eos_token_id)
            or _id_of(tokenizer, special.get("eos_token")),
            defaults=SamplingOptions(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=generation.top_k,
                min_p=generation.min_p,
                repetition_penalty=generation.repetition_penalty,
            ),
            context_length=text.max_position_embeddings,
        )
    except OSError as e:
        if isinstance(e, FileNotFoundError) and (e.filename or "").endswith("tokenizer.json"):
            why = "has no tokenizer.json: the tokens of texts are not known"
            raise BadModel(f"{folder} {why}") from e
        raise BadModel(f"{folder}: {e}") from e
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise BadModel(f"{folder} is not laid out as Hugging Face does it: {e!r}") from e


def card_of(
    name: str,
    model: ModelFiles,
    tokenizer_artifact: Artifact,
    template_artifact: Artifact | None,
    *,
    context_length: int | None = None,
    block_size: int | None = None,
) -> ModelCard:
    """The card of a model that is served by tokens, with its checksum. `context_length`: the
    engine's limit, where it is below the model's."""
    card = ModelCard(
        name=name,
        context_length=min(
            (n for n in (context_length, model.context_length) if n is not None), default=None
        ),
        block_size=block_size,
        tokenizer=tokenizer_artifact,
        template=template_artifact,
        special_tokens=model.special_tokens,
        eos_token_ids=model.eos_token_ids,
        defaults=model.defaults,
    )
    return msgspec.structs.replace(card, checksum=checksum_of(card))


def checksum_of(card: ModelCard) -> str:
    content = msgspec.structs.replace(card, name="", checksum="")
    return sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def _read(path: Path, kind: type[T]) -> T:
    """The content of a file; a default without the file."""
    return msgspec.json.decode(path.read_bytes() if path.exists() else b"{}", type=kind)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _id_of(tokenizer: bytes, token: str | None) -> tuple[int, ...]:
    added = msgspec.json.decode(tokenizer).get("added_tokens") or []
    return tuple(entry["id"] for entry in added if entry["content"] == token)


def _special_tokens(named: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind: given as text, or as an object with the text in it."""
    tokens = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template(folder: Path, named: dict[str, Any]) -> str | None:
    """The chat template: of several by name the default or only one; with tools that of
    tool_use."""
    templates: dict[str, str] = {}
    of_media = _read(folder / "chat_template.json", dict[str, Any])
    for given in (named.get("chat_template"), of_media.get("chat_template", of_media or None)):
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates |= {entry["name"]: entry["template"] for entry in given}
        elif given is not None:
            templates |= given
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    if (path := folder / "chat_template.jinja").exists():
        templates["default"] = path.read_text("utf-8")
    plain = templates.get("default")
    if plain is None and len(templates) == 1:
        [plain] = templates.values()
    of_tools = templates.get("tool_use")
    if plain is None or of_tools is None or of_tools == plain:
        return plain
    return (
        "{% if tools %}\n"
        + "{% else %}\n".join(source.removesuffix("\n") for source in (of_tools, plain))
        + "{% endif %}"
    )
