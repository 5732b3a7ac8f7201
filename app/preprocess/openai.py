"""From the body of an OpenAI request to the Requests that it asks for. Pure: no I/O, no clock.

    fields, headers ──read──► Asked ──prompts──► texts and tokens ──requests──► Request …

`read` says what is wrong with a body, whatever the model; `Asked.prompts` renders the chat;
`Asked.requests` puts tokens, options and the model's card together. What lies between (tokenising)
is `app/preprocess/loaded.py`'s. Requests come without an id, one for each prompt; who publishes
them gives each of its `n` answers an id (`one_of_n`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ValidationError

from app.preprocess.bodies import (
    MOST_CHOICES,
    Body,
    ChatBody,
    CompletionBody,
    PassedBody,
    TokensBody,
)
from app.preprocess.errors import InvalidPrompt, invalid
from app.preprocess.guided import guided_of
from app.preprocess.nvext import (
    NvExt,
    context_of,
    extra_of,
    hints_of,
    mm_routing_of,
    override_of,
    targets_of,
    with_headers,
)
from app.preprocess.template import ChatTemplate
from streams.codecs import pack_tokens
from streams.records import (
    ModelCard,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
)

Kind = Literal["chat", "completion", "tokens"]
Prompt = str | Sequence[int]
"""A text, or the tokens of one."""

B = TypeVar("B", bound=BaseModel)

_I63 = 2**63 - 1
_TOKEN = re.compile(r"[0-9]{1,9}")
_BODIES: dict[Kind, type[Body]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "tokens": TokensBody,
}
_FIELDS: dict[type[Body], str] = {
    ChatBody: "messages",
    CompletionBody: "prompt",
    TokensBody: "token_ids",
}
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model has defaults of its own for."""


