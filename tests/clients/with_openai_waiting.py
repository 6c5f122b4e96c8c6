"""OpenAI's own client at a gateway that says early, and often, that it still waits for the provider."""

from __future__ import annotations

import openai
from openai import OpenAI

from tests.clients.running import KEY, URL, main, provider, raising, scenario

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
#: The provider holds back its answer until its faults are set again: nothing here hangs on how long anything takes.
ASKED = {"model": "late", "messages": [{"role": "user", "content": "what is a bridge?"}]}
WAITING = ": waiting"


@scenario
def comments_keep_a_slow_stream_open() -> None:
    provider("faults", {"hold": True}, model="sim-late")
    with client.chat.completions.with_streaming_response.create(stream=True, **ASKED) as streamed:
        lines = streamed.iter_lines()
        seen = [next(lines) for _ in range(6)]
        assert seen == [WAITING, ""] * 3
        provider("faults", {}, model="sim-late")
        seen = [line for line in lines if line]
    assert [line for line in seen if line.startswith("data: {")]
    assert seen[-1] == "data: [DONE]"


@scenario
def comments_do_not_disturb() -> None:
    provider("faults", {"hold": True}, model="sim-late")
    # It returns with the status, and that came before the provider's.
    stream = client.chat.completions.create(stream=True, **ASKED)
    provider("faults", {}, model="sim-late")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@scenario
def an_error_after_comments_is_the_clients_own() -> None:
    provider("faults", {"hold": True, "status": 400}, model="sim-late")
    stream = client.chat.completions.create(stream=True, **ASKED)
    provider("faults", {}, model="sim-late")
    with raising(openai.APIError) as caught:
        list(stream)
    assert caught.error.code == "upstream_rejected"


if __name__ == "__main__":
    main("openai", alone=True)
