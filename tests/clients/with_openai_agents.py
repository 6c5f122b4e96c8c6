"""OpenAI's Agents SDK, over Responses, which is its default, and over Chat Completions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import openai
import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

from tests.clients.running import KEY, URL, main, raising, scenario

MODELS = ("chat", "claude", "responses")
KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
QUESTION = "what is a bridge?"


# It logs each error that it raises.
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)
client = cache(lambda key: AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0))


def agent(kind: Any, model: str, *, key: str = KEY, **more: Any) -> Agent:
    return Agent(name="Engineer", instructions="You build.", model=kind(model, client(key)), **more)


def every() -> Iterator[tuple[Any, str]]:
    """Both of its models over each protocol of a provider."""
    return product(KINDS, MODELS)


async def streamed(of: Agent, question: str) -> tuple[list[str], Any]:
    """The pieces of text, and the result."""
    result = Runner.run_streamed(of, question)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    return pieces, result


@function_tool
def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


class Place(pydantic.BaseModel):
    """A place."""

    name: str
    inhabitants: int


@scenario
async def a_chat_is_answered_with_its_usage_and_goes_on() -> None:
    for which in every():
        engineer = agent(*which)
        result = await Runner.run(engineer, QUESTION)
        assert result.final_output, which
        assert result.context_wrapper.usage.output_tokens > 0, which
        again = await Runner.run(engineer, [*result.to_input_list(), {"role": "user", "content": "and a river?"}])
        assert again.final_output, which


@scenario
async def a_stream_is_the_whole_answer() -> None:
    for which in every():
        engineer = agent(*which, model_settings=ModelSettings(include_usage=True))
        pieces, result = await streamed(engineer, QUESTION)
        assert "".join(pieces) == result.final_output == (await Runner.run(engineer, QUESTION)).final_output, which
        assert result.context_wrapper.usage.output_tokens > 0, which


@scenario
async def tools_are_called_and_their_results_taken_back() -> None:
    for which in every():
        engineer = agent(*which, tools=[weather])
        result = await Runner.run(engineer, "what is the weather in Bern?")
        assert "sunny in" in result.final_output, which
        assert [item.type for item in result.new_items].count("tool_call_output_item") == 1, which
        _, again = await streamed(engineer, "what is the weather in Bern?")
        assert again.final_output == result.final_output, which


@scenario
async def an_agent_hands_over_to_another() -> None:
    for which in every():
        builder = agent(*which)
        builder.name = "Builder"
        result = await Runner.run(agent(*which, handoffs=[builder]), QUESTION)
        assert result.last_agent is builder, which
        assert result.final_output, which


@scenario
async def structured_output_is_what_was_asked_for() -> None:
    for which in every():
        engineer = agent(*which, output_type=Place)
        assert isinstance((await Runner.run(engineer, "what is Bern?")).final_output, Place), which
        _, result = await streamed(engineer, "what is Bern?")
        assert isinstance(result.final_output, Place), which


@scenario
async def every_error_is_the_clients_own() -> None:
    for kind, ask in product(KINDS, (Runner.run, streamed)):
        with raising(openai.NotFoundError):
            await ask(agent(kind, "no-such-model"), QUESTION)
        with raising(openai.AuthenticationError):
            await ask(agent(kind, "chat", key="tb_nobody"), QUESTION)
        with raising(openai.BadRequestError) as caught:
            await ask(agent(kind, "chat", model_settings=ModelSettings(temperature=-3)), QUESTION)
        assert "temperature" in caught.error.message
        with raising(openai.InternalServerError):
            await ask(agent(kind, "unwell"), QUESTION)


@scenario
async def a_stream_that_is_cut_raises() -> None:
    for kind, model in product(KINDS, ("cut", "claude-cut")):
        result = Runner.run_streamed(agent(kind, model), QUESTION)
        with raising(openai.APIError):
            async for _ in result.stream_events():
                pass
        assert result.final_output is None, (kind, model)


if __name__ == "__main__":
    main("openai-agents")
