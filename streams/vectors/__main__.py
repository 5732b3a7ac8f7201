"""Write the JSON files beside this module: `python -m streams.vectors [DIRECTORY]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streams.codecs import encode
from streams.topics import partition_of
from streams.vectors.cases import REQUEST, WRITTEN, Case, Line
from streams.vectors.strays import stray

HERE = Path(__file__).parent
STRAYS = 32
LANES = (1, 3, 16, 32)
UUID = "018f2d3c-0000-7000-8000-000000000001"
KEYS = (REQUEST, UUID, "a", "ab", "abc", "abcd", "grüße", "请求", "")


def files() -> dict[str, str]:
    """What the files hold, by name."""
    cases = WRITTEN | {"strays": tuple(stray(seed) for seed in range(STRAYS))}
    streams = {f"{name}.json": _render(map(_vector, drawn)) for name, drawn in cases.items()}
    lanes = _render({"key": key, "partitions": _partitions(key)} for key in KEYS)
    return streams | {"lanes.json": lanes}


def _vector(case: Case) -> dict[str, Any]:
    return case._asdict() | {"log": [_json(line) for line in case.log]}


def _json(line: Line) -> Any:
    """The record as it stands on the wire."""
    value = encode(line, line.id).value
    assert value is not None, "a line of the log is never a tombstone"
    return json.loads(value)


def _partitions(key: str) -> dict[str, int]:
    return {str(lanes): partition_of(key.encode(), lanes) for lanes in LANES}


def _render(vectors: Iterable[dict[str, Any]]) -> str:
    """JSON with one line for every record and every field, so that changes can be read."""
    return "[\n" + ",\n".join(map(_object, vectors)) + "\n]\n"


def _object(vector: dict[str, Any]) -> str:
    fields = (f"    {_dump(name)}: {_value(name, value)}" for name, value in vector.items())
    return "  {\n" + ",\n".join(fields) + "\n  }"


def _value(name: str, value: Any) -> str:
    if name != "log" or not value:
        return _dump(value)
    return "[\n" + ",\n".join(f"      {_dump(record)}" for record in value) + "\n    ]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main(directory: Path) -> None:
    """Write all files into `directory`."""
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
