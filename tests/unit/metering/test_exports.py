"""Exports of every form, hand-made: their figures are invented, their fields are the providers'."""

from __future__ import annotations

import csv
import io
import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from metering.exports.lines import Export, Form, Line, Refused
from metering.exports.reading import read

DAY = 1_788_307_200  # 2026-09-02T00:00:00Z
NEXT = DAY + 86_400


def openai_page(*results: dict[str, Any], start: int = DAY, end: int = NEXT, **page: Any) -> dict[str, Any]:
    bucket = {"object": "bucket", "start_time": start, "end_time": end, "results": list(results)}
    return {"object": "page", "data": [bucket], "has_more": False, "next_page": None, **page}


def openai_cost(value: Any, item: str | None, **fields: Any) -> dict[str, Any]:
    amount = {"value": value, "currency": "usd"}
    result = {"object": "organization.costs.result", "amount": amount, "line_item": item, "project_id": None}
    return {**result, **fields}


def openai_usage(model: str | None, given: int, told: int, **fields: Any) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result", "input_tokens": given, "output_tokens": told,
        "input_cached_tokens": 3, "num_model_requests": 2, "model": model, "batch": None, "project_id": None, **fields,
    }  # fmt: skip


def anthropic_page(*results: dict[str, Any], day: int = 2, **page: Any) -> dict[str, Any]:
    span = {"starting_at": f"2026-09-{day:02}T00:00:00Z", "ending_at": f"2026-09-{day + 1:02}T00:00:00Z"}
    return {"data": [{**span, "results": list(results)}], "has_more": False, "next_page": None, **page}


def anthropic_cost(amount: str, **fields: Any) -> dict[str, Any]:
    return {
        "currency": "USD", "amount": amount, "workspace_id": None, "description": None, "cost_type": None,
        "context_window": None, "model": None, "service_tier": None, "token_type": None, **fields,
    }  # fmt: skip


ANTHROPIC_TOKENS = {
    "uncached_input_tokens": 100, "cache_creation": {"ephemeral_1h_input_tokens": 20, "ephemeral_5m_input_tokens": 3},
    "cache_read_input_tokens": 7, "output_tokens": 11, "server_tool_use": {"web_search_requests": 1},
    "model": "claude-haiku-4-5-20251001", "service_tier": "standard", "workspace_id": None, "api_key_id": None,
}  # fmt: skip

OPENAI_COSTS_CSV = (
    "start_time,end_time,start_time_iso,end_time_iso,amount_value,amount_currency,line_item,project_id,organization_name\n"
    "1788220800,1788307200,2026-09-01T00:00:00+00:00,2026-09-02T00:00:00+00:00,,,,,\n"
    "1788307200,1788393600,2026-09-02T00:00:00,2026-09-03T00:00:00,0.25000,usd,"
    '"gpt-4o-2024-08-06, input",proj_a,"Example, Inc"\n'
    "1788307200,1788393600,2026-09-02T00:00:00,2026-09-03T00:00:00,0E-6176,usd,web search tool calls,proj_a,x\n"
)
OPENAI_USAGE_CSV = (
    "start_time,end_time,start_time_iso,end_time_iso,project_id,num_model_requests,user_id,api_key_id,model,batch,"
    "service_tier,input_tokens,output_tokens,input_cached_tokens\n"
    "1788307200,1788393600,2026-09-02T00:00:00,2026-09-03T00:00:00,proj_a,2.0,u,k,gpt-4o-2024-08-06,FALSE,default,"
    "59200.0,106.0,12.0\n"
    "1788307200,1788393600,2026-09-02T00:00:00,2026-09-03T00:00:00,proj_a,1.0,u,k,gpt-4o-2024-08-06,TRUE,,5,6,0\n"
    "1788393600,1788480000,2026-09-03T00:00:00,2026-09-04T00:00:00,,,,,,,,,,\n"
)
ANTHROPIC_COSTS_CSV = (
    "usage_date_utc,model,workspace,api_key,usage_type,context_window,token_type,cost_usd,list_price_usd,cost_type,"
    "inference_geo,speed\n"
    "2026-09-02,Claude Haiku 4.5,Default,k,message,≤ 200k,input_no_cache,1.50,1.50,token,global,\n"
    "2026-09-02,,Default,k,message,,,0.01,0.01,web_search,global,\n"
)
ANTHROPIC_USAGE_CSV = (
    "usage_date_utc,model_version,api_key,workspace,usage_type,context_window,usage_input_tokens_no_cache,"
    "usage_input_tokens_cache_write_5m,usage_input_tokens_cache_write_1h,usage_input_tokens_cache_read,"
    "usage_output_tokens,web_search_count,inference_geo,speed\n"
    "2026-09-02 15:00,claude-haiku-4-5-20251001,k,Default,standard,≤ 200k,100,3,20,7,11,0,global,\n"
    "2026-09-02,claude-haiku-4-5-20251001,k,Default,batch,≤ 200k,1,0,0,0,1,0,global,\n"
)


