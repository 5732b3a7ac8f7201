"""Tests of model folders in the Hugging Face layout, and the cards made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from kvlane.app.preprocess.models.model_folder import (
    DEMO_MODEL_FOLDER,
    ModelFiles,
    card_of,
    checksum_of,
    read_folder,
)
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Artifact, ModelCard
from kvlane.streams.request import SamplingOptions

TOKENIZER = Artifact(sha256="aa", size=10)
TEMPLATE = Artifact(sha256="bb", size=20)


def folder(path: Path, **files: dict[str, Any] | str) -> Path:
    """A folder with a tokenizer and the given files; `__` stands for a dot in names."""
    (path / "tokenizer.json").write_bytes((DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_demo_model_is_whole() -> None:
    model = read_folder(DEMO_MODEL_FOLDER)
    library = Tokenizer.from_buffer(model.tokenizer)
    assert [library.id_to_token(i) for i in model.eos_token_ids] == ["<|end|>", "<|endoftext|>"]
    assert model.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    assert model.context_length == 131_072
    assert model.template is not None


def test_folder_with_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    model = read_folder(folder(tmp_path))
    assert model == ModelFiles(model.tokenizer, None, {}, (), SamplingOptions(), None)


def test_folder_without_a_tokenizer_is_a_bad_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        read_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\ufeff{}", '{"eos_token_id": {}}'])
def test_malformed_file_is_an_invalid_model(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadModel, match="Hugging Face"):
        read_folder(folder(tmp_path, generation_config__json=content))


def test_template_of_its_own_file_goes_first(tmp_path: Path) -> None:
    config = {"chat_template": "old"}
    path = folder(tmp_path, chat_template__jinja="new", tokenizer_config__json=config)
    assert read_folder(path).template == "new"


def test_template_may_be_in_the_tokenizers_config(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config__json={"chat_template": "old"})
    assert read_folder(path).template == "old"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    path = folder(tmp_path, tokenizer_config__json={"chat_template": named})
    assert read_folder(path).template == "d"


@pytest.mark.parametrize(
    "content",
    [
        {"chat_template": "j"},
        {"chat_template": [{"name": "default", "template": "j"}]},
        {"chat_template": [{"name": "only", "template": "j"}]},
        {"chat_template": {"default": "j", "rag": "r"}},
        {"default": "j", "rag": "r"},
    ],
)
@pytest.mark.parametrize("config", [{}, {"chat_template": "old"}])
def test_template_may_be_in_a_json_file(
    tmp_path: Path, content: dict[str, Any], config: dict[str, Any]
) -> None:
    if "only" in str(content) and config:
        content = {"chat_template": "j"}
    path = folder(tmp_path, chat_template__json=content, tokenizer_config__json=config)
    assert read_folder(path).template == "j"
    (path / "chat_template.jinja").write_text("new")
    assert read_folder(path).template == "new"


def test_other_templates_may_be_in_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert read_folder(path).template == "r"
    (path / "chat_template.jinja").write_text("d")
    assert read_folder(path).template == "d"


def test_template_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "\n{% set a = 1 %}\nplain\n"},
        {"name": "tool_use", "template": "\n{% set t = tools[0] %}\n{{ t.function.name }}\n"},
    ]
    path = folder(tmp_path, tokenizer_config__json={"chat_template": named})
    source = read_folder(path).template
    assert source is not None
    template = ChatTemplate(source, SystemClock())
    message = {"role": "user", "content": "x"}
    assert template.render([message]) == "\nplain"
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render([message], tools=[tool]) == "\nf"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None, "other": "x"}
    path = folder(tmp_path, tokenizer_config__json=named)
    assert read_folder(path).special_tokens == {"bos_token": "<s>"}


def test_generation_config_precedes_the_model_config_for_end_tokens(tmp_path: Path) -> None:
    path = folder(
        tmp_path, generation_config__json={"eos_token_id": [7, 8]}, config__json={"eos_token_id": 9}
    )
    assert read_folder(path).eos_token_ids == (7, 8)


def test_model_config_gives_the_end_tokens(tmp_path: Path) -> None:
    assert read_folder(folder(tmp_path, config__json={"eos_token_id": 9})).eos_token_ids == (9,)


def test_end_of_text_is_known_by_its_name(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config__json={"eos_token": "<|end|>"})
    assert read_folder(path).eos_token_ids == (1,)


def test_generation_has_defaults(tmp_path: Path) -> None:
    defaults = {"temperature": 1, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    path = folder(tmp_path, generation_config__json=defaults)
    assert read_folder(path).defaults == SamplingOptions(
        temperature=1.0, top_p=0.9, top_k=20, repetition_penalty=1.1
    )


def test_models_of_several_media_keep_their_numbers_inside(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 4096, "eos_token_id": 7}
    model = read_folder(folder(tmp_path, config__json={"text_config": inner}))
    assert (model.context_length, model.eos_token_ids) == (4096, (7,))


def test_multimodal_model_may_have_end_tokens_outside_its_text_config(tmp_path: Path) -> None:
    path = folder(tmp_path, config__json={"text_config": {}, "eos_token_id": [1, 106]})
    assert read_folder(path).eos_token_ids == (1, 106)


@pytest.mark.parametrize(("engine", "length"), [(None, 131_072), (4096, 4096), (200_000, 131_072)])
def test_context_is_the_smaller_of_engine_and_model(engine: int | None, length: int) -> None:
    card = card_of(
        "demo", read_folder(DEMO_MODEL_FOLDER), TOKENIZER, TEMPLATE, context_length=engine
    )
    assert card.context_length == length


def test_card_has_its_checksum() -> None:
    card = card_of("demo", read_folder(DEMO_MODEL_FOLDER), TOKENIZER, TEMPLATE, block_size=16)
    assert card.checksum == checksum_of(card)
    assert len(card.checksum) == 64


def test_checksum_does_not_depend_on_the_name() -> None:
    one, other = (
        card_of(n, read_folder(DEMO_MODEL_FOLDER), TOKENIZER, TEMPLATE) for n in ("a", "b")
    )
    assert one.checksum == other.checksum


def test_checksum_does_not_depend_on_the_order_of_names() -> None:
    cards = [
        ModelCard(name="m", special_tokens=dict(pairs))
        for pairs in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")])
    ]
    assert checksum_of(cards[0]) == checksum_of(cards[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "chat"},
        {"context_length": 1},
        {"block_size": 16},
        {"tokenizer": TOKENIZER},
        {"template": TEMPLATE},
        {"special_tokens": {"a": "b"}},
        {"eos_token_ids": (1,)},
        {"defaults": SamplingOptions(temperature=0.5)},
        {"served_as": "x"},
    ],
)
def test_checksum_depends_on_everything_else(changes: dict[str, Any]) -> None:
    card = ModelCard(name="m")
    assert checksum_of(msgspec.structs.replace(card, **changes)) != checksum_of(card)
