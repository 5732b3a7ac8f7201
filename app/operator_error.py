"""Errors that an operator corrects: reported with the correction, without a traceback."""

from __future__ import annotations

from kvlane.streams.errors import CorrectableError


class OperatorError(CorrectableError):
    """An error of the application that an operator has to correct."""


def install_hint(extra: str) -> str:
    """The command that installs an extra of this project, which no package index has yet."""
    return f"pip install -e '.[{extra}]' in the checkout of kvlane"