def one(content: Any, name: str = "export") -> Export:
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    [export] = read([(name, text if isinstance(text, bytes) else text.encode())])
    return export


def told(line: Line) -> tuple[Any, ...]:
    return line.day.day, line.model, line.amount, line.input_tokens, line.output_tokens, line.apart


OTHER = "of another product"
BATCH = "of the provider's batch API, which the gateway does not call"


@pytest.mark.parametrize(
    ("content", "form", "lines"),
    [
        (
            openai_page(openai_cost("0.0000045000", "gpt-4o-mini-2024-07-18, cached input"), openai_cost(-1, "credit")),
            Form.OPENAI_COSTS,
            [(2, "gpt-4o-mini-2024-07-18", Decimal("0.0000045"), None, None, None), (2, None, -1, None, None, OTHER)],
        ),
        (
            openai_page(openai_usage("gpt-4o", 10, 4), openai_usage("gpt-4o", 1, 1, batch=True)),
            Form.OPENAI_USAGE,
            [(2, "gpt-4o", None, 10, 4, None), (2, None, None, 1, 1, BATCH)],
        ),
        (
            OPENAI_COSTS_CSV,
            Form.OPENAI_COSTS_CSV,
            [(2, "gpt-4o-2024-08-06", Decimal("0.25"), None, None, None), (2, None, 0, None, None, OTHER)],
        ),
        (
            OPENAI_USAGE_CSV,
            Form.OPENAI_USAGE_CSV,
            [(2, "gpt-4o-2024-08-06", None, 59200, 106, None), (2, None, None, 5, 6, BATCH)],
        ),
        (
            anthropic_page(
                anthropic_cost("123.45", model="claude-opus-4-1", description="Output", cost_type="tokens"),
                anthropic_cost("100", description="Web Search Usage", cost_type="web_search"),
            ),
            Form.ANTHROPIC_COSTS,
            [(2, "claude-opus-4-1", Decimal("1.2345"), None, None, None), (2, None, 1, None, None, OTHER)],
        ),
        (
            anthropic_page(ANTHROPIC_TOKENS, {**ANTHROPIC_TOKENS, "service_tier": "batch"}),
            Form.ANTHROPIC_USAGE,
            [(2, "claude-haiku-4-5-20251001", None, 130, 11, None), (2, None, None, 130, 11, BATCH)],
        ),
        (
            ANTHROPIC_COSTS_CSV,
            Form.ANTHROPIC_COSTS_CSV,
            [(2, "Claude Haiku 4.5", Decimal("1.5"), None, None, None), (2, None, Decimal("0.01"), None, None, OTHER)],
        ),
        (
            ANTHROPIC_USAGE_CSV,
            Form.ANTHROPIC_USAGE_CSV,
            [(2, "claude-haiku-4-5-20251001", None, 130, 11, None), (2, None, None, 1, 1, BATCH)],
        ),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Form) else "",
)
def test_each_form_is_known_by_its_content_and_its_units_become_usd_and_tokens(
    content: Any, form: Form, lines: list[tuple[Any, ...]]
) -> None:
    # A name that says something else changes nothing.
    for name in ("export", "anthropic_cost.csv", "openai_usage.json"):
        export = one(content, name)
        assert export.form is form
        assert [told(line) for line in export.lines] == lines
    cents = ["export: has whole cents alone: each of its 2 amounts may be half a cent off"]
    assert one(content).notes == (cents if form is Form.ANTHROPIC_COSTS_CSV else [])


