"""
What the simulated model says: prose about the question, tool calls, or JSON for a schema.

A pure function of the model, the messages and the seed. So a test knows the answer beforehand, a retried request gets
the same one, and a demo still reads like a conversation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from adapters.simulator import schema, tokens
from adapters.simulator.requests import AllowedTools, BadRequest, Message, NamedChoice, Request, Tool

Kind = Literal["text", "reasoning", "refusal", "call", "arguments"]

#: How much of a question or a tool's result is quoted.
_QUOTE_TOKENS = 24
_RESULT_TOKENS = 48
_MOST_CALLS = 4

#: Words that say nothing of what a question is about.
_STOP_WORDS = re.compile(
    r"about|after|again|also|and|any|are|because|been|before|being|between|both|but|can|could|did|does|doing|down|each|"
    r"for|from|further|give|had|has|have|having|here|how|into|its|just|like|make|more|most|must|need|not|now|off|once|"
    r"only|other|our|out|over|own|please|same|she|should|some|such|than|that|the|their|them|then|there|these|they|this|"
    r"those|through|tell|too|under|until|use|very|was|were|what|when|where|which|while|who|whom|why|will|with|would|"
    r"you|your",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_][\w'-]{2,}")
_BRIEF = re.compile(r"\b(brief|briefly|short|shortly|concise|concisely|one sentence|terse)\b", re.IGNORECASE)
_SYMBOL = re.compile(r"[\U0001F000-\U0001FAFF\u2600-\u27BF\u2028\u2029]")
_NAME_PARTS = re.compile(r"[a-z]{3,}")

_OPENINGS = (
    "Here is a short answer to “{quote}”.",
    "You asked: “{quote}”. Let us take it step by step.",
    "Good question. “{quote}” comes down to a few points.",
    "In short, on “{quote}”:",
)
_POINTS = (
    "Start with {a}: it decides most of what follows, and it is the part that is easiest to get wrong.",
    "Then look at {a} together with {b}, since one rarely changes without the other.",
    "Measure {a} before and after, so that the effect of {b} can be told apart from chance.",
    "Keep {a} simple at first; add {b} only where it earns its place.",
    "Write down what you expect of {a}, and compare it with what {b} really does.",
    "Leave room for {a} to change, because {b} usually does.",
)
_CLOSINGS = (
    "If {a} matters most to you, begin there and leave the rest for later.",
    "That covers {a} and {b}; ask on if you want an example.",
    "With {a} settled, the remaining choices are small ones.",
)
_UNICODE_SAMPLE = (
    " Größe: 5 µm, 東京タワー 🗼, e\u0301 in two code points, 👩\u200d👩\u200d👧 joined, \u2028 a line separator, "
    "\u0085 a next line, “quotes” \\ and a tab\t."
)


class Piece(NamedTuple):
    """One token of an answer: what a stream sends at a time."""

    kind: Kind
    text: str
    #: Which tool call it belongs to.
    call: int = 0
    #: On the piece that opens a call: its id.
    call_id: str = ""


class Run(NamedTuple):
    """Tokens of one kind in a row."""

    kind: Kind
    tokens: list[str]
    call: int = 0
    call_id: str = ""


class Choice(msgspec.Struct, frozen=True):
    runs: list[Run]
    finish_reason: str

    def tokens(self, kind: Kind | None = None) -> int:
        return sum(len(run.tokens) for run in self.runs if kind in {None, run.kind})

    def text(self, kind: Kind) -> str:
        return "".join("".join(run.tokens) for run in self.runs if run.kind == kind)

    def calls(self) -> Iterator[tuple[str, str, str]]:
        """Id, name and arguments of each tool call."""
        for start in self.runs:
            if start.kind == "call":
                arguments = (
                    "".join(run.tokens) for run in self.runs if run.kind == "arguments" and run.call == start.call
                )
                yield start.call_id, start.tokens[0], "".join(arguments)

    def pieces(self) -> Iterator[Piece]:
        for kind, texts, call, call_id in self.runs:
            for text in texts:
                yield Piece(kind, text, call, call_id)


class Answer(msgspec.Struct, frozen=True):
    model: str
    choices: list[Choice]
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    #: Of the prompt, of images and of sound; of the answer, of sound.
    image_tokens: int = 0
    audio_tokens: int = 0
    audio_out_tokens: int = 0
    #: That a tool of the provider's own made.
    searches: int = 0
    #: None: the standard one.
    service_tier: str | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens() for choice in self.choices)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the request's faults want of the content."""

    #: Exactly so many tokens of text in each choice.
    chunks: int | None = None
    #: Text of so many bytes, in tokens of 16 KiB.
    huge: int | None = None
    unicode: bool = False
    #: Tokens of reasoning before the answer.
    reasoning: int = 0
    #: Tokens of the prompt that count as read from a cache.
    cached: int = 0
    image: int = 0
    audio: int = 0
    audio_out: int = 0
    searches: int = 0
    service_tier: str | None = None
    refusal: bool = False


