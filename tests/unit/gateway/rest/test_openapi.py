"""The document of the API, made of endpoints: what is in it, and the schemas of the types in it."""

from __future__ import annotations

import enum
import json
import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired

import jsonschema
import msgspec
import openapi_spec_validator
import pytest
from msgspec import UNSET, UnsetType
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.errors import STATUS, Code
from gateway.jobs.settings import JobsSettings
from gateway.jobs.submission import JobFields
from gateway.rest import (
    batches,
    chat,
    counting,
    embeddings,
    files,
    jobs,
    keys,
    message_batches,
    models,
    openapi,
    operators,
    responses,
    usage,
)
from gateway.rest.endpoint import Access, Endpoint
from gateway.rest.fields import BY_NAME, FIELDS, Refused
from gateway.rest.operation import Content, Operation
from gateway.rest.schemas import Schemas


class _Nobody:
    """Stands for what the handlers would ask, were they called."""

    def __getattr__(self, name: str) -> None:
        return None


NOBODY: Any = _Nobody()
ENDPOINTS = [
    *chat.routes(line=NOBODY, settings=NOBODY, in_background=NOBODY),
    *responses.Responses(store=NOBODY, intake=NOBODY, watch=NOBODY, runner=NOBODY).routes(),
    *embeddings.routes(line=NOBODY),
    *counting.routes(line=NOBODY),
    *models.routes(catalogue=NOBODY, allowed=NOBODY),
    *operators.routes(readiness=NOBODY, groups=NOBODY),
    *usage.routes(usage=NOBODY),
    *jobs.routes(
        store=NOBODY, intake=NOBODY, watch=NOBODY, runner=NOBODY, waits=NOBODY, costs=NOBODY, settings=JobsSettings()
    ),
    *files.routes(store=NOBODY, settings=JobsSettings()),
    *batches.routes(batches=NOBODY, may_be_told=NOBODY),
    *message_batches.routes(batches=NOBODY, may_be_told=NOBODY, settings=JobsSettings()),
    *keys.routes(keys=NOBODY),
]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.document(openapi.routes(ENDPOINTS))))
    return made


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]


def test_the_document_is_openapi_and_has_every_endpoint_and_no_other(document):
    openapi_spec_validator.validate(document)
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(endpoint.method, endpoint.path) for endpoint in openapi.routes(ENDPOINTS)}
    names = [operation["operationId"] for operation in operations(document)]
    assert len(set(names)) == len(names)


def test_every_endpoint_of_ours_says_what_it_is_and_what_it_answers():
    for endpoint in openapi.routes(ENDPOINTS):
        assert endpoint.told.summary, endpoint.path
        assert all(content.type is not Any for content in endpoint.told.gives), endpoint.path


def test_who_may_use_an_operation_is_told_as_it_is(document):
    for endpoint in openapi.routes(ENDPOINTS):
        told = document["paths"][endpoint.path][endpoint.method.lower()]["security"]
        if endpoint.access is Access.PUBLIC:
            assert told == []
        else:
            scopes = [endpoint.access.value] if isinstance(endpoint.access, Scope) else []
            assert told == [{"bearer": scopes}, {"x_api_key": scopes}, {"api_key": scopes}]


def test_an_endpoint_of_which_nothing_is_said_is_in_it_all_the_same():
    endpoint = Endpoint(method="GET", path="/v1/new/{id}", access=Scope.CHAT, handler=NOBODY)
    made = openapi.document([endpoint])
    openapi_spec_validator.validate(msgspec.to_builtins(made))
    assert set(made["paths"]["/v1/new/{id}"]["get"]["responses"]) >= {"200", "400", "401", "403", "404", "500"}


def test_every_code_that_an_endpoint_names_is_told_under_its_status():
    told = Operation(errors=frozenset({Code.OWNER_FENCE}), gives=(Content(type=str),))
    made = openapi.document([Endpoint(method="GET", path="/x", access=Access.ANY_KEY, handler=NOBODY, told=told)])
    status = str(STATUS[Code.OWNER_FENCE].http)
    name = made["paths"]["/x"]["get"]["responses"][status]["$ref"].rpartition("/")[2]
    assert "`owner_fence`" in made["components"]["responses"][name]["description"]


def test_links_name_operations_and_parameters_that_there_are(document):
    by_name = {operation["operationId"]: operation for operation in operations(document)}
    links = [
        link
        for operation in operations(document)
        for response in operation["responses"].values()
        for link in response.get("links", {}).values()
    ]
    assert links
    for link in links:
        there = {parameter.get("name") for parameter in by_name[link["operationId"]]["parameters"]}
        assert set(link["parameters"]) <= there


