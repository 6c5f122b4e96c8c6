"""What a protobuf request may say, how it is refused, and what an answer becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from decimal import Decimal

import pytest

from adapters import chat
from admission.lease import Class
from gateway.answer import Ended
from gateway.call import Completion, Order, Resend, Unsupported
from gateway.errors import InvalidRequest
from gateway.outcome import AttemptReport, Cost, Counters, LeftOut, Outcome
from gateway.rpc import codec
from metering.usage import Usage
from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.line import ROUTE, outcome


def question(**fields) -> pb.CompletionRequest:
    fields.setdefault("model", "gpt-4o")
    fields.setdefault("messages", [pb.Message(role="user", text="Hello?")])
    return pb.CompletionRequest(**fields)


def said(message: pb.Message) -> pb.CompletionRequest:
    return question(messages=[message])


def user(*parts: pb.Part) -> pb.CompletionRequest:
    return said(pb.Message(role="user", parts=pb.Parts(parts=parts)))


def assistant(**fields) -> pb.CompletionRequest:
    return said(pb.Message(role="assistant", **fields))


def extra(**fields) -> pb.CompletionRequest:
    request = question()
    request.extra.update(fields)
    return request


def classed(value: int) -> pb.CompletionRequest:
    return question(**{"class": value})


# ------------------------------------------------------------------ request


def test_an_absent_parameter_stays_absent() -> None:
    asked = codec.decode_request(question())
    assert asked.model == "gpt-4o"
    assert asked.chat == chat.ChatRequest(
        messages=(chat.Message(role=chat.Role.USER, content=(chat.Text(text="Hello?"),)),), paths=asked.chat.paths
    )
    assert asked.options == type(asked.options)()


def test_every_field_of_the_request_arrives() -> None:
    request = pb.CompletionRequest(
        model="openai/gpt-4o",
        messages=[
            pb.Message(role="system", text="Be brief."),
            pb.Message(
                role="user",
                name="ann",
                parts=pb.Parts(
                    parts=[
                        pb.Part(text="Look:", cache="5m"),
                        pb.Part(image=pb.Image(url="https://pictures.test/a.png", detail="low")),
                        pb.Part(image=pb.Image(data=b"\x89PNG", media_type="image/png"), cache="1h"),
                        pb.Part(document=pb.Document(file_id="file-1", filename="a.pdf")),
                        pb.Part(audio=pb.Audio(data=b"RIFF", format="wav")),
                    ]
                ),
            ),
            pb.Message(
                role="assistant",
                tool_calls=[pb.ToolCall(id="c1", name="look_up", arguments='{"q":', signature="gü".encode())],
                reasoning=[pb.Reasoning(text="hm", signature=b"s", redacted=True, id="rs_1")],
                refusal="no",
            ),
            pb.Message(role="tool", tool_call_id="c1", text="", is_error=True),
        ],
        temperature=0,
        top_p=0.5,
        top_k=40,
        verbosity="low",
        service_tier="flex",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        store=False,
        metadata={"ticket": "7"},
        max_output_tokens=100,
        stop=["END"],
        seed=-1,
        n=2,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        logprobs=True,
        top_logprobs=0,
        logit_bias={"50256": -100},
        reasoning_effort="low",
        reasoning_budget_tokens=0,
        end_user="u1",
        tools=[pb.Tool(name="look_up", description="finds", strict=False, cache="1h")],
        tool_choice=pb.ToolChoice(tool="look_up"),
        parallel_tool_calls=False,
        response_format=pb.ResponseFormat(kind=pb.ResponseFormat.KIND_JSON_SCHEMA, name="answer", strict=True),
        session_id="s",
        debit_id="d",
        idempotency_key="i",
        scope_id="sc",
        run_id="r",
        step_id="st",
        skill="sk",
        skill_version="2",
        role="planner",
        tags={"team": "a", "empty": ""},
        owner_fence=0,
        tool="t",
        max_cost_usd="0.10",
        allowed_providers=["openai"],
        allow_failover=False,
        resend_uncertain=pb.RESEND_UNCERTAIN_NEVER,
        spill_after_s=0,
        allowed_models=["openai/*"],
        order=pb.ORDER_LATENCY,
        unsupported=pb.UNSUPPORTED_DROP,
        explain=True,
    )
    setattr(request, "class", pb.CLASS_BATCH)
    request.tools[0].parameters.update({"type": "object"})
    request.response_format.schema.update({"type": "object"})
    request.extra.update({"min_p": 40})

    asked = codec.decode_request(request)

    assert asked.model == "openai/gpt-4o"
    sent = asked.chat
    assert sent.messages == (
        chat.Message(role=chat.Role.SYSTEM, content=(chat.Text(text="Be brief."),)),
        chat.Message(
            role=chat.Role.USER,
            name="ann",
            content=(
                chat.Text(text="Look:", cache="5m"),
                chat.Image(url="https://pictures.test/a.png", detail="low"),
                chat.Image(data=b"\x89PNG", media_type="image/png", cache="1h"),
                chat.Document(file_id="file-1", filename="a.pdf"),
                chat.Audio(data=b"RIFF", format="wav"),
            ),
        ),
        chat.Message(
            role=chat.Role.ASSISTANT,
            tool_calls=(chat.ToolCall(id="c1", name="look_up", arguments='{"q":', signature="gü"),),
            reasoning=(chat.Reasoning(text="hm", signature="s", redacted=True, id="rs_1"),),
            refusal="no",
        ),
        chat.Message(role=chat.Role.TOOL, tool_call_id="c1", content=(chat.Text(text=""),), is_error=True),
    )
    assert (sent.temperature, sent.top_p, sent.max_output_tokens, sent.stop) == (0.0, 0.5, 100, ("END",))
    assert (sent.seed, sent.n, sent.presence_penalty, sent.frequency_penalty) == (-1, 2, -1.5, 0.25)
    assert (sent.logprobs, sent.top_logprobs, sent.logit_bias) == (True, 0, {"50256": -100.0})
    assert (sent.reasoning_effort, sent.reasoning_budget_tokens, sent.end_user) == ("low", 0, "u1")
    assert (sent.top_k, sent.verbosity, sent.service_tier, sent.prompt_cache_key) == (40, "low", "flex", "k")
    assert sent.prompt_cache_retention == "24h"
    assert (sent.store, sent.metadata, sent.tools[0].cache) == (False, {"ticket": "7"}, "1h")
    assert (sent.tools[0].name, sent.tools[0].description, sent.tools[0].strict) == ("look_up", "finds", False)
    assert bytes(sent.tools[0].parameters or b"") == b'{"type":"object"}'
    assert sent.tool_choice == chat.ToolChoice(mode="tool", tool="look_up")
    assert sent.parallel_tool_calls is False
    assert sent.response_format is not None
    assert (sent.response_format.kind, sent.response_format.name, sent.response_format.strict) == (
        "json_schema",
        "answer",
        True,
    )
    assert {name: bytes(value) for name, value in sent.extra.items()} == {"min_p": b"40"}
    options = asked.options
    assert (options.session_id, options.debit_id, options.idempotency_key) == ("s", "d", "i")
    assert (options.scope_id, options.run_id, options.step_id) == ("sc", "r", "st")
    assert (options.skill, options.skill_version, options.role, options.tool) == ("sk", "2", "planner", "t")
    assert (options.tags, options.owner_fence, options.klass) == ({"team": "a", "empty": ""}, 0, Class.BATCH)
    assert (options.max_cost_usd, options.allowed_providers) == (Decimal("0.10"), ("openai",))
    assert (options.allow_failover, options.resend_uncertain, options.spill_after_s) == (False, Resend.NEVER, 0.0)
    assert (options.allowed_models, options.order) == (("openai/*",), Order.LATENCY)
    assert (options.unsupported, options.explain) == (Unsupported.DROP, True)


def test_no_field_of_the_request_is_unknown_to_the_codec() -> None:
    """The test above fills every field: a new one fails here until somebody reads it."""
    assert set(pb.CompletionRequest.DESCRIPTOR.fields_by_name) == {
        *chat.ChatRequest.__struct_fields__,
        *type(codec.decode_request(question()).options).__struct_fields__,
        "model",
        "class",
    } - {"native", "klass", "paths"}


def test_a_role_stands_in_for_a_model() -> None:
    asked = codec.decode_request(question(model="", role="planner"))
    assert (asked.model, asked.options.role) == ("", "planner")


def test_a_struct_becomes_json_with_whole_numbers_whole_and_keys_in_one_order() -> None:
    request = extra(provider={"b": 2, "a": [1, 2.5, -0.0, 2**53, 1e300, None, True, "ü", {}]})
    assert bytes(codec.decode_request(request).chat.extra["provider"]) == (
        '{"a":[1,2.5,0,9007199254740992,1e300,null,true,"ü",{}],"b":2}'.encode()
    )


@pytest.mark.parametrize(
    ("choice", "decoded"),
    [
        (pb.ToolChoice(), None),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_UNSPECIFIED), None),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED), chat.ToolChoice(mode="required")),
    ],
    ids=["empty", "unspecified", "required"],
)
def test_a_tool_choice_that_chooses_nothing_is_none(choice: pb.ToolChoice, decoded: chat.ToolChoice | None) -> None:
    assert codec.decode_request(question(tool_choice=choice)).chat.tool_choice == decoded


SCHEMA = pb.ResponseFormat.KIND_JSON_SCHEMA
#: Field 1, the number 17: what a newer client may send.
UNKNOWN_ENUM = b"\x08\x11"

REFUSED: list[tuple[str, Callable[[], pb.CompletionRequest]]] = [
    ("model", lambda: question(model="")),
    ("model", lambda: question(model="gpt\n4")),
    ("messages", lambda: question(messages=[])),
    ("messages[0].role", lambda: said(pb.Message(role="robot", text="x"))),
    ("messages[0].role", lambda: said(pb.Message(text="x"))),
    ("messages[0]", lambda: said(pb.Message(role="user"))),
    ("messages[0]", lambda: said(pb.Message(role="assistant"))),
    ("messages[0].name", lambda: said(pb.Message(role="user", text="x", name="a\0"))),
    ("messages[0].parts", lambda: said(pb.Message(role="user", parts=pb.Parts()))),
    ("messages[0].parts.parts[0]", lambda: user(pb.Part())),
    ("messages[0].parts.parts[1].cache", lambda: user(pb.Part(text="x"), pb.Part(text="x", cache="2h"))),
    ("messages[0].parts.parts[0].image", lambda: user(pb.Part(image=pb.Image(media_type="image/png")))),
    ("messages[0].parts.parts[0].image.url", lambda: user(pb.Part(image=pb.Image(url="")))),
    ("messages[0].parts.parts[0].image.url", lambda: user(pb.Part(image=pb.Image(url="http://a.test/\r\nb")))),
    ("messages[0].parts.parts[0].image.data", lambda: user(pb.Part(image=pb.Image(data=b"", media_type="image/png")))),
    ("messages[0].parts.parts[0].image.media_type", lambda: user(pb.Part(image=pb.Image(data=b"x")))),
    ("messages[0].parts.parts[0].image.detail", lambda: user(pb.Part(image=pb.Image(url="u", detail="huge")))),
    ("messages[0].parts.parts[0].document", lambda: user(pb.Part(document=pb.Document()))),
    ("messages[0].parts.parts[0].document.file_id", lambda: user(pb.Part(document=pb.Document(file_id="")))),
    ("messages[0].parts.parts[0].audio.data", lambda: user(pb.Part(audio=pb.Audio(format="wav")))),
    ("messages[0].parts.parts[0].audio.format", lambda: user(pb.Part(audio=pb.Audio(data=b"x")))),
    ("messages[0].parts.parts[0].cache", lambda: user(pb.Part(audio=pb.Audio(data=b"x", format="wav"), cache="5m"))),
    ("messages[0].tool_calls", lambda: said(pb.Message(role="user", text="x", tool_calls=[pb.ToolCall(id="c")]))),
    ("messages[0].tool_calls[0].id", lambda: assistant(tool_calls=[pb.ToolCall(name="f")])),
    ("messages[0].tool_calls[0].name", lambda: assistant(tool_calls=[pb.ToolCall(id="c")])),
    (
        "messages[0].tool_calls[0].signature",
        lambda: assistant(tool_calls=[pb.ToolCall(id="c", name="f", signature=b"\xff")]),
    ),
    ("messages[0].reasoning[0].signature", lambda: assistant(reasoning=[pb.Reasoning(text="x", signature=b"\xff")])),
    ("messages[0].refusal", lambda: said(pb.Message(role="user", text="x", refusal="no"))),
    ("messages[0].is_error", lambda: said(pb.Message(role="user", text="x", is_error=True))),
    ("messages[0].tool_call_id", lambda: said(pb.Message(role="user", text="x", tool_call_id="c"))),
    ("messages[0].tool_call_id", lambda: said(pb.Message(role="tool", text="x"))),
    ("temperature", lambda: question(temperature=-0.1)),
    ("temperature", lambda: question(temperature=math.nan)),
    ("top_p", lambda: question(top_p=math.inf)),
    ("presence_penalty", lambda: question(presence_penalty=-math.inf)),
    ("max_output_tokens", lambda: question(max_output_tokens=0)),
    ("n", lambda: question(n=-1)),
    ("top_logprobs", lambda: question(top_logprobs=-1)),
    ("reasoning_budget_tokens", lambda: question(reasoning_budget_tokens=-1)),
    ("reasoning_effort", lambda: question(reasoning_effort="")),
    ("stop[1]", lambda: question(stop=["a", ""])),
    ("logit_bias", lambda: question(logit_bias={"1": math.nan})),
    ("tools[0].name", lambda: question(tools=[pb.Tool()])),
    ("tools[0].cache", lambda: question(tools=[pb.Tool(name="f", cache="2h")])),
    ("metadata", lambda: question(metadata={"": "x"})),
    ("tools[1].name", lambda: question(tools=[pb.Tool(name="f"), pb.Tool(name="f")])),
    ("tool_choice.tool", lambda: question(tool_choice=pb.ToolChoice(tool="f"))),
    ("tool_choice.mode", lambda: question(tool_choice=pb.ToolChoice.FromString(UNKNOWN_ENUM))),
    ("response_format.kind", lambda: question(response_format=pb.ResponseFormat.FromString(UNKNOWN_ENUM))),
    ("response_format.schema", lambda: question(response_format=pb.ResponseFormat(kind=SCHEMA))),
    ("response_format.name", lambda: question(response_format=pb.ResponseFormat(kind="KIND_JSON_OBJECT", name="x"))),
    ("response_format.strict", lambda: question(response_format=pb.ResponseFormat(strict=False))),
    ("extra.temperature", lambda: extra(temperature=1)),
    ("extra.stream", lambda: extra(stream=True)),
    ("extra.max_tokens", lambda: extra(max_tokens=1)),
    ("extra.min_p", lambda: extra(min_p=math.nan)),
    ("extra.top_k", lambda: extra(top_k=1)),
    ("extra.deep", lambda: extra(deep=[{"a": math.inf}])),
    ("extra", lambda: extra(**{"": 1})),
    ("session_id", lambda: question(session_id="x" * 257)),
    ("debit_id", lambda: question(debit_id="a\0b")),
    ("run_id", lambda: question(run_id="a\x85b")),
    ("tags", lambda: question(tags={"a": "x" * 257})),
    ("tags", lambda: question(tags={str(number): "" for number in range(65)})),
    ("owner_fence", lambda: question(owner_fence=-1)),
    ("class", lambda: classed(17)),
    ("resend_uncertain", lambda: question(resend_uncertain=17)),
    ("allowed_providers[1]", lambda: question(allowed_providers=["a", ""])),
    ("spill_after_s", lambda: question(spill_after_s=-1)),
    *[
        ("max_cost_usd", lambda value=value: question(max_cost_usd=value))
        for value in ("", "-1", "NaN", "Infinity", "1e3", "1_0", " 1", "1000000000", "٣", ".5", "0." + "0" * 19)
    ],
]


@pytest.mark.parametrize(("path", "request_of"), REFUSED, ids=[f"{at}-{path}" for at, (path, _) in enumerate(REFUSED)])
def test_what_cannot_be_meant_is_refused_with_its_path(
    path: str, request_of: Callable[[], pb.CompletionRequest]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_request(request_of())
    assert refused.value.param == path
    assert refused.value.message.startswith(f"{path}: ")


def test_a_struct_with_a_value_of_no_kind_is_refused() -> None:
    request = extra(min_p=1)
    request.extra.fields["min_p"].Clear()
    with pytest.raises(InvalidRequest, match="no kind"):
        codec.decode_request(request)


def test_a_refusal_does_not_quote_the_request() -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_request(question(session_id="secret\0"))
    assert "secret" not in refused.value.message


# ------------------------------------------------------------------ answer


def test_pieces_of_one_kind_and_choice_are_joined_and_others_kept_in_order() -> None:
    chunk = codec.encode_deltas(
        (
            chat.TextDelta("a"),
            chat.TextDelta("b"),
            chat.TextDelta("c", choice=1),
            chat.ReasoningDelta("d"),
            chat.ReasoningDelta("e", signature="s"),
            chat.RefusalDelta("f"),
            chat.ToolCallStart(0, "c1", "look_up"),
            chat.ToolCallDelta(0, '{"q"'),
            chat.ToolCallDelta(0, ":1}"),
            chat.ToolCallDelta(1, "{}"),
            chat.TextDelta("g"),
        )
    )
    said_of = [(piece.choice, piece.WhichOneof("piece")) for piece in chunk.delta.pieces]
    assert said_of == [
        (0, "text"),
        (1, "text"),
        (0, "reasoning"),
        (0, "reasoning_signature"),
        (0, "refusal"),
        (0, "tool_call"),
        (0, "tool_arguments"),
        (0, "tool_arguments"),
        (0, "text"),
    ]
    pieces = chunk.delta.pieces
    assert (pieces[0].text, pieces[2].reasoning, pieces[3].reasoning_signature) == ("ab", "de", b"s")
    assert (pieces[6].tool_arguments.arguments, pieces[7].tool_arguments.index) == ('{"q":1}', 1)


def test_text_is_joined_as_far_as_its_choice_goes() -> None:
    texts = [(0, "a"), (0, ""), (0, "b"), (1, "c"), (1, "d"), (0, "e")]
    deltas = [chat.TextDelta(text, choice=choice) for choice, text in texts]
    pieces = codec.encode_deltas([*deltas, chat.ReasoningDelta("f"), chat.TextDelta("g")]).delta.pieces
    assert [(piece.choice, piece.text or piece.reasoning) for piece in pieces] == [
        (0, "ab"),
        (1, "cd"),
        (0, "e"),
        (0, "f"),
        (0, "g"),
    ]


def test_blocks_of_reasoning_stay_apart_and_keep_what_must_be_sent_back() -> None:
    chunk = codec.encode_deltas(
        (
            chat.ReasoningDelta("a", block=0),
            chat.ReasoningDelta("b", signature="s", block=0, id="rs_1"),
            chat.ReasoningDelta("c", block=1),
            chat.ReasoningDelta("", signature="hidden", block=2, redacted=True),
        )
    )
    told = [
        (piece.reasoning_block, kind, getattr(piece, kind))
        for piece in chunk.delta.pieces
        if (kind := piece.WhichOneof("piece")) is not None
    ]
    assert told == [
        (0, "reasoning", "ab"),
        (0, "reasoning_id", "rs_1"),
        (0, "reasoning_signature", b"s"),
        (1, "reasoning", "c"),
        (2, "reasoning_redacted", True),
        (2, "reasoning_signature", b"hidden"),
    ]


TOKEN = chat.TokenLogprob(
    token="ü", logprob=-0.5, bytes=(0xC3, 0xBC), top=(chat.TokenLogprob(token="u", logprob=-1.5),)
)
PICTURE = chat.Image(data=b"\x89PNG", media_type="image/png")


def test_pictures_and_log_probabilities_are_told_streamed_and_plain() -> None:
    streamed = codec.encode_deltas((chat.ImageOutput(PICTURE, 1), chat.LogprobsDelta((TOKEN,)))).delta.pieces
    assert (streamed[0].choice, streamed[0].image.data, streamed[0].image.media_type) == (1, b"\x89PNG", "image/png")
    plain = codec.encode_completion(
        Completion(
            response=chat.ChatResponse(
                choices=(
                    chat.Choice(
                        index=0,
                        images=(chat.Image(url="https://pictures.test/a.png"),),
                        logprobs=(TOKEN,),
                        stop_reason=chat.StopReason.STOP,
                        native_stop_reason="stop",
                    ),
                )
            ),
            outcome=outcome(),
        )
    ).choices[0]
    assert plain.images[0].url == "https://pictures.test/a.png"
    for told in (streamed[1].logprobs.tokens, plain.logprobs.tokens):
        assert (told[0].token, told[0].logprob, told[0].bytes) == ("ü", -0.5, b"\xc3\xbc")
        assert (told[0].top[0].token, told[0].top[0].HasField("bytes")) == ("u", False)


def test_an_answer_without_log_probabilities_has_none() -> None:
    choice = chat.Choice(index=0, text="x", stop_reason=chat.StopReason.STOP, native_stop_reason="stop")
    encoded = codec.encode_completion(Completion(response=chat.ChatResponse(choices=(choice,)), outcome=outcome()))
    assert not encoded.choices[0].HasField("logprobs")


@pytest.mark.parametrize("reason", chat.StopReason)
def test_every_stop_reason_has_a_word_on_the_wire(reason: chat.StopReason) -> None:
    ends = (chat.ChoiceEnd(choice=1, stop_reason=reason, native_stop_reason="native"),)
    end = codec.encode_ended(Ended(ends=ends, outcome=outcome())).finished.ends[0]
    assert pb.FinishReason.Name(end.finish_reason) == f"FINISH_REASON_{reason.name}"
    assert (end.choice, end.native_finish_reason) == (1, "native")


def test_an_outcome_tells_zero_from_absent() -> None:
    unknown = Cost(state="unknown", upper_bound_usd=Decimal("0.5"), reason="broken")
    encoded = codec.encode_outcome(
        Outcome(
            request_id="r",
            debit_id="d",
            ended="uncertain",
            attempts=(
                AttemptReport(
                    number=1,
                    route=ROUTE,
                    status="timeout",
                    error_class="network",
                    code="first_byte_timeout",
                    http_status=200,
                    message="nothing came",
                    cost=unknown,
                ),
            ),
            usage=Usage(output_total=0, cache_write_1h=3),
            cost=unknown,
            settlement="settled",
            counters=Counters(day_usd=Decimal("1E-7"), total_usd=Decimal(20), day=date(2026, 2, 3)),
            warnings=("seed was dropped",),
        )
    )
    assert not encoded.cost.HasField("usd")
    assert encoded.cost.upper_bound_usd == "0.5"
    assert encoded.usage.HasField("output_tokens")
    assert not encoded.usage.HasField("input_tokens")
    assert encoded.usage.cache_write_1h_tokens == 3
    assert not encoded.counters.HasField("session_usd")
    assert (encoded.counters.day_usd, encoded.counters.total_usd, encoded.counters.day) == (
        "0.0000001",
        "20",
        "2026-02-03",
    )
    assert encoded.route.provider == "openai"
    assert (encoded.attempts[0].code, encoded.attempts[0].http_status) == ("first_byte_timeout", 200)


def test_why_a_route_was_not_tried_is_told() -> None:
    left_out = (LeftOut(provider="p", model="m", reason="capability: images"),)
    cost = Cost(state="zero")
    told = Outcome(
        request_id="r", debit_id="d", ended="failed", attempts=(), cost=cost, settlement="settled", left_out=left_out
    )
    [out] = codec.encode_outcome(told).left_out
    assert (out.provider, out.model, out.reason) == ("p", "m", "capability: images")


def test_an_outcome_without_attempts_usage_and_counters_has_none() -> None:
    encoded = codec.encode_outcome(
        Outcome(
            request_id="r",
            debit_id="d",
            ended="failed",
            attempts=(),
            cost=Cost(state="zero", usd=Decimal(0), reason="not_dispatched"),
            settlement="pending",
        )
    )
    assert not any(encoded.HasField(name) for name in ("route", "usage", "counters"))
    assert encoded.cost.usd == "0"