PLAIN = Shape()


def taking_turns(answer: Answer, *, whole_arguments: bool) -> Iterator[tuple[int, Piece, int]]:
    """
    The pieces of all choices, one of each in turn: the choice's index, the piece, its tokens. The arguments of one call
    come in one piece where that is asked for.
    """
    queues = [list(_queued(choice, whole_arguments)) for choice in answer.choices]
    for turn in range(max(map(len, queues), default=0)):
        for index, queue in enumerate(queues):
            if turn < len(queue):
                yield index, *queue[turn]


def _queued(choice: Choice, whole_arguments: bool) -> Iterator[tuple[Piece, int]]:
    if not whole_arguments:
        return ((piece, 1) for piece in choice.pieces())
    return (
        (Piece(run.kind, "".join(texts), run.call, run.call_id), len(texts))
        for run in choice.runs
        for texts in ([run.tokens] if run.kind == "arguments" else [[text] for text in run.tokens])
    )


def answer(request: Request, model: str, shape: Shape = PLAIN) -> Answer:
    """The answer to a request. `model` is its name without fault settings. Raises `BadRequest`."""
    prompt_tokens = tokens.prompt(request)
    choices = [_choice(request, _Prompt.of(request, model, index), shape) for index in range(request.n or 1)]
    return Answer(
        model=model,
        choices=choices,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(shape.cached, prompt_tokens),
        reasoning_tokens=sum(choice.tokens("reasoning") for choice in choices) if shape.reasoning else 0,
        image_tokens=min(shape.image, prompt_tokens),
        audio_tokens=min(shape.audio, prompt_tokens),
        audio_out_tokens=min(shape.audio_out, sum(choice.tokens() for choice in choices)),
        searches=shape.searches,
        service_tier=shape.service_tier,
    )


def last_question(messages: Sequence[Message]) -> str:
    """The text of the last user message."""
    return next((message.text for message in reversed(messages) if message.role == "user"), "")


class _Prompt(msgspec.Struct, frozen=True):
    digest: bytes
    system: str
    question: str
    #: Name and text of each tool result after the last assistant message.
    results: list[tuple[str, str]]

    @classmethod
    def of(cls, request: Request, model: str, index: int) -> _Prompt:
        said = [
            (
                message.role,
                message.text,
                [(call.function.name, call.function.arguments) for call in message.tool_calls or ()],
            )
            for message in request.messages
        ]
        names = {call.id: call.function.name for message in request.messages for call in message.tool_calls or ()}
        results: list[tuple[str, str]] = []
        for message in reversed(request.messages):
            if message.role != "tool":
                break
            results.insert(0, (names.get(message.tool_call_id or "", "the tool"), message.text))
        return cls(
            digest=hashlib.blake2b(msgspec.json.encode((model, said, request.seed, index)), digest_size=32).digest(),
            system=" ".join(m.text for m in request.messages if m.role in {"system", "developer"}),
            question=last_question(request.messages),
            results=results,
        )

    def draw(self, place: int, among: int) -> int:
        return self.digest[place % 32] % among

    def keywords(self) -> list[str]:
        words = dict.fromkeys(word for word in _WORD.findall(self.question[:4000]) if not _STOP_WORDS.fullmatch(word))
        first = self.question.split(maxsplit=1)[0] if words else ""
        telling = sorted((word for word in words if word != first), key=len, reverse=True)[:6]
        return telling if len(telling) > 1 else [*telling, "the question", "its context"]


