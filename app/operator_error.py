"""Errors that an operator corrects: reported with the correction, without a traceback."""

from __future__ import annotations


class OperatorError(Exception):
    """An error that an operator has to correct.

    `correction`: what the operator has to do, one or two sentences. That of the class holds unless
    the error has one of its own; "" where the message says everything.
    """

    correction: str = ""

    def __init__(self, message: str = "", *, correction: str = "") -> None:
        super().__init__(message)
        if correction:
            self.correction = correction


def install_hint(extra: str) -> str:
    """The command that installs an extra of this project, which no package index has yet."""
    return f"pip install -e '.[{extra}]' in the checkout of kvlane"
