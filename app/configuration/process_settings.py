"""Settings of every process: logs, traces, dead letters and local files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvlane.app.configuration.setting_values import UPPER_CASE


class ProcessSettings(BaseModel):
    """Logs, spans, and folders for downloads and kernels."""

    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], UPPER_CASE] = Field(
        "INFO", description="lowest severity that is logged"
    )
    log_json: bool = Field(False, description="log lines as JSON objects")
    trace_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="receiver of spans by OTLP over HTTP, http://host:4318; empty: no spans",
    )
    trace_sample_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the requests that make spans; one whose client sends a "
        "`traceparent` follows its sampled flag",
    )
    keep_prompts: bool = Field(
        False, description="keep prompt text in dead letters instead of redacting it"
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "kvlane",
        description="directory for downloaded files: broker archives, tokenizers",
    )
    kernel_cache_dir: Path | None = Field(
        None,
        description="directory of the compiled index kernels; empty: in the virtual environment, "
        "else ~/.cache/kvlane/kernels",
    )
