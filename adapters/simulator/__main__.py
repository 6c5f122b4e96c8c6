"""`python -m adapters.simulator --port N`: a simulated provider in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys

from adapters.simulator.faults import split_model
from adapters.simulator.requests import BadRequest
from adapters.simulator.server import Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes any free port")
    parser.add_argument("--api-key", default=None, help="the one bearer token to accept (default: any)")
    parser.add_argument(
        "--faults", default="", metavar="KEY=VALUE&...", help="faults for every request, from the start"
    )
    parser.add_argument("--model", action="append", default=[], help="a model that exists (default: all do)")
    given = parser.parse_args()
    try:
        faults = dict(split_model(f"?{given.faults}")[1]) if given.faults else {}
    except BadRequest as error:
        parser.error(error.message)
    settings = Settings(
        host=given.host, port=given.port, api_key=given.api_key, faults=faults, models=tuple(given.model)
    )
    asyncio.run(run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
