"""Replaced attributes of real modules and classes, by the process whose rules they disable."""

from __future__ import annotations

from typing import Any

Replacement = tuple[object, str, Any]
"""The owner of an attribute, its name, and the replacement."""