def test_a_submitted_job_is_told_with_every_field_that_is_taken_and_no_other(document):
    told = document["components"]["schemas"]["NewJob"]
    assert set(told["properties"]) == {*BY_NAME, *JobFields.__struct_fields__}
    assert told["additionalProperties"] is False


def values_of(name: str) -> list[Any]:
    """Of a caller field: some that are good by the type that is told of it, and some that are not."""
    text = "a" * 256
    return [None, True, 0, 1, -1, 2**63, 1.5, "", "a", "0.25", "1e5", text, text + "a", "a\nb", [], ["a"], [""], [1],
            ["a"] * 64, ["a"] * 65, {}, {"a": "b"}, {"": "b"}, {"a": 1}, {"a" * 65: ""}, "batch", "never", "cost",
            "drop", 86_400, 86_401, 10**12]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_what_is_told_of_a_caller_field_is_what_is_taken(field):
    schemas = Schemas()
    schema = schemas.of(field.kind)
    for value in values_of(field.name):
        exact = Decimal(str(value)) if isinstance(value, float) else value
        try:
            field.read(exact)
        except Refused:
            taken = False
        else:
            taken = True
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == taken, value


# ------------------------------------------------------------------ the schemas


class Colour(enum.StrEnum):
    RED = "red"


class Inner(msgspec.Struct):
    raw: msgspec.Raw = msgspec.Raw()


class Told(TypedDict):
    """A thing."""

    here: int
    not_always: NotRequired[str]


class Everything(msgspec.Struct, forbid_unknown_fields=True):
    yes: bool
    number: Annotated[int, msgspec.Meta(ge=1, le=9)]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=2, pattern="^a")]
    colour: Colour
    word: Literal["x"]
    amount: Decimal
    inner: Inner
    many: tuple[Inner, ...]
    by_name: dict[str, int]
    told: Told
    at: datetime | None = None
    day: date | UnsetType = UNSET
    id: uuid.UUID | None = None
    ratio: float = 0.5
    named: str = msgspec.field(default="a", name="else-where")


def test_a_type_is_told_with_all_that_it_says():
    schemas = Schemas()
    assert schemas.of(Everything | Told) == {
        "anyOf": [{"$ref": "#/components/schemas/Everything"}, {"$ref": "#/components/schemas/Told"}]
    }
    assert schemas.components["Told"] == {
        "type": "object",
        "description": "A thing.",
        "properties": {"here": {"type": "integer"}, "not_always": {"type": "string"}},
        "required": ["here"],
    }
    assert schemas.components["Inner"] == {"type": "object", "properties": {"raw": {}}}
    made = schemas.components["Everything"]
    null = {"type": "null"}
    inner = {"$ref": "#/components/schemas/Inner"}
    assert json.loads(json.dumps(made)) == {
        "type": "object",
        "properties": {
            "yes": {"type": "boolean"},
            "number": {"type": "integer", "minimum": 1, "maximum": 9},
            "text": {"type": "string", "minLength": 1, "maxLength": 2, "pattern": "^a"},
            "colour": {"enum": ["red"]},
            "word": {"enum": ["x"]},
            "amount": {"type": "string", "format": "decimal"},
            "inner": inner,
            "many": {"type": "array", "items": inner},
            "by_name": {"type": "object", "additionalProperties": {"type": "integer"}},
            "told": {"$ref": "#/components/schemas/Told"},
            "at": {"anyOf": [{"type": "string", "format": "date-time"}, null]},
            "day": {"type": "string", "format": "date"},
            "id": {"anyOf": [{"type": "string", "format": "uuid"}, null]},
            "ratio": {"type": "number", "default": 0.5},
            "else-where": {"type": "string", "default": "a"},
        },
        "required": ["yes", "number", "text", "colour", "word", "amount", "inner", "many", "by_name", "told"],
        "additionalProperties": False,
    }


def test_two_types_of_one_name_are_two_components():
    one = msgspec.defstruct("Same", [("a", int)], module="here.first")
    other = msgspec.defstruct("Same", [("b", int)], module="here.second")
    schemas = Schemas()
    assert [schemas.of(one), schemas.of(other), schemas.of(one)] == [
        {"$ref": f"#/components/schemas/{name}"} for name in ("Same", "SecondSame", "Same")
    ]


def test_a_type_that_no_schema_is_known_for_is_said_so():
    with pytest.raises(TypeError, match="no schema is known"):
        Schemas().of(complex)
