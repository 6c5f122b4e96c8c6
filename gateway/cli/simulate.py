"""`tollbridge simulate`: the simulated provider as a server of its own."""

from __future__ import annotations

import asyncio
import os

import click

from adapters.simulator.faults import split_model
from adapters.simulator.requests import BadRequest
from adapters.simulator.server import Settings, run
from gateway.cli.failure import Failed


@click.command("simulate")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0, the default, takes any free port.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--api-key", metavar="KEY", help="The one bearer token to accept. Default: any, or none.")
@click.option("--faults", default="", metavar="NAME=VALUE&...", help="How it misbehaves, from the start.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="A model that exists; repeat for more.")
def command(port: int, host: str, api_key: str | None, faults: str, models: tuple[str, ...]) -> None:
    """
    Run a provider that needs no key, answers the same to the same, and misbehaves on request: see docs/simulator.md.

    It prints its address as one JSON line. While it runs:

    \b
      POST /_control/faults          other faults, as a JSON object; ?model=NAME for one model alone
      GET  /_control/faults          what is set now
      GET  /_control/ledger          what reached it, in sums: dispatches, peak concurrency, how they ended
      GET  /_control/ledger?detail=1 one JSON line for each dispatch
      GET  /_control/export          the ledger as a provider exports its own; ?format=openai_costs&input=1&output=2
      POST /_control/reset           an empty ledger, and the faults of the start

    What most try first: latency, pace (seconds between pieces), status with retry_after, rate (a share of the calls),
    fail_first (a number), capacity (429 above it), hang=mid, die=rst, terminal=none.

    \b
    Examples:
      tollbridge simulate --port 9000
      tollbridge simulate --port 9000 --faults 'latency=0.2&status=429&rate=0.3&retry_after=2'
      tollbridge simulate --port 9000 --faults 'die=rst&die_after=5'

    \b
    Then, in tollbridge.toml:
      [providers.simulated]
      protocol = "chat_completions"
      base_url = "http://127.0.0.1:9000/v1"
      models = ["sim-fast"]
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    try:
        wanted = dict(split_model(f"?{faults}")[1]) if faults else {}
    except BadRequest as error:
        raise click.BadParameter(error.message, param_hint="--faults") from error
    settings = Settings(host=host, port=port, api_key=api_key, faults=wanted, models=models)
    try:
        asyncio.run(run(settings))
    except OSError as error:
        raise Failed(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}", hint="--port 0 takes a free one."
        ) from error
