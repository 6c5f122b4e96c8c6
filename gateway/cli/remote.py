"""
A running gateway, as the commands reach it: over REST, with an API key, like any other program.

Where it is follows from what is there: `--url` or `--data-dir`, TOLLBRIDGE_URL, the `ready.json` of the data directory,
or the default address. The key has no such trail: it is shown once and stored hashed, so it has to be given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import click
import httpx
import msgspec
from click.core import ParameterSource

from gateway.cli.failure import Failed

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_DATA_DIR = ".tollbridge"
#: Where the command's context keeps its `--data-dir`.
_DATA_DIR = "tollbridge.data_dir"
#: Seconds for an answer. Long polls ask for less than that.
TIMEOUT_S = 60.0

#: What to do about an error that is the same in every command.
HINTS: Mapping[str, str] = {
    "unauthenticated": (
        "Give a key with --key or TOLLBRIDGE_API_KEY. The first start of the gateway printed one, once;"
        " `tollbridge keys create NAME` makes another."
    ),
    "permission_denied": "Make a key with the scope: `tollbridge keys create NAME --scope SCOPE`.",
    "control_store_unavailable": "The gateway cannot reach its database; it recovers by itself. Try again later.",
    "range_too_wide": "Give --from and --to that are closer together, or --session, --run or --request.",
    "shutting_down": "The gateway is stopping. Try again when it has started.",
}

_F = TypeVar("_F", bound=Callable[..., Any])


def _here(context: click.Context, _parameter: click.Parameter, given: Path | None) -> None:
    context.meta[_DATA_DIR] = given


def _found(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """The `--url`, or where the gateway of the `--data-dir` is. Raises `Failed` where none runs there."""
    data_dir: Path | None = context.meta.get(_DATA_DIR)
    if data_dir is None:
        return given
    if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--url and --data-dir both say which gateway: give one of them")
    url = _running(data_dir)
    if url is None:
        raise Failed(
            f"no gateway runs on {data_dir}", hint="Start one with `tollbridge serve --data-dir`, or give --url."
        )
    return url


def options(command: _F) -> _F:
    """The options of every command that talks to a running gateway: `as_json`, `key` and `url`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of tables."),
        click.option("--key", envvar="TOLLBRIDGE_API_KEY", show_envvar=True, metavar="KEY", help="The API key."),
        click.option(
            "--url",
            envvar="TOLLBRIDGE_URL",
            show_envvar=True,
            metavar="URL",
            callback=_found,
            help=f"The gateway. Default: the one that runs on the data directory, else {DEFAULT_URL}.",
        ),
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path, file_okay=False),
            expose_value=False,
            is_eager=True,
            callback=_here,
            help=f"The gateway that runs there. Default: TOLLBRIDGE_DATA_DIR, else {DEFAULT_DATA_DIR}.",
        ),
    ):
        command = option(command)
    return command


def find_url(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The gateway's REST address, without a slash at its end."""
    if given:
        return given.rstrip("/")
    return _running(Path(environ.get("TOLLBRIDGE_DATA_DIR") or DEFAULT_DATA_DIR)) or DEFAULT_URL


def _running(data_dir: Path) -> str | None:
    """What the gateway on this data directory says of itself."""
    with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode((data_dir / "ready.json").read_bytes())["rest"]).rstrip("/")
    return None


class Remote:
    """Calls to the gateway that end in a value or in `Failed`."""

    def __init__(self, url: str, key: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=5),
            transport=transport,
            # A proxy in the environment is for the providers' internet, not for a gateway on this machine.
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: str | int | Sequence[str] | None) -> Any:
        """The answer's JSON, its numbers exact."""
        response = self._send("GET", path, params={name: value for name, value in query.items() if value is not None})
        return decode(response.content)

    def post(
        self, path: str, content: bytes = b"", *, media_type: str = "application/json", headers: Mapping[str, str] = {}
    ) -> Any:
        response = self._send("POST", path, content=content, headers={"content-type": media_type, **headers})
        return decode(response.content)

    def put(self, path: str, content: bytes, **query: str | None) -> Any:
        params = {name: value for name, value in query.items() if value is not None}
        response = self._send("PUT", path, content=content, params=params, headers={"content-type": "application/json"})
        return decode(response.content)

    def lines(self, path: str, **query: str | int | Sequence[str] | None) -> Iterator[bytes]:
        """The lines of an answer, as they arrive."""
        rest = b""
        for piece in self.pieces(path, **query):
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
        if rest:
            yield rest

    def pieces(self, path: str, **query: str | int | Sequence[str] | None) -> Iterator[bytes]:
        """An answer as it arrives. One that breaks off is `Failed`."""
        params = {name: value for name, value in query.items() if value is not None}
        with self._reached(), self._client.stream("GET", path, params=params) as response:
            if response.status_code >= 400:
                response.read()
                raise refusal(response.status_code, response.content)
            yield from response.iter_bytes()

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        with self._reached():
            response = self._client.request(method, path, **arguments)
        if response.status_code >= 400:
            raise refusal(response.status_code, response.content)
        return response

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Failed(f"{self.url} is no URL", hint="It should look like http://127.0.0.1:8080.") from error
        except httpx.ConnectError as error:
            hint = "Start one with `tollbridge serve`, or name another with --url or TOLLBRIDGE_URL."
            raise Failed(f"no gateway answers at {self.url}", hint=hint) from error
        except httpx.TimeoutException as error:
            raise Failed(f"{self.url} did not answer in time", hint="`tollbridge groups` may say why.") from error
        except httpx.HTTPError as error:
            raise Failed(f"the connection to {self.url} broke", hint="Try again.") from error


@contextlib.contextmanager
def reach(url: str | None, key: str | None) -> Iterator[Remote]:
    remote = Remote(find_url(url), key)
    try:
        yield remote
    finally:
        remote.close()


def decode(content: bytes) -> Any:
    """JSON with exact numbers: money is never a float."""
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise Failed("the answer is not JSON: is this a gateway?", hint="Check --url.") from error


_decoder = msgspec.json.Decoder(float_hook=Decimal)


def refusal(status: int, content: bytes) -> Failed:
    """The gateway's error body as a failure of the command."""
    try:
        error = msgspec.json.decode(content)["error"]
        code, message, param = str(error["code"]), str(error["message"]), error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError):
        return Failed(f"HTTP status {status} without an error body: is this a gateway?", hint="Check --url.")
    return Failed(f"{message} ({param})" if param else message, code=code, hint=HINTS.get(code))
