from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from admission.lease import Class
from gateway.call import Options, Resend
from gateway.errors import Code, InvalidRequest
from gateway.rest.fields import FIELDS, options_from_headers, options_from_json
from protos.tollbridge.v1 import gateway_pb2

#: Below are the chat's own fields. Numbers are for ever.
FIRST_CALLER_FIELD = 30


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def raw(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, msgspec.Raw])


def test_the_protos_the_options_and_the_table_name_the_same_fields():
    protos = {
        field.name
        for field in gateway_pb2.CompletionRequest.DESCRIPTOR.fields
        if field.number >= FIRST_CALLER_FIELD and field.name != "class"
    }
    named = {field.name for field in FIELDS if field.name != "class"}
    options = {field.option for field in FIELDS}
    assert protos == named
    assert "class" in gateway_pb2.CompletionRequest.DESCRIPTOR.fields_by_name
    assert options == set(Options.__struct_fields__)


def test_every_field_can_come_by_header_and_by_json_and_means_the_same():
    by_header = options_from_headers(
        headers(
            ("X-Tollbridge-Session-Id", "s 1"),
            ("x-tollbridge-debit-id", "d"),
            ("idempotency-key", "i"),
            ("x-tollbridge-scope-id", "sc"),
            ("x-tollbridge-run-id", "r"),
            ("x-tollbridge-step-id", "st"),
            ("x-tollbridge-skill", "sk"),
            ("x-tollbridge-skill-version", "2"),
            ("x-tollbridge-role", "planner"),
            ("x-tollbridge-tool", "grep"),
            ("x-tollbridge-tags", "team=core, note=a%2Cb"),
            ("x-tollbridge-owner-fence", "7"),
            ("x-tollbridge-class", "batch"),
            ("x-tollbridge-max-cost-usd", "0.10"),
            ("x-tollbridge-allowed-providers", "openai, local"),
            ("x-tollbridge-allow-failover", "false"),
            ("x-tollbridge-resend-uncertain", "never"),
            ("x-tollbridge-spill-after-s", "1.5"),
            ("x-tollbridge-allowed-models", "gpt-4o,openai/*"),
            ("x-tollbridge-order", "cost"),
            ("x-tollbridge-unsupported", "drop"),
            ("x-tollbridge-explain", "true"),
            ("accept", "*/*"),
        )
    )
    by_json = options_from_json(
        raw(
            """{"session_id": "s 1", "debit_id": "d", "idempotency_key": "i", "scope_id": "sc", "run_id": "r",
            "step_id": "st", "skill": "sk", "skill_version": "2", "role": "planner", "tool": "grep",
            "tags": {"team": "core", "note": "a,b"}, "owner_fence": 7, "class": "batch", "max_cost_usd": 0.10,
            "allowed_providers": ["openai", "local"], "allow_failover": false, "resend_uncertain": "never",
            "spill_after_s": 1.5, "allowed_models": ["gpt-4o", "openai/*"], "order": "cost", "unsupported": "drop",
            "explain": true}"""
        )
    )
    assert by_header == by_json
    assert by_json.klass is Class.BATCH
    assert by_json.max_cost_usd == Decimal("0.10")
    assert by_json.resend_uncertain is Resend.NEVER
    assert by_json.tags == {"team": "core", "note": "a,b"}
    defaults = Options()
    for field in FIELDS:
        assert getattr(by_json, field.option) != getattr(defaults, field.option), field.option


def test_a_json_number_of_money_is_taken_as_it_is_written():
    assert options_from_json(raw('{"max_cost_usd": 0.1}')).max_cost_usd == Decimal("0.1")
    assert options_from_json(raw('{"max_cost_usd": 1e-7}')).max_cost_usd == Decimal("0.0000001")
    assert options_from_json(raw('{"max_cost_usd": 0}')).max_cost_usd == 0
    assert options_from_json(raw('{"max_cost_usd": "0"}')).max_cost_usd == 0


def test_absent_and_null_fields_are_the_defaults():
    assert options_from_headers(headers()) == Options()
    assert options_from_json(raw('{"session_id": null, "tags": null}')) == Options()
    assert options_from_json({}, klass=Class.BATCH).klass is Class.BATCH
    assert options_from_json(raw('{"class": "interactive"}'), klass=Class.BATCH).klass is Class.INTERACTIVE


