"""A call through what `tollbridge import-litellm` made, on real sockets: routes, fallback, forced fields, an alias."""

from __future__ import annotations

import json
from decimal import Decimal

from click.testing import CliRunner

from gateway.cli import main
from tests.fakes.raw_provider import Exchange, raw_provider
from tests.fakes.whole_line import call, whole_line

CONFIG = """
model_list:
  - model_name: fast
    litellm_params:
      model: openai/first/model
      api_base: http://127.0.0.1:{down}/v1
      api_key: none
  - model_name: spare
    litellm_params:
      model: anthropic/claude-like
      api_base: http://127.0.0.1:{up}
      api_key: none
      top_k: 7
      input_cost_per_token: 0.000001
      output_cost_per_token: 0.000002
router_settings:
  num_retries: 0
  fallbacks: [{{"fast": ["spare"]}}]
  model_group_alias: {{"quick": "fast"}}
"""
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-like",
    "content": [{"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 1},
}


async def test_an_imported_configuration_serves_calls_by_its_routes_and_fallbacks(database_url, tmp_path):
    async def down(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"message":"busy"}}', status=503)

    async def up(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(ANSWER).encode())

    async with raw_provider(down) as first, raw_provider(up) as second:
        source, made = tmp_path / "config.yaml", tmp_path / "made.toml"
        source.write_text(CONFIG.format(down=first.port, up=second.port))
        done = CliRunner().invoke(main, ["import-litellm", str(source), "--output", str(made), "--strict"])
        assert done.exit_code == 0, done.output
        async with whole_line(database_url, tmp_path, made.read_text()) as line:
            served = [await line.pipeline.complete(call(name)) for name in ("fast", "quick")]
            await line.settled()
            await line.audit()
    assert [one.outcome.route and one.outcome.route.provider for one in served] == ["anthropic", "anthropic"]
    # The price of the route that served, though the model was asked for by another name.
    assert [one.outcome.attempts[-1].cost.usd for one in served] == [Decimal("0.000005")] * 2
    assert json.loads(first.requests[0].body)["model"] == "first/model"
    sent = json.loads(second.requests[0].body)
    assert (sent["model"], sent["top_k"]) == ("claude-like", 7)
    assert second.requests[0].head.startswith(b"POST /v1/messages ")
