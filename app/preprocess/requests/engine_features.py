"""Refusal of requests for features that the engines of their model would ignore.

Pure. Forwarded bodies are checked by their server.
"""

from __future__ import annotations

from collections.abc import Collection

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.guided_decoding import guided_field
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.passthrough import PassthroughRequest
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.records import GUIDED_DECODING_FEATURE, LOGPROBS_FEATURE


def unsupported_features(fleet: Fleet, model: str) -> frozenset[str]:
    """The features that one or more of a model's workers lack; a request may go to any of them."""
    members = (member.card for _, member in fleet.live_members())
    return frozenset(
        name for card in members if card.model == model for name in card.config.unsupported
    )


def check_supported(
    request: OpenAIRequest | PassthroughRequest, unsupported: Collection[str]
) -> None:
    """Raises InvalidPrompt that names the first field that asks for such a feature."""
    if isinstance(request, PassthroughRequest):
        return
    if request.tool_choice not in ("none", "auto"):
        raise InvalidPrompt(
            "tool_choice", "this model answers in text, a call cannot be enforced: use auto or none"
        )
    if GUIDED_DECODING_FEATURE in unsupported and (field := guided_field(request.body)):
        raise InvalidPrompt(field, "the engine of this model cannot enforce the form of an answer")
    if LOGPROBS_FEATURE in unsupported:
        given = {
            "logprobs": request.body.top_logprobs_count(),
            "prompt_logprobs": request.body.prompt_logprobs,
        }
        for name, wanted in given.items():
            if wanted is not None:
                raise InvalidPrompt(name, "the engine of this model gives no log probabilities")
