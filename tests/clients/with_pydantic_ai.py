"""Pydantic AI: its models of OpenAI, over Chat Completions and over Responses, and of Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.running import KEY, URL, main, raising, scenario

MODELS = ("chat", "claude", "responses")
QUESTION = "what is a bridge?"


#: One connection pool for each key.
openai_provider = cache(lambda key: OpenAIProvider(base_url=f"{URL}/v1", api_key=key))
anthropic_provider = cache(lambda key: AnthropicProvider(base_url=URL, api_key=key))


def completions(model: str, key: str = KEY) -> Model:
    return OpenAIChatModel(model, provider=openai_provider(key))


def responses(model: str, key: str = KEY) -> Model:
    return OpenAIResponsesModel(model, provider=openai_provider(key))


def messages(model: str, key: str = KEY) -> Model:
    # What a model can do it knows by the vendor's names of them.
    able = ModelProfile(supports_json_schema_output=True)
    return AnthropicModel(model, provider=anthropic_provider(key), profile=able)


KINDS = (completions, responses, messages)


def every() -> Iterator[tuple[str, Model]]:
    """Each of its models over each protocol of a provider."""
    for kind, model in product(KINDS, MODELS):
        yield f"{kind.__name__} {model}", kind(model)


class Place(pydantic.BaseModel):
    """A place."""

    name: str
    inhabitants: int


@scenario
async def a_chat_is_answered_with_its_usage() -> None:
    for which, model in every():
        result = await Agent(model, instructions="You are an engineer.").run(QUESTION)
        assert result.output, which
        assert result.usage.output_tokens > 0, which
        again = await Agent(model).run("and a river?", message_history=result.all_messages())
        assert again.output, which


@scenario
async def a_stream_is_the_whole_answer_with_its_usage() -> None:
    for which, model in every():
        agent = Agent(model)
        whole = (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == whole, which
        assert streamed.usage.output_tokens > 0, which


@scenario
async def tools_are_called_and_their_results_taken_back() -> None:
    for which, model in every():
        agent = Agent(model)

        @agent.tool_plain
        def weather(place: str) -> str:
            """The weather of a place."""
            return f"sunny in {place}"

        result = await agent.run("what is the weather in Bern?")
        assert "sunny in" in result.output, which
        [call] = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
        assert call.tool_name == "weather", which
        async with agent.run_stream("what is the weather in Bern?") as streamed:
            assert await streamed.get_output() == result.output, which


@scenario
async def structured_output_is_what_was_asked_for() -> None:
    for which, model in every():
        for output in (ToolOutput(Place), NativeOutput(Place)):
            agent: Agent[None, Place] = Agent(model, output_type=output)
            assert isinstance((await agent.run("what is Bern?")).output, Place), which
            async with agent.run_stream("what is Bern?") as streamed:
                assert isinstance(await streamed.get_output(), Place), which


@scenario
async def every_error_is_the_clients_own() -> None:
    async def plain(agent: Agent) -> None:
        await agent.run(QUESTION)

    async def stream(agent: Agent) -> None:
        async with agent.run_stream(QUESTION) as streamed:
            await streamed.get_output()

    for kind, ask in product(KINDS, (plain, stream)):
        for model, status in (
            (kind("no-such-model"), 404),
            (kind("chat", "tb_nobody"), 401),
        ):
            with raising(ModelHTTPError, exactly=False) as caught:
                await ask(Agent(model))
            assert caught.error.status_code == status
        with raising(ModelHTTPError, exactly=False) as caught:
            await ask(Agent(kind("chat"), model_settings={"temperature": -3}))
        assert caught.error.status_code == 400
        assert "temperature" in str(caught.error.body)


@scenario
async def a_stream_that_is_cut_raises() -> None:
    for kind, model in product(KINDS, ("cut", "claude-cut")):
        seen = ""
        with raising(ModelAPIError, exactly=False):
            async with Agent(kind(model)).run_stream(QUESTION) as streamed:
                async for piece in streamed.stream_text(delta=True, debounce_by=None):
                    seen += piece
        assert seen, (kind, model)


if __name__ == "__main__":
    main("pydantic-ai-slim")
