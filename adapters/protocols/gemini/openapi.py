"""
Google's subset of OpenAPI, in which older callers write their schemas, as JSON Schema.

Source: https://ai.google.dev/api/caching#Schema
"""

from __future__ import annotations

from typing import Any

import msgspec

#: Fields whose numbers Google writes as text, too.
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
#: Fields that hold a schema, a list of schemas, and schemas by name.
_SCHEMA, _SCHEMAS, _NAMED = frozenset({"items", "additionalProperties"}), frozenset({"anyOf", "any_of"}), "properties"
_CAMEL = {
    "any_of": "anyOf",
    "max_items": "maxItems",
    "min_items": "minItems",
    "max_length": "maxLength",
    "min_length": "minLength",
    "max_properties": "maxProperties",
    "min_properties": "minProperties",
}


def to_json_schema(raw: msgspec.Raw) -> msgspec.Raw:
    """What is no object stays as it is; whoever takes it as a schema will refuse it."""
    return msgspec.Raw(msgspec.json.encode(_converted(msgspec.json.decode(raw))))


def _converted(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for written, value in schema.items():
        name = str(_CAMEL.get(written, written))
        if name == "type" and isinstance(value, str):
            if value.upper() != "TYPE_UNSPECIFIED":
                converted[name] = value.lower()
        elif name in _COUNTS and isinstance(value, str) and value.isdecimal():
            converted[name] = int(value)
        elif name in _SCHEMA:
            converted[name] = _converted(value)
        elif name in _SCHEMAS and isinstance(value, list):
            converted[name] = [_converted(inner) for inner in value]
        elif name == _NAMED and isinstance(value, dict):
            converted[name] = {key: _converted(inner) for key, inner in value.items()}
        elif name not in {"nullable", "propertyOrdering", "property_ordering", "example"}:
            converted[name] = value
    if schema.get("nullable") is True and isinstance(kind := converted.get("type"), str):
        converted["type"] = [kind, "null"]
        if isinstance(converted.get("enum"), list) and None not in converted["enum"]:
            converted["enum"] = [*converted["enum"], None]
    return converted