@pytest.mark.parametrize("text", [OPENAI_COSTS_CSV, OPENAI_USAGE_CSV, ANTHROPIC_COSTS_CSV, ANTHROPIC_USAGE_CSV])
def test_a_byte_order_mark_other_line_ends_and_empty_lines_change_nothing(text: str) -> None:
    plain = one(text)
    dressed = one(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert (dressed.lines, dressed.first, dressed.last) == (plain.lines, plain.first, plain.last)


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_a_table_that_went_through_a_spreadsheet_is_read_as_well(delimiter: str) -> None:
    rows = io.StringIO(newline="")
    csv.writer(rows, delimiter=delimiter).writerows(csv.reader(io.StringIO(OPENAI_COSTS_CSV)))
    assert one(rows.getvalue()).lines == one(OPENAI_COSTS_CSV).lines


def test_a_bucket_without_use_is_part_of_the_range() -> None:
    export = one(OPENAI_COSTS_CSV)
    assert export.first is not None
    assert export.last is not None
    assert (export.first.date(), export.last.date()) == (date(2026, 9, 1), date(2026, 9, 3))
    empty = openai_page(start=NEXT, end=NEXT + 86_400)["data"]
    page = openai_page(openai_cost(1, None))
    assert one({**page, "data": page["data"] + empty}).last.day == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("joined", [json.dumps, lambda pages: "\n".join(map(json.dumps, pages))], ids=["list", "lines"])
def test_pages_may_be_a_list_or_a_line_each(joined: Any) -> None:
    pages = [anthropic_page(anthropic_cost("1"), day=day, has_more=day < 4) for day in (2, 3, 4)]
    export = one(joined(pages))
    assert [line.day.day for line in export.lines] == [2, 3, 4]
    assert export.notes == []
    apart = read([(f"page {number}", json.dumps(page).encode()) for number, page in enumerate(pages)])
    assert [line for export in apart for line in export.lines] == export.lines
    assert (export.whole, [page.whole for page in apart]) == (True, [False, False, True])
    [note] = one(joined(pages[:2])).notes
    assert "there are more" in note


@pytest.mark.parametrize(
    ("item", "model"),
    [
        ("gpt-4.1-2025-04-14, output", "gpt-4.1-2025-04-14"),
        ("priority | gpt-5.6-sol, output, long context", "gpt-5.6-sol"),
        ("gpt-audio-mini-2025-12-15 audio, input", "gpt-audio-mini-2025-12-15"),
        ("gpt-5-nano, input_tokens", "gpt-5-nano"),
        ("gpt-5.6-sol, cache writes", "gpt-5.6-sol"),
        ("ft:gpt-4o-mini-2024-07-18:org::id, input", "ft:gpt-4o-mini-2024-07-18:org::id"),
        ("text-embedding-3-large, input", "text-embedding-3-large"),
        ("gpt-image-1 image, output", None),
        ("whisper-1, audio", None),
        ("web search tool calls", None),
        ("batch | gpt-4o, input", None),
    ],
)
def test_a_line_item_is_a_model_s_only_where_it_says_tokens(item: str, model: str | None) -> None:
    [line] = one(openai_page(openai_cost("0.5", item))).lines
    assert line.model == model
    assert (line.apart is None) == (model is not None)
    assert line.label == item


def test_what_is_not_grouped_is_of_all_models_together() -> None:
    for page in (
        openai_page(openai_cost(1, None)),
        openai_page(openai_usage(None, 1, 1)),
        anthropic_page(anthropic_cost("1")),
    ):
        [line] = one(page).lines
        assert line.whole


def test_other_products_of_the_usage_api_are_kept_apart() -> None:
    images = {"object": "organization.usage.images.result", "images": 5, "num_model_requests": 5, "model": "x"}
    embeddings = {
        "object": "organization.usage.embeddings.result",
        "input_tokens": 9,
        "num_model_requests": 1,
        "model": "e",
    }
    first, second = one(openai_page(images, embeddings)).lines
    assert (first.apart, second.apart) == (OTHER, None)
    assert (second.input_tokens, second.output_tokens) == (9, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OPENAI_COSTS_CSV.replace("0.25000", "lots"), "export: line 3, amount_value: 'lots' is no number"),
        (OPENAI_COSTS_CSV.replace("0.25000", "NaN"), "export: line 3, amount_value: 'NaN' is no number"),
        (OPENAI_COSTS_CSV.replace("0.25000", "1e99"), "export: line 3, amount_value: '1e99' has more digits"),
        (OPENAI_COSTS_CSV.replace("usd,web", ",web"), "export: line 4, amount_currency: is missing"),
        (
            OPENAI_COSTS_CSV.replace("1788307200,1788393600", "now,1788393600", 1),
            "line 3, start_time: 'now' is no time",
        ),
        (
            OPENAI_COSTS_CSV.replace("1788393600", "1788397200"),
            "line 3, end_time: the bucket from 2026-09-02T00:00:00+00:00",
        ),
        (
            ANTHROPIC_COSTS_CSV.replace("2026-09-02,Cl", "9999-12-31,Cl"),
            "line 2, usage_date_utc: '9999-12-31' is no time of",
        ),
        (OPENAI_COSTS_CSV + "1,2,3\n", "export: line 5: has 3 cells, the header has 9"),
        (OPENAI_COSTS_CSV + '"open', "export: line 5: is no CSV"),
        (OPENAI_USAGE_CSV.replace("106.0", "106.5"), "export: line 2, output_tokens: '106.5' is no count"),
        (ANTHROPIC_COSTS_CSV.replace("1.50,1.50", ",1.50"), "export: line 2, cost_usd: is missing"),
        (ANTHROPIC_USAGE_CSV.replace(",100,", ",-1,"), "line 2, usage_input_tokens_no_cache: '-1' is no count"),
        (ANTHROPIC_USAGE_CSV.replace("2026-09-02,", "yesterday,"), "line 3, usage_date_utc: 'yesterday' is no time"),
        (openai_page(openai_cost("x", None)), "export: data[0].results[0], amount.value: 'x' is no number"),
        (anthropic_page(anthropic_cost("1.2.3")), "export: data[0].results[0], amount: '1.2.3' is no number"),
        (anthropic_page({**ANTHROPIC_TOKENS, "output_tokens": None}), "data[0].results[0], output_tokens: is missing"),
        (openai_page(openai_cost(1, None), openai_usage("m", 1, 1)), "data[0].results[1]: is a page of OpenAI's usage"),
        (openai_page({"object": "x"}), "data[0].results[0]: is a result of no known form; looked for"),
        (openai_page(), "export: has no result, so that nothing tells costs from usage; looked for"),
        ({"daily_costs": []}, "export: has no list `data`; looked for"),
        ({"data": [{"actor": {}, "core_metrics": {}}]}, "data[0]: is no bucket with `results`; looked for"),
        ([], "export: has no page"),
        ("{", "export: is no JSON"),
        (b"\xff\xfe", "export: byte 0: is not UTF-8"),
        (" \n", "export: is empty; looked for"),
        ("date,model,cost\n1,2,3\n", "export: line 1: is of no known form; looked for"),
        ("usage_date_utc,model,model\n", "export: line 1: has two columns 'model'"),
        (
            "start_time,end_time,amount_value,amount_currency,num_model_requests,input_tokens\n",
            "could be the CSV of costs of OpenAI's dashboard or the CSV of usage of OpenAI's dashboard; looked for",
        ),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(content: Any, said: str) -> None:
    with pytest.raises(Refused) as refused:
        one(content)
    assert said in str(refused.value)


def files(*contents: Any) -> list[tuple[str, bytes]]:
    texts = [content if isinstance(content, str) else json.dumps(content) for content in contents]
    return [(f"file {number}", text.encode()) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (files(OPENAI_COSTS_CSV, OPENAI_COSTS_CSV), "file 1: has a line of 2026-09-02"),
        (files(OPENAI_COSTS_CSV, openai_page(openai_cost(1, None))), "file 1: tells costs, and so does file 0"),
        (files(OPENAI_COSTS_CSV, ANTHROPIC_COSTS_CSV), "one provider at a time"),
        (files(ANTHROPIC_USAGE_CSV)[:1] * 2, "file 0: is given twice"),
    ],
    ids=["the same lines", "two forms of costs", "two providers", "one file twice"],
)
def test_what_would_be_counted_twice_is_refused(given: list[tuple[str, bytes]], said: str) -> None:
    with pytest.raises(Refused) as refused:
        read(given)
    assert said in str(refused.value)


def test_costs_and_usage_of_one_provider_go_together() -> None:
    assert [export.form.money for export in read(files(OPENAI_COSTS_CSV, OPENAI_USAGE_CSV))] == [True, False]


def test_hours_of_one_day_may_be_in_two_files() -> None:
    hours = [openai_page(openai_usage("m", 1, 1), start=DAY + n * 3600, end=DAY + (n + 1) * 3600) for n in range(2)]
    assert len(read(files(*hours))) == 2


def test_audio_that_is_told_apart_is_told() -> None:
    [note] = one(openai_page(openai_usage("gpt-audio", 1, 1, input_audio_tokens=5))).notes
    assert "audio" in note
