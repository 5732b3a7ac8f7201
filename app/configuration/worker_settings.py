"""Settings of a worker: identity, heartbeats, limits of its load, its engine and its model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from kvlane.app.configuration.setting_values import ReadableFile, listed, unique_name
from kvlane.app.text.answer_parsers import VLLM_TOOL_PARSERS, ReasoningParserName, ToolParserName
from kvlane.streams.record_base import ModelKind
from kvlane.streams.records import Role


class WorkerSettings(BaseModel):
    worker_id: str = Field(
        default_factory=unique_name,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="name of this worker, unique in the deployment; keep it over restarts, so that "
        "the new process replaces the one before at once",
    )
    worker_role: Role = Field(
        "aggregated",
        description="role of this worker: aggregated (prefill and decode); with workers of role "
        "prefill, these compute prompts and hand them to workers of role decode; both need the "
        "engine vllm with a kv_transfer_config in KVLANE_ENGINE_ARGS, attached with "
        "KVLANE_ATTACH_TRANSFER_LEASE_S, or simulated",
    )
    taints: str = Field(
        "",
        description="labels of this worker that requests can require by name, separated by commas, "
        "such as gpu=h200,topology/zone=a",
    )
    worker_timeout_s: float = Field(
        5,
        gt=0,
        description="time without a heartbeat after which routers send a worker no new work and "
        "may declare it lost, in seconds",
    )
    heartbeat_interval_s: float = Field(
        1, gt=0, description="time between two heartbeats of a worker, in seconds"
    )
    max_num_seqs: int = Field(256, ge=1, description="requests that a worker runs concurrently")
    worker_max_waiting: int = Field(
        16, ge=0, description="requests that a worker queues before it returns more to the router"
    )
    max_cache_usage: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of its KV cache in use, 0 to 1, above which a worker gets no new "
        "requests; empty: no limit",
    )
    max_pending_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens assigned to a rank of this worker, neither cached nor computed, "
        "above which it gets no new requests; empty: no limit",
    )
    drain_grace_s: float = Field(
        30,
        ge=0,
        description="time that a stopping worker or gateway gives its running requests, in seconds",
    )
    health_probe_idle_s: float = Field(
        10,
        gt=0,
        description="time without a request after which a worker probes its engine, in seconds",
    )
    health_probe_timeout_s: float = Field(
        3, gt=0, description="time the engine has to answer a probe, in seconds"
    )
    engine_stall_timeout_s: float = Field(
        30,
        gt=0,
        description="time without an engine step or output, while runs wait for one, after which "
        "they move to other workers, in seconds; with an attached server that reports no steps the "
        "longer of this and KVLANE_ATTACH_READ_TIMEOUT_S",
    )
    engine_dead_timeout_s: float = Field(
        60,
        gt=0,
        description="time without an answer to any probe after which the worker exits, to be "
        "restarted by its supervisor, in seconds",
    )

    @property
    def taint_names(self) -> tuple[str, ...]:
        return listed(self.taints)


def worker_conflicts(settings: WorkerSettings) -> Iterator[str]:
    if 2 * settings.heartbeat_interval_s > settings.worker_timeout_s:
        yield (
            f"KVLANE_WORKER_TIMEOUT_S={settings.worker_timeout_s:g} is less than two heartbeats: "
            f"raise it to {2 * settings.heartbeat_interval_s:g}, or lower "
            "KVLANE_HEARTBEAT_INTERVAL_S"
        )


class EngineSettings(BaseModel):
    engine: Literal["simulated", "echo", "vllm", "attached"] = Field(
        "simulated",
        description="engine of a worker: simulated has the timing and prefix cache of a GPU and "
        "generates demo text, echo has no model and repeats the prompt, vllm is vLLM, "
        "attached is an OpenAI-compatible server that runs already",
    )
    model: str = Field("demo", min_length=1, description="name under which the model is served")
    model_path: Path | None = Field(
        None,
        description="directory of the model in Hugging Face layout; empty: the engine simulated "
        "uses the demo model, vllm takes KVLANE_MODEL, a directory or a name to download; attached "
        "needs it with KVLANE_ATTACH_KIND=tokens; echo ignores it",
    )
    context_length: int = Field(
        8192, ge=1, description="maximum of prompt and output together, in tokens"
    )
    tool_parser: ToolParserName = Field(
        "auto",
        description="parser of tool calls in the answers to chats with tools: hermes (JSON between "
        "the tags tool_call, as Hermes and Qwen write it), openai (gpt-oss), or with the engine "
        "vllm one of vLLM's own; auto takes the form that the model's chat template shows; none "
        "leaves calls in the text. For all workers of a model",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="parser of the reasoning in the answers to chats, by vLLM's name: qwen3 "
        "(between the tags think), deepseek_r1 (the same, and an answer begins within it) and so "
        "on; auto takes the form that the model's chat template shows; none leaves reasoning in "
        "the text. For all workers of a model",
    )
    engine_args: dict[str, Any] = Field(
        {},
        description="engine vllm: arguments of AsyncEngineArgs, as a JSON object, such as "
        '{"tensor_parallel_size": 2}',
    )
    adapters: dict[str, Path] = Field(
        {},
        description="LoRA adapters that the engine loads when it starts, as a JSON object of names "
        'and directories, such as {"sql": "/adapters/sql"}; the engines simulated and echo read no '
        "directory; engine attached has those of its server instead",
    )
    max_loras: int = Field(
        0,
        ge=0,
        description="above 0, routers also send a worker requests for adapters that it has not "
        "loaded, which its engine loads on demand; not with the engines vllm and attached",
    )
    engine_speedup: float = Field(
        1, gt=0, description="speed of the simulated engine relative to the GPU it models"
    )
    block_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="tokens per KV-cache block of the simulated engine, or of an attached server "
        "that does not report it",
    )
    cache_blocks: int = Field(
        16_384,
        ge=1,
        description="KV-cache blocks of the simulated engine, or of an attached server that does "
        "not report them",
    )
    echo_itl_ms: float = Field(
        20, ge=0, description="inter-token latency of the echo engine, in milliseconds"
    )
    echo_script: ReadableFile | None = Field(
        None,
        description="engine echo: file with a JSON object of messages and the answers to them, "
        "texts or lists of parts with text and after_ms, a pause before it; the engine gives the "
        "answer to the last message of a chat, and echoes one without an answer",
    )
    attach_url: str = Field(
        "",
        description="engine attached: URL of the server, http://host:port; it serves the OpenAI "
        "completions API, and KVLANE_MODEL_PATH has the files of its model",
    )
    attach_kind: ModelKind = Field(
        "tokens",
        description="engine attached: tokens sends tokenized prompts and serves chats and "
        "completions; any other kind forwards the client's body for that one endpoint, "
        "needs no KVLANE_MODEL_PATH, and cannot resume an interrupted response on another "
        "worker",
    )
    attach_model: str = Field(
        "", description="engine attached: name of the model at the server; empty: its only one"
    )
    attach_events_endpoint: str = Field(
        "",
        description="engine attached: ZMQ endpoint of the server's KV-cache events, "
        "tcp://host:port or ipc://path; empty: the cache is estimated from the requests it serves",
    )
    attach_replay_endpoint: str = Field(
        "",
        description="engine attached: ZMQ endpoint from which lost KV-cache events are requested "
        "again, tcp://host:port; empty: after a loss the cache counts as empty",
    )
    attach_api_key: SecretStr = Field(
        SecretStr(""), description="engine attached: API key of the server"
    )
    attach_api_key_file: ReadableFile | None = Field(
        None, description="file with the value of KVLANE_ATTACH_API_KEY"
    )
    attach_read_timeout_s: float = Field(
        120,
        gt=0,
        description="engine attached: time without data from the server, while it has a request, "
        "after which the request moves to another worker, in seconds",
    )
    attach_max_response_bytes: int = Field(
        64 * 1024 * 1024,
        gt=0,
        description="engine attached: largest response read from the server, in bytes, including "
        "the JSON around each token; a longer one is aborted",
    )
    attach_start_timeout_s: float = Field(
        600,
        gt=0,
        description="engine attached: time a starting worker waits for the server, in seconds",
    )
    attach_transfer_lease_s: float | None = Field(
        None,
        gt=0,
        description="engine attached: time that a vLLM server with a KV connector holds the KV "
        "blocks of a prompt for another server, in seconds (30 by default in its NIXL "
        "connectors), or that a SGLang server in disaggregation mode waits for the other one "
        "(300 by default); empty: it hands no prompts over",
    )
    attach_bootstrap: str = Field(
        "",
        description="engine attached: address, host:port, where decode servers meet a SGLang "
        "server that computes prompts, with its --disaggregation-bootstrap-port (8998 by default), "
        "such as 10.0.0.7:8998; set at the prefill worker only",
    )
    attach_media_hosts: str = Field(
        "",
        description="engine attached: hosts from which the server may fetch images and other media "
        "that clients name by URL, with commas between them; * for any; empty: none, so clients "
        "send the data itself. With engine vllm these are allowed_media_domains in "
        "KVLANE_ENGINE_ARGS",
    )
    validate_engine: bool = Field(
        False, description="check every engine output against the engine interface while it runs"
    )

    @field_validator("attach_url")
    @classmethod
    def _is_server(cls, value: str) -> str:
        bare = value.rstrip("/").removesuffix("/v1")
        if value and not re.fullmatch(r"https?://[^/?#@\s]+", bare):
            raise ValueError("give http://host:port or https://host:port, without a path")
        return bare

    @field_validator("attach_bootstrap")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and not re.fullmatch(r"([^\s/:@]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", value):
            raise ValueError("give host:port, such as 10.0.0.7:8998")
        return value

    @property
    def media_hosts(self) -> tuple[str, ...]:
        return listed(self.attach_media_hosts)

    @property
    def attach_bootstrap_address(self) -> tuple[str, int] | None:
        host, _, port = self.attach_bootstrap.rpartition(":")
        return (host, int(port)) if host else None

    @field_validator("attach_events_endpoint", "attach_replay_endpoint")
    @classmethod
    def _is_socket(cls, value: str) -> str:
        if value and ("*" in value or not re.fullmatch(r"tcp://[^/\s]+:\d+|ipc://\S+", value)):
            raise ValueError(
                "give the address to connect to, tcp://host:port or ipc://path: where the server "
                "has tcp://*:5557, tcp://127.0.0.1:5557 is meant on the same machine"
            )
        return value


def engine_conflicts(settings: EngineSettings) -> Iterator[str]:
    if settings.max_loras and settings.engine in ("vllm", "attached"):
        yield (
            f"KVLANE_MAX_LORAS={settings.max_loras} has no effect with "
            f"KVLANE_ENGINE={settings.engine}, which loads no adapter on demand: vllm loads those "
            "of KVLANE_ADAPTERS when it starts, attached has those of its server"
        )
    if settings.tool_parser in VLLM_TOOL_PARSERS and settings.engine != "vllm":
        yield (
            f"KVLANE_TOOL_PARSER={settings.tool_parser} is a parser of vLLM and needs "
            f"KVLANE_ENGINE=vllm, not {settings.engine}: use hermes, auto or none"
        )
    if settings.engine == "attached":
        yield from _attachment_conflicts(settings)


def _attachment_conflicts(settings: EngineSettings) -> Iterator[str]:
    if not settings.attach_url:
        yield "KVLANE_ENGINE=attached needs KVLANE_ATTACH_URL=http://host:port, a server's"
    if settings.attach_kind == "tokens" and settings.model_path is None:
        yield (
            "KVLANE_ENGINE=attached needs KVLANE_MODEL_PATH: the folder with the tokenizer of "
            "the model that the server serves; or KVLANE_ATTACH_KIND=chat, for which none is "
            "needed"
        )
    if settings.attach_kind != "tokens" and settings.attach_events_endpoint:
        yield (
            "KVLANE_ATTACH_EVENTS_ENDPOINT has no effect with "
            f"KVLANE_ATTACH_KIND={settings.attach_kind}: such requests are not routed by cache"
        )
    if settings.attach_kind != "tokens" and settings.attach_transfer_lease_s is not None:
        yield (
            "KVLANE_ATTACH_TRANSFER_LEASE_S has no effect with "
            f"KVLANE_ATTACH_KIND={settings.attach_kind}: such requests are not handed over"
        )
    if settings.attach_bootstrap and settings.attach_transfer_lease_s is None:
        yield "KVLANE_ATTACH_BOOTSTRAP needs KVLANE_ATTACH_TRANSFER_LEASE_S: set that too"
    if settings.attach_replay_endpoint and not settings.attach_events_endpoint:
        yield (
            "KVLANE_ATTACH_REPLAY_ENDPOINT repairs losses of KVLANE_ATTACH_EVENTS_ENDPOINT: "
            "set that too"
        )