@dataclass(frozen=True)
class Wish:
    """What any body says of the answers that it asks for."""

    body: Body | PassedBody
    ext: NvExt

    @property
    def model(self) -> str:
        """The name of the model; "" if none was given."""
        return self.body.model

    @property
    def n(self) -> int:
        """How many answers to each prompt."""
        return self.body.n or 1

    @property
    def stream(self) -> bool:
        """Whether the answer is to be told while it is made."""
        return bool(self.body.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        options = self.body.stream_options
        return bool(options and options.include_usage)


@dataclass(frozen=True)
class Asked(Wish):
    """A body that is right in itself."""

    body: Body
    messages: Sequence[Mapping[str, Any]] = ()
    """Those of a chat as they came; the body has checked them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """What a chat's model may call, as it came; None as well when it must not."""

    @property
    def echo(self) -> bool:
        """Whether the prompt stands before the answer."""
        return isinstance(self.body, CompletionBody) and bool(self.body.echo)

    @property
    def tool_choice(self) -> Any:
        """none, auto, required, or a function by its name."""
        if not isinstance(self.body, ChatBody) or not self.body.tools:
            return "none"
        return self.body.tool_choice or "auto"

    @property
    def field(self) -> str:
        """The field that holds the prompt."""
        return _FIELDS[type(self.body)]

    @property
    def add_special_tokens(self) -> bool:
        """Whether text gets the tokens that the model wants around it; chats have written them."""
        if isinstance(self.body, CompletionBody):
            return self.body.add_special_tokens is not False
        return bool(self.ext.use_raw_prompt)

    def prompts(self, template: ChatTemplate | None) -> list[Prompt]:
        """The prompts, rendered but not tokenised; may take as long as the template is allowed.

        Raises InvalidPrompt.
        """
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
        return [
            template.render(
                self.messages,
                tools=self.tools,
                documents=self.body.documents,
                add_generation_prompt=self.body.add_generation_prompt is not False,
                variables=self.body.chat_template_kwargs,
            )
        ]

    def requests(self, prompts: Sequence[Sequence[int]], card: ModelCard) -> tuple[Request, ...]:
        """One Request for each prompt's tokens, without an id, a tenant and a deadline.

        Raises InvalidPrompt, for a prompt without tokens too.
        """
        body, ext = self.body, self.ext
        common = Request(
            id="",
            model=body.model,
            sampling=self._sampling(card),
            output=OutputOptions(
                logprobs=body.logprobs_wanted(),
                prompt_logprobs=body.prompt_logprobs,
                skip_special_tokens=body.skip_special_tokens,
                return_tokens_as_token_ids=body.return_tokens_as_token_ids,
            ),
            hints=hints_of(ext),
            eos_token_ids=card.eos_token_ids,
            mdc_sum=card.checksum or None,
            annotations=tuple(ext.annotations or ()),
            cache_salt=ext.cache_salt or body.cache_salt or "",
            router_config_override=override_of(ext),
            router=targets_of(ext),
            agent_context=context_of(ext),
            extra_args=extra_of(ext),
            mm_routing_info=mm_routing_of(ext),
            prompt_embeds=body.prompt_embeds,
            mm_processor_kwargs=None
            if body.mm_processor_kwargs is None
            else msgspec.json.encode(body.mm_processor_kwargs),
            request_timestamp_ms=ext.request_timestamp_ms,
        )
        return tuple(
            replace(common, token_ids=pack_tokens(tokens), stop=self._stop(len(tokens), card))
            for tokens in prompts
        )

    def _stop(self, prompt: int, card: ModelCard) -> StopConditions:
        body, context = self.body, card.context_length
        name, limit = body.limit()
        if not prompt:
            raise InvalidPrompt(self.field, "is empty")
        if context is not None and prompt >= context:
            raise InvalidPrompt(
                self.field,
                f"has {prompt} tokens and leaves none of the model's {context} for an answer",
            )
        if context is not None and prompt + (limit or 0) > context:
            raise InvalidPrompt(
                name,
                f"{limit} tokens after a prompt of {prompt} exceed the model's context of "
                f"{context}",
            )
        if limit is None and context is not None:
            limit = context - prompt
        if limit is not None and (body.min_tokens or 0) > limit:
            raise InvalidPrompt("min_tokens", f"exceeds the {limit} tokens an answer may have")
        return StopConditions(
            max_tokens=limit,
            min_tokens=body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            max_thinking_tokens=self.ext.max_thinking_tokens,
        )

    def _sampling(self, card: ModelCard) -> SamplingOptions:
        """What the request says, else what the model has as its default."""
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
        return SamplingOptions(
            **chosen,
            presence_penalty=presence,
            frequency_penalty=frequency,
            seed=body.seed,
            include_stop_str_in_output=body.include_stop_str_in_output,
            guided_decoding=guided_of(body),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            logit_bias=None if not bias else _bias(bias),
        )


def read(kind: Kind, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Asked:
    """What a body asks for. `headers`: by their names in lower case; they go before `nvext`.

    Raises InvalidPrompt that names the field or the header.
    """
    body = _valid(_BODIES[kind], fields)
    ext = with_headers(body.nvext or NvExt(), headers or {})
    prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    if prompts * (body.n or 1) > MOST_CHOICES:
        raise InvalidPrompt("n", f"{prompts} prompts with {body.n or 1} answers are too many")
    if body.best_of not in (None, body.n or 1):
        raise InvalidPrompt("best_of", "must be n: the best of more answers is not looked for")
    if body.stream_options is not None and not body.stream:
        raise InvalidPrompt("stream_options", "is for streams only")
    if not isinstance(body, ChatBody):
        return Asked(body, ext)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidPrompt("top_logprobs", "needs logprobs")
    _check_tool_choice(body)
    _check_content(body)
    tools = None if body.tool_choice == "none" else fields.get("tools")
    return Asked(body, ext, fields["messages"], tools or None)


def one_of_n(request: Request, number: int) -> Request:
    """The request for one of several answers: a seed must not draw the same one each time."""
    seed = request.sampling.seed
    if not number or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) & _I63))


def _valid(kind: type[B], fields: Mapping[str, Any]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        raise invalid(e) from None


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
            raise InvalidPrompt("tool_choice", "must be none, auto, required or a function")


def _check_content(body: ChatBody) -> None:
    for number, message in enumerate(body.messages):
        if not message.content and not message.tool_calls and message.role == "user":
            raise InvalidPrompt(f"messages.{number}.content", "is needed")


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    if not all(_TOKEN.fullmatch(token) for token in bias):
        raise InvalidPrompt("logit_bias", "has keys that are no token ids")
    return {int(token): weight for token, weight in bias.items()}
