"""Media that an engine would fetch for a client: refused, except from hosts of the operator's list.

Any URL would give clients a way into the operator's network. Media within the body is no fetch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvlane.app.engine.interface import InvalidRequest

ALL_HOSTS = "*"

_FIELDS = frozenset({"audio", "image", "images", "input_image", "uri", "url", "video"})
"""Names of fields with media, in addition to those that end with _url."""
_TEXTS = frozenset({"content", "name", "text"})
"""Names of fields whose strings are text."""
_CALLS = frozenset({"function_call", "tool_calls"})
"""Fields of messages without media: what the model wrote is text."""
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s_-]*")
_ODD = re.compile(r"[\\@\s\x00-\x1f]")
"""Characters that two parsers of a URL may read in two ways."""


def refuse_media(body: Mapping[str, Any], hosts: Collection[str]) -> None:
    """Raises InvalidRequest for media in an OpenAI body that the server would fetch."""
    for field in ("messages", "input"):
        for path, url in _urls(body.get(field), field):
            check_url(url, path, hosts)


def check_url(url: str, field: str, hosts: Collection[str]) -> None:
    """Raises InvalidRequest unless it may be fetched, or is no address at all."""
    if url[:5].lower() == "data:" or ALL_HOSTS in hosts:
        return
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and _ODD.search(url) is None
        host = parts.hostname if is_web else None
    except ValueError:
        host = None
    if host is None or host not in {name.lower() for name in hosts}:
        raise InvalidRequest(
            f"{field}: a URL to fetch is not allowed for this model; send the data itself "
            "(data:image/png;base64,…)"
        )


def _urls(value: Any, path: str) -> Iterator[tuple[str, str]]:
    stack: list[tuple[Any, str, bool]] = [(value, path, False)]
    while stack:
        one, at, is_media = stack.pop()
        if isinstance(one, list):
            stack += [(item, f"{at}.{n}", is_media) for n, item in enumerate(one)]
        elif isinstance(one, dict):
            for name, item in one.items():
                if name in _CALLS:
                    continue
                named = name in _FIELDS or name.endswith("_url")
                inner = named or (is_media and name not in _TEXTS)
                stack.append((item, f"{at}.{name}"[:200], inner))
        elif is_media and isinstance(one, str) and one and not _is_data(one, at):
            yield at, one


def _is_data(text: str, path: str) -> bool:
    """Whether it is base64 in a field that is not named as a URL."""
    is_named_url = path.rpartition(".")[2].endswith(("url", "uri"))
    return not is_named_url and not text.startswith("/") and _BASE64.fullmatch(text) is not None