def _choice(request: Request, prompt: _Prompt, shape: Shape) -> Choice:
    runs: list[Run] = []
    if shape.reasoning:
        runs.append(Run("reasoning", _exactly(_thoughts(prompt), shape.reasoning)))
    finish = "stop"
    called = [] if shape.refusal or shape.huge or shape.chunks else _calls(request, prompt)
    if shape.refusal:
        runs.append(Run("refusal", tokens.split("I'm sorry, but I can't help with that.")))
    elif called:
        for number, (tool, arguments) in enumerate(called):
            call_id = "call_" + hashlib.blake2b(prompt.digest + bytes([number]), digest_size=12).hexdigest()
            runs.append(Run("call", [tool.function.name], number, call_id))
            runs.append(Run("arguments", tokens.split(arguments), number))
        finish = "tool_calls"
    elif shape.huge:
        runs.append(Run("text", _huge(shape.huge)))
    else:
        runs.append(Run("text", _said(request, prompt, shape)))
    limit = request.output_limit
    if limit is not None and limit < sum(len(run.tokens) for run in runs):
        return Choice(list(_cut(runs, limit)), "length")
    return Choice(runs, finish)


def _cut(runs: list[Run], limit: int) -> Iterator[Run]:
    for run in runs:
        if limit:
            yield run._replace(tokens=run.tokens[:limit])
            limit -= min(limit, len(run.tokens))


def _said(request: Request, prompt: _Prompt, shape: Shape) -> list[str]:
    form = request.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        text = _json(form.json_schema.schema or {}, prompt)
    elif form is not None and form.type == "json_object":
        text = msgspec.json.encode({"answer": _prose(prompt), "keywords": prompt.keywords()}).decode()
    else:
        text = _prose(prompt)
        if shape.unicode:
            text += _UNICODE_SAMPLE
    if shape.chunks:
        text = "".join(_exactly(text, shape.chunks))
    cuts = [at for at in (text.find(stop) for stop in request.stops) if at >= 0]
    return tokens.split(text[: min(cuts)] if cuts else text)


def _prose(prompt: _Prompt) -> str:
    words = prompt.keywords()
    quote = "".join(tokens.split(prompt.question)[:_QUOTE_TOKENS]).strip().rstrip(".") or "nothing in particular"

    def fill(template: str, place: int) -> str:
        first = prompt.draw(place, len(words))
        return template.format(quote=quote, a=f"“{words[first]}”", b=f"“{words[(first + 1) % len(words)]}”")

    parts: list[str] = []
    if prompt.system:
        told = "".join(tokens.split(prompt.system)[:12]).strip()
        parts.append(f"As instructed ({told}), here is my answer.")
    if prompt.results:
        for name, result in prompt.results:
            returned = "".join(tokens.split(result)[:_RESULT_TOKENS]).strip()
            parts.append(f"{name} returned: {returned}.")
        parts.append(f"So, on “{quote}”: that is the answer.")
        return " ".join(parts)
    parts.append(fill(_OPENINGS[prompt.draw(0, len(_OPENINGS))], 1))
    closing = fill(_CLOSINGS[prompt.draw(12, len(_CLOSINGS))], 13)
    symbols = _SYMBOL.findall(prompt.question)
    if symbols:
        closing += " " + "".join(symbols[:4])
    if _BRIEF.search(prompt.system):
        return " ".join([*parts, closing])
    first = prompt.draw(2, len(_POINTS))
    points = [_POINTS[(first + step) % len(_POINTS)] for step in range(2 + prompt.draw(3, 3))]
    listed = [f"{number}. {fill(point, 4 + number)}" for number, point in enumerate(points, 1)]
    return "\n".join([" ".join(parts), *listed, closing])


