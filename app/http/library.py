"""The models that requests over HTTP can be made for, with their tokenizers and templates at hand.

Which models there are is `app/http/served.py`'s to say, how one is
loaded `app/preprocess/loader.py`'s; here the two meet, and what can go wrong gets its status.
"""

from __future__ import annotations

from http import HTTPStatus

from msgspec.structs import replace

from app.http.answers import Kind
from app.http.errors import RETRY_AFTER_S, ApiError, invalid, of_error
from app.http.served import Served, ServedModel
from app.preprocess.byte_model import ByteModel, Model
from app.preprocess.loader import Loader
from app.preprocess.models import misfit
from streams.errors import StreamError
from streams.records import ModelCard


class Library:
    """The models of one gateway."""

    def __init__(self, served: Served, loader: Loader) -> None:
        self._served = served
        self._loader = loader

    def refresh(self) -> None:
        """Begin to load what is served and new; forget what is not served any more."""
        self._loader.keep(card for m in self._served.models() if (card := _files(m)))

    async def model(self, kind: Kind, name: str) -> Model:
        """The model of a request. Raises ApiError, BadModel."""
        if not name:
            raise invalid("model: is needed", "model")
        served = self._served.model(name)
        if wrong := misfit(self._served.kind(name), kind):
            raise invalid(f"model: {wrong}", "model", code="model_not_supported")
        card = _files(served)
        if card is None:
            return ByteModel(served.name, served.context_length)
        try:
            return await self._loader.model(card)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the model is still being loaded",
                code="model_unavailable",
                param="model",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except StreamError as e:
            raise of_error(e) from e


def _files(served: ServedModel) -> ModelCard | None:
    """The card of a model that has files. Its context is that of its workers, if it names none."""
    card = served.card
    if card is None or card.tokenizer is None:
        return None
    if card.context_length is None and served.context_length is not None:
        return replace(card, context_length=served.context_length)
    return card
