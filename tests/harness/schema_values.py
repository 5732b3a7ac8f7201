"""Hypothesis strategies for values of an OpenAPI schema, for the part of JSON Schema in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
Values = st.SearchStrategy[Any]

MAX_EXTRA_ITEMS = 2
"""Items of an array, or optional fields of an object: with all of them, one is always refused."""
MAX_TEXT_LENGTH = 20

anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2)
)


def values_of_schema(schema: Schema, components: Schema) -> Values:
    """Values of a schema; `components`: the schemas that it refers to, by name."""
    if "$ref" in schema:
        return values_of_schema(components[schema["$ref"].rpartition("/")[2]], components)
    if "anyOf" in schema:
        return st.one_of([values_of_schema(each, components) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    make = _MAKERS.get(schema.get("type", ""))
    return anything if make is None else make(schema, components)


def _object(schema: Schema, components: Schema) -> Values:
    fields = {n: values_of_schema(s, components) for n, s in schema.get("properties", {}).items()}
    needed = {name: fields.pop(name) for name in schema.get("required", ()) if name in fields}
    most = min(MAX_EXTRA_ITEMS, len(fields))
    few = st.lists(st.sampled_from(sorted(fields) or [""]), max_size=most, unique=True)
    return few.flatmap(lambda some: st.fixed_dictionaries(needed | {n: fields[n] for n in some}))


def _array(schema: Schema, components: Schema) -> Values:
    least = schema.get("minItems", 0)
    most = min(schema.get("maxItems", least + MAX_EXTRA_ITEMS), least + MAX_EXTRA_ITEMS)
    return st.lists(
        values_of_schema(schema.get("items", {}), components), min_size=least, max_size=most
    )


def _string(schema: Schema, _: Schema) -> Values:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    longest = min(schema.get("maxLength", MAX_TEXT_LENGTH), MAX_TEXT_LENGTH)
    return st.text(min_size=schema.get("minLength", 0), max_size=longest)


def _integer(schema: Schema, _: Schema) -> Values:
    return st.integers(schema.get("minimum"), schema.get("maximum"))


def _number(schema: Schema, _: Schema) -> Values:
    return st.floats(
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
        allow_nan=False,
        allow_infinity=False,
    )


_MAKERS: Mapping[str, Callable[[Schema, Schema], Values]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda *_: st.booleans(),
    "null": lambda *_: st.none(),
}
