"""Token of a SASL login, in a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiokafka.abc import AbstractTokenProvider


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka is untyped
    """The bearer token from a file (UTF-8, trimmed), read at every connection attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """The current token. Raises OSError if the file cannot be read."""
        return (await asyncio.to_thread(self._path.read_text, "utf-8")).strip()