def _thoughts(prompt: _Prompt) -> str:
    words = prompt.keywords()
    return (
        f"The user wants to know about {words[0]}. I should consider {' and '.join(words[:3])} first. "
        f"Then weigh what speaks for and against, and answer plainly. "
    )


def _exactly(text: str, number: int) -> list[str]:
    """So many tokens: the text cut, or said again."""
    if not text.endswith(" "):
        text += " "
    base = tokens.split(text.rstrip() + " " + text.lstrip())
    once = tokens.split(text.rstrip())
    if number <= len(once):
        return once[:number]
    again = base[len(once) : -1] if base[-1].isspace() else base[len(once) :]
    made = list(once)
    while len(made) < number:
        made += again
    return made[:number]


def _huge(size: int) -> list[str]:
    block = 16 * 1024
    whole, rest = divmod(size, block)
    made = [" " + "x" * (block - 1)] * whole
    return [*made, "."] if rest == 1 else [*made, " " + "y" * (rest - 1)] if rest else made


def _json(wanted: dict[str, object], prompt: _Prompt) -> str:
    try:
        value = schema.instance(wanted, schema.Clues.of(prompt.question))
    except schema.Unsatisfiable:
        raise BadRequest(
            "Invalid schema for response_format: no value can satisfy it.",
            param="response_format",
            code="invalid_json_schema",
        ) from None
    return msgspec.json.encode(value).decode()


def _calls(request: Request, prompt: _Prompt) -> list[tuple[Tool, str]]:
    """The tools to call, with arguments as JSON text; none for an answer in words."""
    tools = request.tools or []
    choice = request.tool_choice or "auto"
    must = choice == "required"
    if isinstance(choice, NamedChoice):
        match choice.allowed_tools:
            case AllowedTools(mode=mode, tools=allowed):
                names = {str((one.get("function") or {}).get("name")) for one in allowed}
                tools = [tool for tool in tools if tool.function.name in names]
                must = mode == "required"
            case None:
                tools = [t for t in tools if choice.function is not None and t.function.name == choice.function.name]
                must = True
    if not tools or choice == "none" or (prompt.results and not must):
        return []
    asked = set(_NAME_PARTS.findall(prompt.question.lower()))
    wanted = [tool for tool in tools if asked & _subjects(tool)] or tools[:1]
    clues = schema.Clues.of(prompt.question)
    parallel = request.parallel_tool_calls is not False
    if len(wanted) == 1 and parallel and len(clues.names) > 1 and _takes_a_name(wanted[0]):
        asked_of = [(wanted[0], msgspec.structs.replace(clues, names=[name])) for name in clues.names]
    else:
        asked_of = [(tool, clues) for tool in wanted]
    return [(tool, _arguments(tool, own)) for tool, own in asked_of[: _MOST_CALLS if parallel else 1]]


def _subjects(tool: Tool) -> set[str]:
    """The words of a tool's name, without the verbs that every tool has."""
    return set(_NAME_PARTS.findall(tool.function.name.lower())) - {
        "get",
        "set",
        "current",
        "find",
        "make",
        "the",
        "new",
    }


def _takes_a_name(tool: Tool) -> bool:
    required = (tool.function.parameters or {}).get("required") or []
    properties = (tool.function.parameters or {}).get("properties") or {}
    texts = [
        name for name in required if isinstance(properties.get(name), dict) and properties[name].get("type") == "string"
    ]
    return len(texts) == 1 and not {"enum", "format"} & set(properties[texts[0]])


def _arguments(tool: Tool, clues: schema.Clues) -> str:
    wanted = tool.function.parameters
    if not wanted:
        return "{}"
    try:
        value = schema.instance({"type": "object", **wanted}, clues)
    except schema.Unsatisfiable:
        raise BadRequest(
            f"Invalid schema for function '{tool.function.name}': no value can satisfy it.",
            param="tools",
            code="invalid_function_parameters",
        ) from None
    return msgspec.json.encode(value).decode()
