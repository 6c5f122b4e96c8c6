"""Instructor: objects out of models, over the tools and the JSON of OpenAI's APIs and of Anthropic's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, ClassVar, Literal

import anthropic
import instructor
import openai
import pydantic
from anthropic import Anthropic, AsyncAnthropic
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI

from tests.clients.running import KEY, URL, main, raising, scenario

MODELS = ("chat", "claude", "responses")
# It logs each error that it raises.
logging.getLogger("instructor").setLevel(logging.CRITICAL)
ASKED: list[Any] = [{"role": "user", "content": "what is Bern?"}]
OF_OPENAI = (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
OF_ANTHROPIC = (Mode.ANTHROPIC_TOOLS,)


@cache
def client(mode: Mode, *, key: str = KEY) -> Any:
    if mode not in OF_ANTHROPIC:
        return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0), mode=mode)
    return instructor.from_anthropic(Anthropic(base_url=URL, api_key=key, max_retries=0), mode=mode)


def asked(model: str) -> dict[str, Any]:
    return {"model": model, "messages": ASKED, "max_tokens": 500}


def every() -> Iterator[tuple[Mode, str, Any]]:
    """Each way to ask over each protocol of a provider, with its client."""
    for mode in (*OF_OPENAI, *OF_ANTHROPIC):
        own = client(mode)
        for model in MODELS:
            yield mode, model, own


class Place(pydantic.BaseModel):
    """A place."""

    name: str
    inhabitants: int


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    place: str
    sky: Literal["sunny", "cloudy"]


class Checked(Place):
    """A place that is wrong the first time."""

    times: ClassVar[int] = 0

    @pydantic.field_validator("name")
    @classmethod
    def second(cls, name: str) -> str:
        Checked.times += 1
        if Checked.times < 2:
            raise ValueError("try again")
        return name


@scenario
def an_object_comes_with_the_answer_it_is_from() -> None:
    for mode, model, own in every():
        place, raw = own.create_with_completion(response_model=Place, **asked(model))
        assert isinstance(place, Place), (mode, model)
        assert raw.usage, (mode, model)
        assert own.create(response_model=Weather, **asked(model)).sky, (mode, model)


@scenario
def an_object_grows_while_it_is_streamed() -> None:
    for mode, model, own in every():
        *_, last = own.create_partial(response_model=Place, **asked(model))
        whole = own.create(response_model=Place, **asked(model))
        assert last.model_dump() == whole.model_dump(), (mode, model)


@scenario
def objects_come_one_by_one_out_of_a_stream() -> None:
    for mode, model, own in every():
        places = list(own.create_iterable(response_model=Place, **asked(model)))
        assert places, (mode, model)
        assert all(isinstance(place, Place) for place in places), (mode, model)


@scenario
async def the_asynchronous_clients_work() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as one, AsyncAnthropic(base_url=URL, api_key=KEY) as two:
        for own in (instructor.from_openai(one), instructor.from_anthropic(two)):
            assert isinstance(await own.create(response_model=Place, **asked("chat")), Place)


@scenario
def what_is_wrong_is_told_to_the_model_as_the_result_of_its_call() -> None:
    for mode, model, own in every():
        Checked.times = 0
        place = own.create(response_model=Checked, max_retries=1, **asked(model))
        assert isinstance(place, Checked), (mode, model)
        assert Checked.times == 2, (mode, model)


@scenario
def more_than_one_tool_is_called() -> None:
    for model in MODELS:
        called = list(client(Mode.PARALLEL_TOOLS).create(response_model=Iterable[Place | Weather], **asked(model)))
        assert called, model


@scenario
def every_error_is_the_clients_own() -> None:
    for mode in (*OF_OPENAI, *OF_ANTHROPIC):
        vendor = openai if mode in OF_OPENAI else anthropic
        for key, model, expected in (
            (KEY, "no-such-model", vendor.NotFoundError),
            (KEY, "unwell", vendor.InternalServerError),
            ("tb_nobody", "chat", vendor.AuthenticationError),
        ):
            with raising(InstructorRetryException, exactly=False) as caught:
                client(mode, key=key).create(response_model=Place, max_retries=0, **asked(model))
            assert isinstance(caught.error.__cause__, expected), (mode, model)


if __name__ == "__main__":
    main("instructor")
