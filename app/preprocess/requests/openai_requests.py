"""OpenAI requests that become tokens: from a body to `Request`s. Pure: no I/O, no clock.

    fields, headers ──read──► Asked ──prompts──► texts and tokens ──requests──► Request …

`read_openai` checks a body independently of the model; `OpenAIRequest.prompts` renders the chat;
`app/preprocess/models/model.py` tokenises; `OpenAIRequest.requests` combines tokens, options and
the model's card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ValidationError

from kvlane.app.preprocess.json_limits import check_size
from kvlane.app.preprocess.prompt_errors import ContextExceeded, InvalidPrompt, invalid_prompt
from kvlane.app.preprocess.requests.guided_decoding import guided_decoding_of
from kvlane.app.preprocess.requests.nvext import (
    NvExt,
    extra_args_of,
    mm_routing_of,
    routing_fields_of,
    with_headers,
)
from kvlane.app.preprocess.requests.request_models import (
    I63,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    PassthroughBody,
    TokensBody,
    check_allowed_tools,
)
from kvlane.app.preprocess.requests.unsupported_fields import (
    OF_CHATS,
    OF_COMPLETIONS,
    refuse_unsupported,
)
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import ModelCard
from kvlane.streams.request import OutputOptions, Request, SamplingOptions, StopConditions

TokenizedKind = Literal["chat", "completion", "tokens"]
TextOrTokens = str | Sequence[int]

B = TypeVar("B", bound=BaseModel)

_TOKEN = re.compile(r"[0-9]{1,9}")
_BODIES: dict[TokenizedKind, type[GenerationBody]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "tokens": TokensBody,
}
_FIELDS: dict[type[GenerationBody], str] = {
    ChatBody: "messages",
    CompletionBody: "prompt",
    TokensBody: "token_ids",
}
SHORT_MESSAGES = 8
SHORT_CHARS = 2000
"""Bound of a chat that is rendered on the loop, where a thread would contend for the
interpreter."""
NO_EFFORT = "is not supported: the chat template of this model has no such variable"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling options for which a model may give a default; `greed_sampling` unsets all of them but
the temperature."""


@dataclass(frozen=True)
class RoutingOptions:
    body: GenerationBody | PassthroughBody
    ext: NvExt

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def is_query(self) -> bool:
        """Whether it is a dry run, as of `Request`."""
        annotations = tuple(self.ext.annotations or ())
        return bool(annotations) and Request(id="", annotations=annotations).is_query

    @property
    def cache_salt(self) -> str:
        """The salt that the client chose for cached blocks; "" without one."""
        return self.ext.cache_salt or self.body.cache_salt or ""

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @property
    def stream_interval(self) -> int:
        return self.ext.stream_interval or 1


