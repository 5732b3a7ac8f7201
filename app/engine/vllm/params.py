"""What vLLM is asked to do for a request: its sampling parameters, its prompt.

Every field of a Request that speaks to the engine is either mapped here, or done by somebody else
(stop strings and text: `app/preprocess/stops.py`), or refused with InvalidRequest. Nothing is left
out in silence. Whether vLLM itself takes what comes out is for vLLM to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.engine.contract import InvalidRequest
from streams.codecs import unpack_tokens
from streams.records import GuidedDecoding, Json, MultimodalData, Request

TRANSFER = "kv_transfer_params"
"""In `extra_args`, and in what prefill hands to decode: vLLM's own, for its connector."""


_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias",
)  # fmt: skip
"""Sampling options that vLLM knows by the same name; None leaves its default."""


def sampling_of(request: Request) -> Any:
    """The `vllm.SamplingParams` of a request. Raises InvalidRequest, and what vLLM raises."""
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
    params = SamplingParams(
        **fields,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=[*stop.stop_token_ids, *hidden],
        ignore_eos=stop.ignore_eos,
        logprobs=request.output.logprobs,
        structured_outputs=_guided(sampling.guided_decoding),
        thinking_token_budget=stop.max_thinking_tokens,
        extra_args=extra_of(request) or None,
        detokenize=False,  # text and stop strings are made beside the engine, for all engines alike
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if sampling.bad_words_token_ids:
        # vLLM takes words only, and turns them into these by its tokenizer.
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words_token_ids]  # noqa: SLF001
    return params


def extra_of(request: Request) -> dict[str, Any]:
    """Additional arguments, with the transfer of caches among them. Raises InvalidRequest.

    What a prefill has handed over goes before what the request itself says; probes transfer
    nothing.
    """
    extra = _object("extra_args", request.extra_args)
    if request.is_probe:
        extra.pop(TRANSFER, None)
    elif request.prefill_result is not None:
        handed = _object("prefill_result", request.prefill_result.disaggregated_params)
        extra[TRANSFER] = handed.get(TRANSFER, handed)
    if not isinstance(extra.get(TRANSFER, {}), dict):
        raise InvalidRequest(f"extra_args.{TRANSFER} is not an object")
    return extra


async def prompt_of(request: Request, model_config: Any) -> Any:
    """What `AsyncLLM.generate` takes as its prompt. Raises InvalidRequest, and what vLLM raises."""
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
        raise InvalidRequest("the model takes text only")
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    if salt is not None:
        prompt["cache_salt"] = salt
    if request.multi_modal_data:
        prompt["multi_modal_data"] = await _media(request.multi_modal_data)
    if request.mm_processor_kwargs is not None:
        named = _object("mm_processor_kwargs", request.mm_processor_kwargs)
        prompt["mm_processor_kwargs"] = named
    return prompt


def _refuse(request: Request) -> None:
    """Raise InvalidRequest for what this engine cannot do."""
    sampling = request.sampling
    if sampling.n not in (None, 1) or sampling.best_of not in (None, 1):
        raise InvalidRequest("n, best_of: a request to an engine has one answer")
    if sampling.use_beam_search or sampling.length_penalty not in (None, 1.0):
        raise InvalidRequest("use_beam_search, length_penalty: vLLM has no beam search")
    if sampling.detokenize is False:
        raise InvalidRequest("detokenize: an answer always comes with its text")
    if request.output.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: log probabilities of prompts are not passed on")
    if request.bootstrap_info is not None:
        raise InvalidRequest(f"bootstrap_info: vLLM meets by extra_args.{TRANSFER}")


def _guided(guided: GuidedDecoding | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if guided is None:
        return None
    if guided.backend not in (None, "auto"):
        raise InvalidRequest(
            "guided_decoding_backend: vLLM has one for all requests, an engine argument"
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


async def _media(parts: Mapping[str, tuple[MultimodalData, ...]]) -> dict[str, list[Any]]:
    """Images and the like, fetched. Bounds on size and hosts are vLLM's own."""
    from vllm.multimodal.media import MediaConnector

    connector = MediaConnector()
    fetch = {
        "image_url": ("image", connector.fetch_image_async),
        "audio_url": ("audio", connector.fetch_audio_async),
        "video_url": ("video", connector.fetch_video_async),
    }
    found: dict[str, list[Any]] = {}
    for part, items in parts.items():
        if part not in fetch:
            raise InvalidRequest(f"multi_modal_data: {part} is none of {', '.join(fetch)}")
        kind, get = fetch[part]
        for item in items:
            if item.kind == "decoded":
                raise InvalidRequest("multi_modal_data: give a URL, not memory of another process")
            try:
                found.setdefault(kind, []).append(await get(item.url))
            except (OSError, ValueError) as e:
                raise InvalidRequest(f"multi_modal_data: {part} cannot be read") from e
    return found


def _object(field: str, text: Json | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"{field} is no JSON object") from None


def priority_of(request: Request) -> int:
    """vLLM serves lower numbers first, requests say higher ones for more urgent."""
    return -(request.hints.priority or 0)
