"""Training of the demo model's tokenizer: byte-level BPE on the texts of this repository.

    .venv/bin/python deploy/model/train_tokenizer.py [FOLDER]

The same tree gives the same bytes. A tree that has changed gives other tokens, so run it only when
the vocabulary is meant to change; chats and answers that are under way would not go on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "app" / "data" / "demo-model"
KINDS = {".py", ".md", ".toml", ".sh", ".yaml", ".properties"}
VOCABULARY = 4096
CONTEXT = 131_072
END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SPECIAL = [END_OF_TEXT, END, "<|system|>", "<|user|>", "<|assistant|>"]
"""Positions in this list are token ids."""


def texts() -> list[str]:
    """The tracked text files, in the order of their paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(listed.stdout.decode().rstrip("\0").split("\0"))
    return [(ROOT / n).read_text() for n in names if Path(n).suffix in KINDS]


def train(corpus: list[str]) -> Tokenizer:
    """Merges of the most common byte pairs, within words and runs of spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    """One file of the Hugging Face layout."""
    (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main(folder: Path = FOLDER) -> None:
    """Write everything but the chat template, which is written by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = texts()
    tokenizer = train(corpus)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ends = [SPECIAL.index(END), SPECIAL.index(END_OF_TEXT)]
    write(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": None,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": SPECIAL[2:],
            "clean_up_tokenization_spaces": False,
        },
    )
    write(
        folder,
        "config.json",
        {
            "model_type": "kvlane-demo",
            "max_position_embeddings": CONTEXT,
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": ends,
        },
    )
    write(folder, "generation_config.json", {"eos_token_id": ends})
    size = sum(map(len, corpus))
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens from {size} characters")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
