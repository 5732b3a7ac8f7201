"""Root of the errors that an operator corrects: reported with advice, without a traceback."""

from __future__ import annotations


class OperatorError(Exception):
    """An error that an operator has to correct. The docstring of its class names the correction."""
