"""Malformed and unusual records for any topic, as a foreign client may publish them.

Random bytes, real types with wild fields, real records on topics of others, null and huge fields,
odd headers. Names are drawn from a few made-up ones, so that records refer to each other: a forged
worker beats, a forged request is assigned to it. None names a real worker, model or request, since
whoever may write valid records about those can do what a router does. None is marked for newer
readers, since readers are to stop at those.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from kvlane.streams import codecs, record_base
from kvlane.streams.ports import Entry
from kvlane.streams.topics import TOPICS

TYPES: tuple[type[msgspec.Struct], ...] = (*codecs._INNER, *codecs._PUBLIC)
NAMES = ("odd-1", "odd-2", "odd-3", "", "odd\n\x00", "odd/4", "ö" * 40)
NUMBERS = (0, 1, 2, 7, 16, -1, 255, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63))
REALS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
HEADER_NAMES = ("t", "epoch", "part", "snapshot", "traceparent", "", "reason", "odd name", "ö")
HUGE = 300_000


class Odd(NamedTuple):
    """A record and its destination; `partition` is modulo the number of partitions."""

    topic: str
    partition: int
    entry: Entry


class MalformedRecords:
    """An endless sequence of such records, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, topic: str | None = None) -> Odd:
        """The next record, for any topic or for the given one."""
        chance = self._random
        table = next((t for t in TOPICS if t.name == topic), None) or chance.choice(TOPICS)
        kind = chance.random()
        if kind < 0.45:  # a real record, mostly where it belongs
            known = [t for t in TYPES if t.__name__ in table.records]
            struct = chance.choice(known if known and chance.random() < 0.7 else TYPES)
            entry = self._forged(struct)
        elif kind < 0.6:
            name = chance.choice([t.__name__ for t in TYPES] + ["Prompt", "ArtifactPart", "Foo"])
            entry = Entry(self._key(table.name), self._bytes(), (("t", name.encode()),))
        elif kind < 0.7:
            entry = Entry(self._key(table.name), None, self._headers())
        elif kind < 0.8:
            entry = Entry(self._key(table.name), json.dumps(self._json(3)).encode(), ())
        else:
            entry = Entry(self._key(table.name), self._bytes(), self._headers())
        return Odd(table.name, chance.randrange(1 << 16), entry)

    def _forged(self, struct: type[msgspec.Struct]) -> Entry:
        """A record of this type with unusual but readable fields."""
        got = self._struct(inspect.type_info(struct))  # type: ignore[arg-type]
        public = issubclass(struct, record_base.PublicRecord)
        if public:
            got["t"] = struct.__name__
        encoder: Any = msgspec.json if public else msgspec.msgpack
        headers = (("t", struct.__name__.encode()),)
        if self._random.random() < 0.1:
            headers += self._headers()
        key = self._named(struct, got)
        return Entry(key, encoder.encode(got), headers)

    def _named(self, struct: type[msgspec.Struct], got: dict[str, Any]) -> bytes:
        name = str(got.get("id") or got.get("worker") or got.get("name") or "odd-1")
        prefix = {"WorkerCard": "worker/", "ModelCard": "model/"}.get(struct.__name__, "")
        if struct.__name__ == "SnapshotPointer":
            return f"snapshot/{self._random.choice(['index', 'odd'])}/{got['partition']}".encode()
        return (prefix + name).encode()

    def _key(self, topic: str) -> bytes | None:
        chance = self._random
        names = [b"odd-1", b"odd-2", b"", b"\xff\xfe", None, b"k" * 5000, b"odd\nid"]
        if topic == "registry":
            names += [b"worker/odd-1", b"model/odd-1", b"snapshot/index/0", b"skip/ledger/0/0"]
            names += [b"deployment"] if chance.random() < 0.3 else []
        return chance.choice(names)

    def _bytes(self) -> bytes:
        chance = self._random
        if chance.random() < 0.01:
            return chance.randbytes(HUGE)
        return chance.randbytes(chance.choice([0, 1, 2, 4, 8, 20, 200, 2000]))

    def _headers(self) -> tuple[tuple[str, bytes | None], ...]:
        chance = self._random
        values: list[bytes | None] = [
            None,
            b"",
            b"\xff",
            b"1",
            b"Request",
            b"Tombstone",
            b"9" * 400,
        ]
        if chance.random() < 0.01:
            values.append(bytes(HUGE))
        many = 300 if chance.random() < 0.01 else chance.randrange(4)
        return tuple((chance.choice(HEADER_NAMES), chance.choice(values)) for _ in range(many))

    def _json(self, depth: int) -> Any:
        chance = self._random
        if depth and chance.random() < 0.6:
            fields = ("id", "kind", "body", "messages", "prompt", "role", "content", "tenant")
            if chance.random() < 0.7:
                return {f: self._json(depth - 1) for f in fields if chance.random() < 0.4}
            return [self._json(depth - 1) for _ in range(chance.randrange(4))]
        return chance.choice([None, True, 0, -1, 2.5, "", "odd-1", "user", "chat", "tokens"])

    def _struct(self, info: Any) -> dict[str, Any]:
        chance = self._random
        return {
            field.encode_name: self._value(field.type)
            for field in info.fields
            if field.required or chance.random() < 0.6
        }

    def _value(self, kind: Any) -> Any:
        chance = self._random
        if isinstance(kind, inspect.UnionType):
            return self._value(chance.choice(kind.types))
        if isinstance(kind, inspect.StructType):
            got = self._struct(kind)
            return list(got.values()) if kind.array_like else got
        if isinstance(kind, inspect.TupleType):
            return [self._value(item) for item in kind.item_types]
        if isinstance(kind, inspect.VarTupleType | inspect.ListType | inspect.FrozenSetType):
            return [self._value(kind.item_type) for _ in range(chance.choice([0, 1, 2, 9]))]
        if isinstance(kind, inspect.DictType):
            pairs = range(chance.choice([0, 1, 3]))
            return {self._value(kind.key_type): self._value(kind.value_type) for _ in pairs}
        return self._plain(kind)

    def _plain(self, kind: Any) -> Any:
        values: dict[type, tuple[Any, ...]] = {
            inspect.IntType: NUMBERS,
            inspect.FloatType: REALS,
            inspect.BoolType: (True, False),
            inspect.StrType: NAMES,
            inspect.LiteralType: tuple(getattr(kind, "values", ())),
        }
        if isinstance(kind, inspect.BytesType):
            return self._bytes()
        return self._random.choice(values.get(type(kind), (None,)))
