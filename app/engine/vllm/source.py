"""Where the files of a model are that is known by a name only."""

from __future__ import annotations

from pathlib import Path

from app.preprocess.errors import BadModel

FILES = ("*.json", "*.jinja")
"""What `app/preprocess/modelfolder.py` reads; weights are fetched by vLLM itself."""


def folder_of(name: str) -> Path:
    """The folder of a name as Hugging Face knows it, fetched unless it is there; of a path, itself.

    Raises BadModel when it cannot be had.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise BadModel("KVLANE_ENGINE=vllm without vLLM: pip install 'kvlane[vllm]'") from e
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as e:
        raise BadModel(f"{name} is no folder, and cannot be fetched either: {e}") from e