@pytest.mark.parametrize(
    "text",
    [
        '{"session_id": ""}',
        '{"session_id": 1}',
        '{"session_id": "a\\u0000b"}',
        '{"session_id": "a\\nb"}',
        '{"session_id": "' + "x" * 257 + '"}',
        '{"debit_id": ["x"]}',
        '{"max_cost_usd": "1e3"}',
        '{"max_cost_usd": 1e12}',
        '{"max_cost_usd": 1e-13}',
        '{"max_cost_usd": 1e999999999}',
        '{"max_cost_usd": -1}',
        '{"max_cost_usd": "NaN"}',
        '{"max_cost_usd": "Infinity"}',
        '{"max_cost_usd": true}',
        '{"max_cost_usd": "0.1234567890123"}',
        '{"max_cost_usd": "\\u0661"}',
        '{"max_cost_usd": 1e400}',
        '{"max_cost_usd": 1e99999999999999999999}',
        '{"owner_fence": -1}',
        '{"owner_fence": 1.5}',
        '{"owner_fence": true}',
        '{"owner_fence": 9223372036854775808}',
        '{"class": "urgent"}',
        '{"class": 1}',
        '{"tags": {"a": 1}}',
        '{"tags": ["a"]}',
        '{"tags": {"": "x"}}',
        '{"tags": {"a": "x\\u0007"}}',
        '{"tags": {' + ",".join(f'"t{number}": "x"' for number in range(33)) + "}}",
        '{"allowed_providers": []}',
        '{"allowed_providers": "openai"}',
        '{"allowed_providers": [1]}',
        '{"allow_failover": "true"}',
        '{"allow_failover": 0}',
        '{"resend_uncertain": "always"}',
        '{"spill_after_s": -1}',
        '{"order": "best"}',
        '{"order": 1}',
        '{"unsupported": "ignore"}',
        '{"allowed_models": []}',
        '{"explain": "yes"}',
        '{"spill_after_s": "5"}',
        '{"spill_after_s": 86401}',
    ],
)
def test_a_value_that_is_not_exactly_right_is_refused_with_its_path(text: str):
    fields = raw(text)
    (name,) = fields
    with pytest.raises(InvalidRequest) as caught:
        options_from_json(fields, at="jobs[3]")
    assert caught.value.code in {Code.INVALID_REQUEST, Code.INVALID_JSON}
    assert caught.value.param in {f"jobs[3].{name}", None}


def test_money_as_a_float_is_refused_because_it_has_lost_what_it_said():
    with pytest.raises(InvalidRequest) as caught:
        options_from_json({"max_cost_usd": 0.1})
    assert caught.value.param == "max_cost_usd"


def test_a_header_that_is_no_text_is_told_so_and_one_in_utf_8_is_taken():
    with pytest.raises(InvalidRequest, match="must be ASCII, or UTF-8"):
        options_from_headers(headers(("x-tollbridge-session-id", "caf\udce9")))
    assert options_from_headers(headers(("x-tollbridge-session-id", "caf\u00e9"))).session_id == "caf\u00e9"


def test_an_unknown_field_or_header_is_refused_by_name():
    with pytest.raises(InvalidRequest) as caught:
        options_from_json(raw('{"sesion_id": "x"}'), at="jobs[0]")
    assert caught.value.param == "jobs[0].sesion_id"
    with pytest.raises(InvalidRequest) as caught:
        options_from_headers(headers(("X-Tollbridge-Sesion-Id", "x")))
    assert caught.value.param == "x-tollbridge-sesion-id"


@pytest.mark.parametrize(
    "pairs",
    [
        [("x-tollbridge-run-id", "a"), ("X-Tollbridge-Run-Id", "a")],
        [("idempotency-key", "a"), ("x-tollbridge-idempotency-key", "a")],
        [("x-tollbridge-tags", "a=1,a=2")],
        [("x-tollbridge-tags", "a")],
        [("x-tollbridge-tags", "a=%ff")],
        [("x-tollbridge-tags", "")],
        [("x-tollbridge-allowed-providers", "")],
        [("x-tollbridge-allow-failover", "yes")],
        [("x-tollbridge-owner-fence", "+1")],
        [("x-tollbridge-owner-fence", "1_0")],
        [("x-tollbridge-max-cost-usd", "")],
        [("x-tollbridge-spill-after-s", "nan")],
        [("x-tollbridge-session-id", "a\udcffb")],
        [("x-tollbridge-session-id", "")],
    ],
)
def test_a_header_that_is_given_twice_or_wrongly_is_refused(pairs: list[tuple[str, str]]):
    with pytest.raises(InvalidRequest) as caught:
        options_from_headers(headers(*pairs))
    assert caught.value.param == pairs[-1][0].lower()
