"""
Types as JSON schemas, for the document of the API.

Only types that a body or a parameter is really read into, or made as, are described, so that what is told of a field is
what holds for it. msgspec's own generator stops at a raw field that may be absent, and the wire formats have many.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import inspect

_WIRE: Final = re.compile(r"^adapters\.protocols\.(?P<protocol>\w+)\.")


class Schemas:
    """Collects the components of one document."""

    def __init__(self) -> None:
        self._names: dict[type, str] = {}
        self.components: dict[str, dict[str, Any]] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type; what has a name becomes a component, and is referred to."""
        if isinstance(kind, types.UnionType):
            # Of several objects, which nothing tells apart but what is in them: msgspec takes none of the kind.
            return {"anyOf": [self.of(one) for one in kind.__args__]}
        return self._schema(inspect.type_info(kind))

    def fields_of(self, kind: type) -> dict[str, dict[str, Any]]:
        """The schemas of a struct's fields, by name."""
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        return self._properties(info.fields)

    def _schema(self, kind: inspect.Type) -> dict[str, Any]:
        match kind:
            case inspect.Metadata():
                return self._schema(kind.type) | (kind.extra_json_schema or {})
            case inspect.NoneType():
                return {"type": "null"}
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.IntType():
                return {"type": "integer", **_bounds(kind)}
            case inspect.FloatType():
                return {"type": "number", **_bounds(kind)}
            case inspect.StrType():
                return {"type": "string", **_lengths(kind), **_given(pattern=kind.pattern)}
            case inspect.BytesType():
                return {"type": "string", "format": "binary"}
            case inspect.DecimalType():
                return {"type": "string", "format": "decimal"}
            case inspect.UUIDType():
                return {"type": "string", "format": "uuid"}
            case inspect.DateTimeType():
                return {"type": "string", "format": "date-time"}
            case inspect.DateType():
                return {"type": "string", "format": "date"}
            case inspect.LiteralType():
                return {"enum": list(kind.values)}
            case inspect.EnumType():
                return {"enum": [_value(member) for member in kind.cls]}
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
                return {"type": "array", "items": self._schema(kind.item_type), **_lengths(kind, "Items")}
            case inspect.DictType():
                return self._mapping(kind)
            case inspect.UnionType():
                return {"anyOf": [self._schema(one) for one in kind.types]}
            case inspect.StructType() | inspect.TypedDictType():
                return self._reference(kind)
            case inspect.AnyType() | inspect.RawType():
                return {}
            case _:
                raise TypeError(f"no schema is known for {type(kind).__name__}")

    def _mapping(self, kind: inspect.DictType) -> dict[str, Any]:
        names = {name: value for name, value in self._schema(kind.key_type).items() if name != "type"}
        return {
            "type": "object",
            "additionalProperties": self._schema(kind.value_type),
            **({"propertyNames": names} if names else {}),
            **_lengths(kind, "Properties"),
        }

    def _reference(self, kind: inspect.StructType | inspect.TypedDictType) -> dict[str, Any]:
        name = self._names.get(kind.cls)
        if name is None:
            name = self._names[kind.cls] = self._name(kind.cls)
            self.components[name] = {}
            self.components[name] = self._object(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def _object(self, kind: inspect.StructType | inspect.TypedDictType) -> dict[str, Any]:
        required = [field.encode_name for field in kind.fields if field.required]
        told = (kind.cls.__doc__ or "").strip()
        closed = isinstance(kind, inspect.StructType) and kind.forbid_unknown_fields
        return {
            "type": "object",
            **({"description": " ".join(told.split())} if told and not told.startswith(kind.cls.__name__) else {}),
            "properties": self._properties(kind.fields),
            **({"required": required} if required else {}),
            **({"additionalProperties": False} if closed else {}),
        }

    def _properties(self, fields: Iterable[inspect.Field]) -> dict[str, dict[str, Any]]:
        return {field.encode_name: self._schema(field.type) | _default(field) for field in fields}

    def _name(self, cls: type) -> str:
        wire = _WIRE.match(cls.__module__)
        name = cls.__name__.strip("_")
        if wire is not None:
            name = "".join(word.title() for word in wire["protocol"].split("_")) + name
        if name in self.components:
            name = cls.__module__.rpartition(".")[2].title() + name
        assert name not in self.components, f"two types are called {name}"
        return name


def _default(field: inspect.Field) -> dict[str, Any]:
    """What holds where it is left out. None says only that it may be."""
    if isinstance(field.default, bool | int | float | str) and not isinstance(field.default, enum.Enum):
        return {"default": field.default}
    return {}


def _value(member: enum.Enum) -> Any:
    return member.value


def _bounds(kind: inspect.IntType | inspect.FloatType) -> Mapping[str, Any]:
    return _given(minimum=kind.ge, maximum=kind.le, exclusiveMinimum=kind.gt, exclusiveMaximum=kind.lt)


def _lengths(kind: Any, of: str = "Length") -> Mapping[str, Any]:
    return _given(**{f"min{of}": kind.min_length, f"max{of}": kind.max_length})


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}
