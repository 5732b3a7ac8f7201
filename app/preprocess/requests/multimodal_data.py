"""Images and the like of tokenised prompts, by type of part: URLs, or descriptors of decoded data.

    {"image_url": [{"Url": "https://…"}, {"RawUrl": "cat.png"}, {"Decoded": {…}}]}

The engine decides which of them it reads. Pure.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvlane.streams.request import MultimodalData

Media = dict[str, tuple[MultimodalData, ...]]


def parse_media(value: Any) -> Media:
    """Parse the object. Raises ValueError, msgspec.ValidationError."""
    items = msgspec.convert(value, dict[str, list[dict[str, Any]]])
    return {part: tuple(map(_item, listed)) for part, listed in items.items()}


def _item(item: dict[str, Any]) -> MultimodalData:
    """One of {"Url": …}, {"RawUrl": …}, {"Decoded": …}. A URL without a scheme is a raw one."""
    if len(item) != 1:
        raise ValueError("each item has one key, Url, RawUrl or Decoded")
    ((kind, value),) = item.items()
    if kind == "Decoded":
        return MultimodalData(kind="decoded", decoded=msgspec.json.encode(value))
    if kind not in ("Url", "RawUrl"):
        raise ValueError("an item is none of Url, RawUrl and Decoded")
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a string")  # noqa: TRY004 - its callers refuse values
    return MultimodalData(
        kind="url" if kind == "Url" and _has_scheme(value) else "raw_url", url=value
    )


def _has_scheme(url: str) -> bool:
    try:
        return bool(urlsplit(url).scheme)
    except ValueError:
        return False
