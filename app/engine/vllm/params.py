"""Translation of a request for vLLM: its sampling parameters and its prompt.

Every field of a Request is mapped here, handled elsewhere (stop strings and text:
`app/text/stop_conditions.py`), or refused with InvalidRequest. vLLM validates the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvlane.app.engine.interface import KV_TRANSFER_FIELD, InvalidRequest, refuse_unknown_options
from kvlane.app.engine.media_urls import check_url
from kvlane.app.engine.vllm.guided_resume import TAKEN_FIELD
from kvlane.app.text.answer_forms import after_reasoning
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.record_base import JsonText
from kvlane.streams.records import Phase
from kvlane.streams.request import GuidedDecoding, MultimodalData, Request

_RESERVED = {
    KV_TRANSFER_FIELD: "transfers between servers",
    TAKEN_FIELD: "answers that another worker began",
}


_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias",
)  # fmt: skip
"""Sampling options with the same name in vLLM; None leaves its default."""


def sampling_params(request: Request, phase: Phase = "aggregated", taken_tokens: int = 0) -> Any:
    """The `vllm.SamplingParams` of a request whose prompt ends with `taken_tokens` of its answer.
    Raises InvalidRequest, and errors of vLLM."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, stop = request.sampling, request.stop
    _refuse(request)
    fields: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(sampling, name)) is not None
    }
    if sampling.allowed_token_ids is not None:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    hidden = () if stop.ignore_eos else (*stop.stop_token_ids_hidden, *request.eos_token_ids)
    max_tokens = stop.max_tokens
    if request.is_probe and max_tokens is None:
        max_tokens = 1
    extra = extra_args(request, phase)
    if sampling.guided_decoding is not None and taken_tokens:
        extra[TAKEN_FIELD] = taken_tokens
    params = SamplingParams(
        **fields,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=[*stop.stop_token_ids, *hidden],
        ignore_eos=stop.ignore_eos,
        logprobs=request.output.logprobs,
        structured_outputs=_guided(after_reasoning(sampling.guided_decoding, request.parsing)),
        thinking_token_budget=stop.max_thinking_tokens,
        extra_args=extra or None,
        detokenize=False,  # text and stop strings are handled outside the engine
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if sampling.bad_words_token_ids:
        # vLLM accepts words only, and converts them to these ids with its tokenizer.
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words_token_ids]  # noqa: SLF001
    return params


def extra_args(request: Request, phase: Phase = "aggregated") -> dict[str, Any]:
    """Additional arguments, with the transfer of a prefill, or in phase prefill the request for
    one; a probe has neither.

    Raises InvalidRequest, also for a reserved field in the arguments of a client.
    """
    extra = _object("extra_args", request.extra_args)
    for field, use in _RESERVED.items():
        if field in extra:
            raise InvalidRequest(f"extra_args.{field}: reserved for {use}")
    if request.is_probe:
        return extra
    if phase == "prefill":
        extra[KV_TRANSFER_FIELD] = {"do_remote_decode": True, "do_remote_prefill": False}
    elif request.prefill_result is not None:
        handed = _object("prefill_result", request.prefill_result.disaggregated_params)
        extra[KV_TRANSFER_FIELD] = handed.get(KV_TRANSFER_FIELD, handed)
        if not isinstance(extra[KV_TRANSFER_FIELD], dict):
            raise InvalidRequest(f"prefill_result.{KV_TRANSFER_FIELD} is not an object")
    return extra


async def vllm_prompt(request: Request, model_config: Any) -> Any:
    """The prompt for `AsyncLLM.generate`. Raises InvalidRequest, and errors of vLLM."""
    from vllm.inputs import tokens_input

    salt = request.cache_salt or None
    token_ids = list(unpack_tokens(request.token_ids))
    if request.prompt_embeds is not None:
        return _embeds(request.prompt_embeds, salt, model_config)
    if not token_ids:
        raise InvalidRequest("the prompt is empty")
    if not request.multi_modal_data and request.mm_processor_kwargs is None:
        return tokens_input(token_ids, cache_salt=salt)
    if not model_config.is_multimodal_model:
        raise InvalidRequest("multi_modal_data: the model accepts text only")
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    if salt is not None:
        prompt["cache_salt"] = salt
    if request.multi_modal_data:
        prompt["multi_modal_data"] = await _media(request.multi_modal_data, model_config)
    if request.mm_processor_kwargs is not None:
        named = _object("mm_processor_kwargs", request.mm_processor_kwargs)
        prompt["mm_processor_kwargs"] = named
    return prompt


def _refuse(request: Request) -> None:
    refuse_unknown_options(request, "vLLM has no beam search")
    if request.bootstrap_info is not None:
        raise InvalidRequest(f"bootstrap_info: vLLM uses {KV_TRANSFER_FIELD} instead")


def _guided(guided: GuidedDecoding | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if guided is None:
        return None
    if guided.backend not in (None, "auto"):
        raise InvalidRequest(
            "guided_decoding_backend: vLLM has one backend for all requests, an engine argument"
        )
    forms: dict[str, Any] = {
        "json": guided.json and guided.json.decode(),
        "regex": guided.regex,
        "choice": guided.choice and list(guided.choice),
        "grammar": guided.grammar,
        "structural_tag": guided.structural_tag and guided.structural_tag.decode(),
    }
    named = {name: form for name, form in forms.items() if form is not None}
    return StructuredOutputsParams(**named, whitespace_pattern=guided.whitespace_pattern)


def _embeds(encoded: str, salt: str | None, model_config: Any) -> Any:
    from vllm.inputs import embeds_input
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    try:
        tensor = safe_load_prompt_embeds(model_config, encoded.encode())
    except ValueError as e:  # no base64
        raise InvalidRequest(f"prompt_embeds: {e}") from e
    return embeds_input(tensor, cache_salt=salt)


async def _media(
    parts: Mapping[str, tuple[MultimodalData, ...]], model_config: Any
) -> dict[str, list[Any]]:
    """Images, audio and video, fetched within the limits of vLLM's settings on hosts and files:
    `--allowed-media-domains`, `--allowed-local-media-path`. Without the former vLLM would fetch any
    URL; here none is fetched then."""
    from vllm.multimodal.media import MediaConnector

    hosts = model_config.allowed_media_domains or ()
    may_read_files = bool(model_config.allowed_local_media_path)
    connector = MediaConnector(
        allowed_local_media_path=model_config.allowed_local_media_path,
        allowed_media_domains=model_config.allowed_media_domains,
    )
    fetch = {
        "image_url": ("image", connector.fetch_image_async),
        "audio_url": ("audio", connector.fetch_audio_async),
        "video_url": ("video", connector.fetch_video_async),
    }
    found: dict[str, list[Any]] = {}
    for part, items in parts.items():
        if part not in fetch:
            raise InvalidRequest(f"multi_modal_data: {part} is not one of {', '.join(fetch)}")
        kind, get = fetch[part]
        for item in items:
            if item.kind == "decoded":
                raise InvalidRequest("multi_modal_data: give a URL, not memory of another process")
            if not (may_read_files and (item.url or "").startswith("file:///")):
                check_url(item.url or "", f"multi_modal_data.{part}", hosts)
            try:
                found.setdefault(kind, []).append(await get(item.url))
            except (OSError, ValueError) as e:
                raise InvalidRequest(f"multi_modal_data: {part} cannot be read") from e
    return found


def _object(field: str, text: JsonText | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"{field} is not a JSON object") from None


def vllm_priority(request: Request) -> int:
    """The priority for vLLM, which serves lower numbers first, unlike requests."""
    return -(request.hints.priority or 0)
