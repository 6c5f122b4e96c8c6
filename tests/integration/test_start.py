"""A start that loses its database at any of its statements ends with one error that says so, or goes on."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from admission.ids import new_id
from gateway import config, database
from gateway.app import open_gateway
from gateway.liveness import DIRECTORY
from tests.fakes.gateway_process import KEY
from tests.fakes.postgres_proxy import Action, Rule, postgres_proxy


async def test_a_start_that_loses_any_of_its_statements_ends_with_an_error_of_the_database_or_serves(
    database_url: str, tmp_path: Path
) -> None:
    toml = tmp_path / "tollbridge.toml"
    toml.write_text("[gateway]\ndrain_s = 1\n")
    settings = config.load(
        toml,
        {
            "TOLLBRIDGE_DATA_DIR": str(tmp_path / "data"),
            "TOLLBRIDGE_REST_LISTEN": "127.0.0.1:0",
            "TOLLBRIDGE_GRPC_LISTEN": "127.0.0.1:0",
            "TOLLBRIDGE_API_KEY": KEY,
        },
    )
    ended = 0
    async with postgres_proxy(database_url) as proxy:
        url = proxy.url(urlsplit(database_url).path.removeprefix("/"))
        served_in_a_row = number = 0
        # What a gateway asks when it serves comes after what its start asks.
        while served_in_a_row < 3:
            number += 1
            assert number < 100, "no start goes on"
            # A process of this host that died before, whom the start buries.
            (settings.data_dir / DIRECTORY).mkdir(parents=True, exist_ok=True)
            (settings.data_dir / DIRECTORY / str(new_id())).touch()
            proxy.rules = [Rule(action=Action.DROP_BEFORE, nth=number, times=1, commits_only=False)]
            try:
                async with open_gateway(settings, url):
                    served_in_a_row += 1
            except database.StoreUnavailable:
                ended += 1
                served_in_a_row = 0
    assert ended > 5, "the statements of a start were not met"
