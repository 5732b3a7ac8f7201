"""Download of the files of a model that is given by name."""

from __future__ import annotations

from pathlib import Path

from kvlane.app.engine.vllm.versions import INSTALL_VLLM
from kvlane.app.preprocess.prompt_errors import BadModel

MODEL_FILE_PATTERNS = ("*.json", "*.jinja")
"""The files that `app/preprocess/models/model_folder.py` reads; vLLM downloads the weights itself.
"""


def model_folder(name: str) -> Path:
    """The folder of a Hugging Face model name, downloaded if needed; a path is returned unchanged.

    Raises BadModel if the download fails.
    """
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
