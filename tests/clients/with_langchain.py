"""LangChain: its models of OpenAI, over Chat Completions and over Responses, and of Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import product
from operator import add
from typing import Any

import anthropic
import openai
import pydantic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.running import KEY, URL, main, raising, scenario

MODELS = ("chat", "claude", "responses")
QUESTION = "what is a bridge?"


def completions(model: str, **more: Any) -> ChatOpenAI:
    told = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(model=model, **told | more)


def responses(model: str, **more: Any) -> ChatOpenAI:
    return completions(model, use_responses_api=True, **more)


def messages(model: str, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(model=model, **{"base_url": URL, "api_key": KEY, "max_retries": 0} | more)


#: Each of its models with the client that it stands on, whose exceptions come through.
VENDORS = {completions: openai, responses: openai, messages: anthropic}


def every() -> Iterator[tuple[str, Any]]:
    """Each of its models over each protocol of a provider."""
    for kind in VENDORS:
        for model in MODELS:
            yield f"{kind.__name__} {model}", kind(model)


@tool
def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


class Place(pydantic.BaseModel):
    """A place."""

    name: str
    inhabitants: int


@scenario
def a_chat_is_answered_with_its_usage() -> None:
    for which, model in every():
        answer = model.invoke([SystemMessage("You are an engineer."), HumanMessage(QUESTION)])
        assert answer.text, which
        assert answer.usage_metadata["output_tokens"] > 0, which


@scenario
def a_stream_is_the_whole_answer_with_its_usage() -> None:
    for which, model in every():
        whole = reduce(add, model.stream(QUESTION))
        assert whole.text == model.invoke(QUESTION).text, which
        assert whole.usage_metadata["output_tokens"] > 0, which


@scenario
async def the_asynchronous_methods_work() -> None:
    for which, model in every():
        whole = await model.ainvoke(QUESTION)
        assert "".join([chunk.text async for chunk in model.astream(QUESTION)]) == whole.text, which


@scenario
def tools_are_called_and_their_results_taken_back() -> None:
    asked = HumanMessage("what is the weather in Bern?")
    for which, model in every():
        able = model.bind_tools([weather])
        answer = able.invoke([asked])
        [call] = answer.tool_calls
        assert call["name"] == "weather", which
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert "sunny in" in able.invoke([asked, answer, result]).text, which
        streamed = reduce(add, able.stream([asked]))
        assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("weather", call["args"])], which
        assert "sunny in" in able.invoke([asked, streamed, weather.invoke(streamed.tool_calls[0])]).text, which


@scenario
def structured_output_is_what_was_asked_for() -> None:
    for which, model in every():
        for method in ("json_schema", "function_calling"):
            place = model.with_structured_output(Place, method=method).invoke("what is Bern?")
            assert isinstance(place, Place), (which, method)


@scenario
def embeddings_come_in_order() -> None:
    embed = OpenAIEmbeddings(model="embed", base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False)
    one, two = embed.embed_documents(["a bridge", "a river"])
    assert len(one) == len(two) == len(embed.embed_query("a bridge"))
    assert one != two


@scenario
def every_error_is_the_clients_own() -> None:
    asked = (lambda model: model.invoke(QUESTION), lambda model: list(model.stream(QUESTION)))
    for (kind, vendor), ask in product(VENDORS.items(), asked):
        with raising(vendor.NotFoundError, exactly=False):
            ask(kind("no-such-model"))
        with raising(vendor.BadRequestError, exactly=False):
            ask(kind("chat", temperature=-3))
        with raising(vendor.InternalServerError, exactly=False):
            ask(kind("unwell"))
        with raising(vendor.AuthenticationError, exactly=False):
            ask(kind("chat", api_key="tb_nobody"))


@scenario
def a_stream_that_is_cut_raises() -> None:
    for (kind, vendor), model in product(VENDORS.items(), ("cut", "claude-cut")):
        seen: list[str] = []
        with raising(vendor.APIError, exactly=False):
            seen.extend(chunk.text for chunk in kind(model).stream(QUESTION))
        assert "".join(seen), (kind, model)


if __name__ == "__main__":
    main("langchain-openai", "langchain-anthropic")
