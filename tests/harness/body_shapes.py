"""Bodies of the largest accepted size, each of a shape that is expensive to parse."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

BODY_BYTES = 8 * 1024 * 1024 - 4096
"""The default limit of a gateway, and the size of a record."""


class BodyShape(NamedTuple):
    """One body. `kind`: chat, completion or tokens; `body`: JSON of an object."""

    name: str
    kind: str
    body: bytes


def body_shape(name: str, model: str) -> BodyShape:
    """The body of one of SHAPE_NAMES, for a model."""
    kind, make = _SHAPES[name]
    head = b'"model":"%s",' % model.encode()
    return BodyShape(name, kind, b"{" + head + make(BODY_BYTES - len(head) - 300) + b"}")


def _chat(content: bytes) -> bytes:
    return b'"messages":[{"role":"user","content":%s}]' % content


_CHAT_CHUNK = _chat(b'"a"')


def _list(item: bytes, before: bytes, after: bytes = b"]") -> Callable[[int], bytes]:
    """As many copies of an item as fit."""
    return lambda size: before + b",".join([item] * (size // (len(item) + 1))) + after


def _some(item: bytes, count: int, before: bytes, after: bytes = b"]") -> Callable[[int], bytes]:
    """A fixed, accepted number of copies of an item."""
    return lambda _: before + b",".join([item] * count) + after


def _text(
    piece: bytes, before: bytes = b'"prompt":"', after: bytes = b'"'
) -> Callable[[int], bytes]:
    return lambda size: before + piece * (size // len(piece)) + after


def _keys(before: bytes, item: bytes, after: bytes, most: int = 10**9) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        count = min(most, size // (len(item) + 8))
        return before + b",".join(item % number for number in range(count)) + after

    return make


_NVEXT = b'"prompt":"a","nvext":{'
_MESSAGE = b'{"role":"u","content":"a"}'
_PART = b'{"type":"text","text":""}'
_CALL = b'{"function":{"name":""}}'
_TOOL = b'{"type":"function","function":{"name":"a"}}'

_SHAPES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "messages": ("chat", _list(_MESSAGE, b'"messages":[')),
    "10 000 messages": ("chat", _some(_MESSAGE, 10_000, b'"messages":[')),
    "messages that are numbers": ("chat", _list(b"1", b'"messages":[')),
    "empty parts of a message": ("chat", _list(_PART, _chat(b"[")[:-2], b"]}]")),
    "9 900 parts of a message": ("chat", _some(_PART, 9_900, _chat(b"[")[:-2], b"]}]")),
    "tool calls": ("chat", _list(_CALL, _chat(b'"a","tool_calls":[')[:-2], b"]}]")),
    "arguments of a tool call": (
        "chat",
        _text(
            b"{},",
            _chat(b'"a","tool_calls":[{"function":{"name":"f","arguments":"[')[:-2],
            b'{}]"}}]}]',
        ),
    ),
    "tools": ("chat", _list(_TOOL, _CHAT_CHUNK + b',"tools":[')),
    "documents of numbers": (
        "chat",
        _some(b"1.5", 130_000, _CHAT_CHUNK + b',"documents":[{"a":[', b"]}]"),
    ),
    "logit_bias": ("completion", _keys(b'"prompt":"a","logit_bias":{', b'"%06d":1', b"}")),
    "8 192 wrong biases": (
        "completion",
        _keys(b'"prompt":"a","logit_bias":{', b'"%06d":999', b"}", 8192),
    ),
    "one key of logit_bias": (
        "completion",
        _text(b"S", b'"prompt":"a","logit_bias":{"', b'":999}'),
    ),
    "unknown keys": ("completion", _keys(b'"prompt":"a","x":{', b'"%06d":1', b"}")),
    "65 000 unknown keys": ("completion", _keys(b'"prompt":"a","x":{', b'"%06d":1', b"}", 65_000)),
    "stop_token_ids": ("completion", _list(b"1", b'"prompt":"a","stop_token_ids":[')),
    "allowed_token_ids": ("completion", _list(b"100000", b'"prompt":"a","allowed_token_ids":[')),
    "allowed_worker_ids": ("completion", _list(b"1", _NVEXT + b'"allowed_worker_ids":[', b"]}")),
    "block_mm_infos": (
        "completion",
        _list(
            b"{}", _NVEXT + b'"mm_routing_info":{"routing_token_ids":[1],"block_mm_infos":[', b"]}}"
        ),
    ),
    "65 000 block_mm_infos": (
        "completion",
        _some(
            b"{}",
            65_000,
            _NVEXT + b'"mm_routing_info":{"routing_token_ids":[1],"block_mm_infos":[',
            b"]}}",
        ),
    ),
    "prompt of tokens": ("completion", _list(b"1", b'"prompt":[')),
    "500 000 tokens": ("completion", _some(b"100000", 500_000, b'"prompt":[')),
    "500 000 wrong tokens": ("tokens", _some(b"100000", 500_000, b'"token_ids":[', b",-1]")),
    "prompts": ("completion", _list(b'"a"', b'"prompt":[')),
    "numbers of 4 000 digits": ("completion", _list(b"9" * 4000, b'"prompt":"a","x":[')),
    "one number": ("completion", _text(b"9", b'"prompt":"a","x":', b"")),
    "floats": ("completion", _list(b"1.5", b'"prompt":"a","x":[')),
    "nested lists": ("completion", _text(b"[", b'"prompt":"a","x":', b"")),
    "nested objects": ("completion", _text(b'{"a":', b'"prompt":"a","x":', b"1")),
    "spaces": ("completion", _text(b" ", b'"prompt":"a"', b"")),
    "one text": ("completion", _text(b"hello world ")),
    "one text of a chat": ("chat", _text(b"hello world ", _chat(b'"')[:-2], b'"}]')),
    "a text without spaces": ("completion", _text(b"a")),
    "a text of commas": ("completion", _text(b",")),
    "a text of escapes": ("completion", _text(b"\\n")),
    "a text of escaped quotes": ("completion", _text(b'\\"')),
    "a text of backslashes": ("completion", _text(b"\\\\")),
    "a text of \\u": ("completion", _text(b"\\u00e9")),
    "a text of UTF-8": ("completion", _text("漢字".encode())),
    "a text of half added tokens": ("completion", _text(b"<|user")),
    "a text of added tokens": ("completion", _text(b"<|user|>")),
    "a chat of added tokens": ("chat", _text(b"<|user|>", _chat(b'"')[:-2], b'"}]')),
    "JSON in a text": ("completion", _text(b'{\\"a\\":[1,2]},')),
    "a schema in a text": ("completion", _text(b"{},", b'"prompt":"a","guided_json":"[', b'{}]"')),
    "a schema": ("completion", _keys(b'"prompt":"a","guided_json":{', b'"%06d":{}', b"}")),
    "a grammar": ("completion", _text(b"()", b'"prompt":"a","guided_grammar":"')),
    "prompt_embeds": ("completion", _text(b"AAAA", b'"prompt":"a","prompt_embeds":"')),
    "128 answers": ("completion", _text(b"AAAA", b'"prompt":"a","n":128,"prompt_embeds":"')),
    "128 answers with an echo": ("completion", _text(b"    ", b'"n":128,"echo":true,"prompt":"')),
    "extra_args": ("completion", _keys(_NVEXT + b'"extra_args":{', b'"%06d":{}', b"}}")),
}

SHAPE_NAMES = tuple(_SHAPES)
