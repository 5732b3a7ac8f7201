"""Search for a tag in text that arrives in pieces."""

from __future__ import annotations

from typing import NamedTuple


class TagSplit(NamedTuple):
    """`before`: text that precedes the tag, or cannot belong to it. `rest`: the text after the tag,
    or without `is_found` the text that may be its beginning."""

    before: str
    rest: str
    is_found: bool


def split_at_tag(text: str, tag: str) -> TagSplit:
    """Split a text at the first occurrence of a tag, or before its possible beginning at the end.

    The caller puts `rest` before the next piece of text. So the places of tags do not depend on the
    borders between pieces.
    """
    before, found, rest = text.partition(tag)
    if found:
        return TagSplit(before, rest, is_found=True)
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return TagSplit(text[:-length], text[-length:], is_found=False)
    return TagSplit(text, "", is_found=False)
