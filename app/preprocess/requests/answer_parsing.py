"""The parsing that a chat asks for, and the form of its calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec.json
from msgspec.structs import replace

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.guided_decoding import (
    check_cost,
    cost_of_json,
    guided_decoding_of,
)
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.request_models import ChatBody
from kvlane.app.text.answer_forms import CALL_FORMS, calls_form
from kvlane.app.text.answer_parsers import (
    VLLM_TOOL_PARSERS,
    begins_in_reasoning,
    reasoning_parser_of,
    tool_parser_of,
)
from kvlane.streams.records import ModelCard
from kvlane.streams.request import AnswerParsing, GuidedDecoding, Request


class ModelParsers(NamedTuple):
    """Names of the parsers of a model's answers; "" for none."""

    tools: str = ""
    reasoning: str = ""


def parsers_of(card: ModelCard, template: str | None) -> ModelParsers:
    """The parsers that a card names, otherwise those of the form in the chat template."""
    source = template or ""
    named = ModelParsers(
        card.tool_parser or tool_parser_of(source),
        card.reasoning_parser or reasoning_parser_of(source),
    )
    return ModelParsers(*("" if name == "none" else name for name in named))


def with_parsing(
    asked: OpenAIRequest,
    parsers: ModelParsers,
    requests: Sequence[Request],
    prompts: Sequence[str | None],
) -> tuple[Request, ...]:
    """The requests of a body with the parsing of their answers. Raises InvalidPrompt. `prompts`:
    their texts, where they are known."""
    form = _calls_form(asked, parsers)
    if form is not None:
        requests = [
            replace(each, sampling=replace(each.sampling, guided_decoding=form))
            for each in requests
        ]
    return tuple(
        replace(request, parsing=parsing_of(asked, parsers, prompt))
        for request, prompt in zip(requests, prompts, strict=True)
    )


def enforced_calls(request: OpenAIRequest) -> str:
    """The field by which a chat prescribes calls; "" for none."""
    is_free = not isinstance(request.body, ChatBody) or request.tool_choice in ("none", "auto")
    return "" if is_free else "tool_choice"


def _strict_field(request: OpenAIRequest) -> str:
    """The first field by which a chat asks for arguments by their schema; "" for none. Client
    libraries set it in all tools, so it is honoured where it can be."""
    body = request.body
    if not isinstance(body, ChatBody) or request.tool_choice != "auto":
        return ""
    strict = (n for n, tool in enumerate(body.tools or ()) if tool.function.strict)
    return next((f"tools.{n}.function.strict" for n in strict), "")


def _calls_form(request: OpenAIRequest, parsers: ModelParsers) -> GuidedDecoding | None:
    enforced, known = enforced_calls(request), CALL_FORMS.get(parsers.tools)
    if enforced and known is None:
        raise InvalidPrompt(enforced, "the form of this model's calls is not known: use auto")
    field = enforced or _strict_field(request)
    if not field or known is None or (not enforced and known.style):
        return None  # in XML there may be white space beside strings
    assert isinstance(request.body, ChatBody)
    form = calls_form(
        request.tools or (), request.tool_choice,
        is_single=request.body.parallel_tool_calls is False,
        content=guided_decoding_of(request.body), parser=parsers.tools,
    )  # fmt: skip
    assert form is not None
    check_cost(field, cost_of_json(msgspec.json.decode(form.structural_tag or b"null")))
    return form


def parsing_of(
    request: OpenAIRequest, parsers: ModelParsers, prompt: str | None
) -> AnswerParsing | None:
    """The parsing of the answers to a prompt; None for plain text. Raises InvalidPrompt."""
    body = request.body
    if not isinstance(body, ChatBody):
        return None
    if body.include_reasoning is False and not parsers.reasoning:
        raise InvalidPrompt(
            "include_reasoning",
            "the reasoning of this model is not separated from its answers: leave it out",
        )
    if body.tools and body.parallel_tool_calls is False and not parsers.tools:
        raise InvalidPrompt("parallel_tool_calls", "this model answers in text: use true")
    is_vllm = parsers.tools in VLLM_TOOL_PARSERS
    if body.tools and body.parallel_tool_calls is False and is_vllm:
        raise InvalidPrompt(
            "parallel_tool_calls", f"the tool parser {parsers.tools} ends no answer: use true"
        )
    tools = parsers.tools if request.tools else ""
    if not tools and not parsers.reasoning:
        return None
    return AnswerParsing(
        tools=tools,
        reasoning=parsers.reasoning,
        in_reasoning=begins_in_reasoning(parsers.reasoning, prompt or ""),
        shows_reasoning=body.include_reasoning is not False,
        max_calls=1 if body.parallel_tool_calls is False else 0,
        functions=msgspec.json.encode(request.tools) if tools and is_vllm else None,
    )