@dataclass(frozen=True)
class OpenAIRequest(RoutingOptions):
    body: GenerationBody
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of a chat, unchanged; the body has checked them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools of a chat, unchanged; None if the model must not call any."""

    @property
    def echo(self) -> bool:
        return isinstance(self.body, CompletionBody) and bool(self.body.echo)

    @property
    def tool_choice(self) -> Any:
        """none, auto, required, or a function by its name."""
        if not isinstance(self.body, ChatBody) or not self.body.tools:
            return "none"
        return self.body.tool_choice or "auto"

    @property
    def field(self) -> str:
        return _FIELDS[type(self.body)]

    @property
    def add_special_tokens(self) -> bool:
        """Whether special tokens are added to a text; templates write them into chats."""
        if isinstance(self.body, CompletionBody):
            return self.body.add_special_tokens is not False
        return bool(self.ext.use_raw_prompt)

    @property
    def is_short(self) -> bool:
        """Whether `prompts` takes a fraction of a millisecond: no chat, or a few short messages of
        text and nothing else that a template could repeat."""
        body = self.body
        if not isinstance(body, ChatBody):
            return True
        if self.tools or body.documents or body.chat_template_kwargs:
            return False
        if len(self.messages) > SHORT_MESSAGES or any(len(m) > 4 for m in self.messages):
            return False
        values = [value for message in self.messages for value in message.values()]
        return sum(len(v) if isinstance(v, str) else SHORT_CHARS + 1 for v in values) <= SHORT_CHARS

    def prompts(self, template: ChatTemplate | None) -> list[TextOrTokens]:
        """The prompts, not tokenised; may take as long as the template is allowed. Raises
        InvalidPrompt."""
        if self.ext.token_data is not None:
            return [self.ext.token_data]
        if isinstance(self.body, TokensBody):
            return [self.body.token_ids]
        if isinstance(self.body, CompletionBody):
            return list(self.body.prompt)
        assert isinstance(self.body, ChatBody)
        if self.ext.use_raw_prompt:
            return ["\n".join(message.text() for message in self.body.messages)]
        if template is None:
            raise InvalidPrompt("messages", "this model has no chat template")
        variables = dict(self.body.chat_template_kwargs or {})
        if self.body.reasoning_effort is not None:
            if not template.has_variable("reasoning_effort"):
                raise InvalidPrompt("reasoning_effort", NO_EFFORT)
            variables.setdefault("reasoning_effort", self.body.reasoning_effort)
        return [
            template.render(
                self.messages,
                tools=self.tools,
                documents=self.body.documents,
                add_generation_prompt=self.body.add_generation_prompt is not False,
                variables=variables,
            )
        ]

    def requests(self, prompts: Sequence[Sequence[int]], card: ModelCard) -> tuple[Request, ...]:
        """One Request for each prompt's tokens, without an id, a tenant and a deadline. Raises
        InvalidPrompt, for a prompt without tokens too, and TooLarge."""
        body, ext = self.body, self.ext
        tokens = body if isinstance(body, TokensBody) else None
        common = Request(
            id="",
            model=body.model,
            sampling=self._sampling(card),
            output=OutputOptions(
                logprobs=body.top_logprobs_count(),
                prompt_logprobs=body.prompt_logprobs,
                skip_special_tokens=body.skip_special_tokens,
                return_tokens_as_token_ids=body.return_tokens_as_token_ids,
            ),
            eos_token_ids=tuple((tokens and tokens.eos_token_ids) or card.eos_token_ids),
            mdc_sum=card.checksum or None,
            cache_salt=self.cache_salt,
            extra_args=extra_args_of(ext),
            mm_routing_info=mm_routing_of(ext),
            prompt_embeds=body.prompt_embeds,
            multi_modal_data=tokens.multi_modal_data if tokens else None,
            is_probe=bool(tokens and tokens.is_probe),
            mm_processor_kwargs=None
            if body.mm_processor_kwargs is None
            else msgspec.json.encode(body.mm_processor_kwargs),
            **routing_fields_of(ext),
        )
        requests = tuple(
            replace(common, token_ids=pack_tokens(prompt), stop=self._stop(len(prompt), card))
            for prompt in prompts
        )
        if len(requests) * self.n > 1:
            sizes = [len(request.token_ids) for request in requests]
            shared = len(msgspec.msgpack.encode(requests[0])) - sizes[0]
            check_size((shared * len(requests) + sum(sizes)) * self.n)
        return requests

    def _stop(self, prompt: int, card: ModelCard) -> StopConditions:
        body, context = self.body, card.context_length
        name, limit = body.max_tokens_field()
        if not prompt:
            raise InvalidPrompt(self.field, "is empty")
        if context is not None and prompt >= context:
            raise ContextExceeded(
                self.field,
                f"This model's maximum context length is {context} tokens; the prompt has {prompt} "
                "and leaves none for an answer",
            )
        if context is not None and prompt + (limit or 0) > context:
            raise ContextExceeded(
                name,
                f"This model's maximum context length is {context} tokens; the prompt has {prompt} "
                f"and the answer may have {limit}",
            )
        if limit is None and context is not None:
            limit = context - prompt
        if limit is not None and (body.min_tokens or 0) > limit:
            raise InvalidPrompt("min_tokens", f"exceeds the {limit} tokens an answer may have")
        hidden = body.stop_token_ids_hidden if isinstance(body, TokensBody) else None
        return StopConditions(
            max_tokens=limit,
            min_tokens=body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            stop_token_ids_hidden=tuple(hidden or ()),
            ignore_eos=bool(body.ignore_eos),
            max_thinking_tokens=body.thinking_token_budget
            if self.ext.max_thinking_tokens is None
            else self.ext.max_thinking_tokens,
        )

    def _sampling(self, card: ModelCard) -> SamplingOptions:
        body = self.body
        given = {name: getattr(body, name) for name in _DEFAULTS}
        if self.ext.greed_sampling:
            chosen = dict.fromkeys(_DEFAULTS) | {"temperature": 0.0}
            presence = frequency = None
        else:
            chosen = {
                name: getattr(card.defaults, name) if value is None else value
                for name, value in given.items()
            }
            presence, frequency = body.presence_penalty, body.frequency_penalty
        bias, allowed = body.logit_bias, body.allowed_token_ids
        bad_words = body.bad_words_token_ids if isinstance(body, TokensBody) else None
        return SamplingOptions(
            **chosen,
            presence_penalty=presence,
            frequency_penalty=frequency,
            seed=body.seed,
            include_stop_str_in_output=body.include_stop_str_in_output,
            guided_decoding=guided_decoding_of(body),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words_token_ids=tuple(map(tuple, bad_words)) if bad_words else None,
            logit_bias=None if not bias else _bias(bias),
        )


def read_openai(
    kind: TokenizedKind, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> OpenAIRequest:
    """Check a body. `headers`: by their names in lower case; they override `nvext`. Raises
    InvalidPrompt that names the field or the header."""
    body = validated(_BODIES[kind], fields)
    refuse_unsupported(fields)
    ext = with_headers(body.nvext or NvExt(), headers or {})
    prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    check_options(body, prompts)
    if body.best_of not in (None, body.n or 1):
        raise InvalidPrompt("best_of", "must be n: the best of more answers is not looked for")
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise InvalidPrompt("echo", "has no log probabilities of the prompt: ask without logprobs")
    if not isinstance(body, ChatBody):
        refuse_unsupported(fields, OF_COMPLETIONS)
        return OpenAIRequest(body, ext)
    refuse_unsupported(fields, OF_CHATS)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidPrompt("top_logprobs", "needs logprobs")
    _check_tool_choice(body)
    _check_content(body)
    tools = None if body.tool_choice == "none" else fields.get("tools")
    return OpenAIRequest(body, ext, fields["messages"], tools or None)


def nth_request(request: Request, number: int) -> Request:
    """The request for one of several answers: a seed must not draw the same one each time."""
    seed = request.sampling.seed
    if not number or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) & I63))


def check_options(body: GenerationBody | PassthroughBody, prompts: int) -> None:
    """Raises InvalidPrompt for too many answers, and for options of streams without one."""
    if prompts * (body.n or 1) > MAX_CHOICES:
        raise InvalidPrompt("n", f"{prompts} prompts with {body.n or 1} answers are too many")
    if body.stream_options is not None and not body.stream:
        raise InvalidPrompt("stream_options", "is for streams only")


def validated(kind: type[B], fields: Mapping[str, Any]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        raise invalid_prompt(e) from None


def _check_tool_choice(body: ChatBody) -> None:
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not body.tools:
        raise InvalidPrompt("tool_choice", "needs tools")
    match choice:
        case "required":
            return
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in {tool.function.name for tool in body.tools}:
                raise InvalidPrompt("tool_choice.function.name", "is none of the tools")
        case _:
            check_allowed_tools(choice)
            raise InvalidPrompt("tool_choice", "must be none, auto, required or a function")


def _check_content(body: ChatBody) -> None:
    for number, message in enumerate(body.messages):
        if message.content == [] and not message.tool_calls and message.role == "user":
            raise InvalidPrompt(f"messages.{number}.content", "is needed")


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    if not all(_TOKEN.fullmatch(token) for token in bias):
        raise InvalidPrompt("logit_bias", "has keys that are no token ids")
    return {int(token): weight for token, weight in bias.items()}
