from __future__ import annotations

import math
import re
from typing import Any

import pytest

from adapters.simulator.schema import Clues, Unsatisfiable, instance

CLUES = Clues.of("Please book a table for 4 at Café Luna in New York on March 3, priority high.")


def holds(value: Any, schema: Any, root: Any) -> bool:
    """A checker for the keywords used here, written apart from what it checks."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target[step] if step else target
        return holds(value, target, root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_a = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": is_number,
        "integer": is_number and float(value).is_integer(),
    }
    checks = [not kinds or any(is_a[kind] for kind in kinds)]
    checks += [value == schema["const"]] if "const" in schema else []
    checks += [value in schema["enum"]] if "enum" in schema else []
    for union in ("anyOf", "oneOf"):
        checks += [any(holds(value, one, root) for one in schema[union])] if union in schema else []
    checks += [holds(value, one, root) for one in schema.get("allOf", [])]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        checks += [name in value for name in schema.get("required", [])]
        checks += [holds(value[name], inner, root) for name, inner in properties.items() if name in value]
        other = schema.get("additionalProperties", True)
        checks += [holds(value[name], other, root) for name in value if name not in properties]
        checks += [len(value) >= schema.get("minProperties", 0)]
    if isinstance(value, list):
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)]
        prefix = schema.get("prefixItems", [])
        checks += [holds(one, inner, root) for one, inner in zip(value, prefix, strict=False)]
        checks += [holds(one, schema.get("items", True), root) for one in value[len(prefix) :]]
        checks += [all(value.count(one) == 1 for one in value)] if schema.get("uniqueItems") else []
    if isinstance(value, str):
        checks += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)]
        checks += [re.search(schema["pattern"], value) is not None] if "pattern" in schema else []
    if is_number:
        checks += [schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)]
        checks += [schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)]
        checks += [value % schema["multipleOf"] == 0] if "multipleOf" in schema else []
    return all(checks)


SCHEMAS: dict[str, Any] = {
    "empty": {},
    "nothing said of the type": {"properties": {"a": {"minimum": 3}}, "required": ["a", "b"]},
    "const": {"const": {"a": [1, None]}},
    "enumeration": {"enum": ["low", "high"]},
    "nullable": {"type": ["null", "integer"]},
    "strict object": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "people": {"type": "integer", "minimum": 1},
            "paid": {"type": "boolean"},
        },
        "required": ["place", "people", "paid"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "minItems": 3,
                "items": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            }
        },
        "required": ["steps"],
    },
    "numbers": {
        "type": "array",
        "minItems": 4,
        "prefixItems": [
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
            {"type": "number", "minimum": -2.5, "maximum": -1.5},
            {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        ],
    },
    "lengths": {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 40}, "b": {"type": "string", "maxLength": 3}},
    },
    "formats": {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 1},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
    "unique": {"type": "array", "items": {"type": "string"}, "minItems": 3, "uniqueItems": True},
    "any of": {
        "anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]
    },
    "one of with a dead end": {"oneOf": [False, {"type": "integer", "minimum": 9}]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["name", "children", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_value_satisfies_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    value = instance(schema, CLUES)
    assert holds(value, schema, schema), value
    assert instance(schema, CLUES) == value


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"$ref": "#/$defs/absent"},
        {"$ref": "#"},
        {"type": "array", "minItems": 3, "uniqueItems": True, "items": {"const": 1}},
        {"enum": []},
    ],
    ids=repr,
)
def test_what_cannot_be_satisfied_is_said_so(schema: Any) -> None:
    with pytest.raises(Unsatisfiable):
        instance(schema, CLUES)


def test_values_come_from_the_prompt() -> None:
    schema = {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "people": {"type": "integer", "minimum": 4},
            "priority": {"enum": ["low", "high"]},
        },
    }
    assert instance(schema, CLUES) == {"place": "Café Luna", "people": 4, "priority": "high"}
