"""`tollbridge serve`: the gateway itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from gateway import config, database, logs, runtime, workers
from gateway.cli.failure import Failed
from gateway.embedded import EmbeddedPostgresError
from gateway.errors import GatewayError


@click.command("serve")
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="Instead of tollbridge.toml.")
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Instead of .tollbridge.")
@click.option("--workers", "count", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes.")
@click.option("--log-level", type=click.Choice(sorted(logs.LEVELS)), default="info", show_default=True)
@click.option("--stop-with-stdin", is_flag=True, hidden=True, help="Stop when standard input ends, as at SIGTERM.")
def command(path: Path | None, data_dir: Path | None, count: int, log_level: str, stop_with_stdin: bool) -> None:
    """
    Serve until stopped: REST on 127.0.0.1:8080, gRPC on 127.0.0.1:50051, data in .tollbridge/.

    With no database configured an embedded PostgreSQL is started in the data directory. With no tollbridge.toml every
    known provider whose key is in the environment can be used. The first start prints an API key, once. Once it
    serves it prints {"event":"gateway.ready",...} with its addresses and writes the same to ready.json in the data
    directory.

    SIGTERM (or Ctrl-C) drains: nothing new is taken, what runs may end. A second one cuts that short.

    \b
    Examples:
      tollbridge serve
      OPENAI_API_KEY=... tollbridge serve --workers 4
      TOLLBRIDGE_DATABASE_URL=postgresql://... TOLLBRIDGE_REST_LISTEN=0.0.0.0:8080 tollbridge serve

    Next: `tollbridge check` says which providers are ready, `tollbridge jobs submit` gives it work.
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    write_out = logs.configure(level=log_level)
    try:
        settings = workers.load(path, data_dir)
        with runtime.runner(serving=count == 1) as runner:
            clean = runner.run(workers.serve(settings, count=count, stop_with_stdin=stop_with_stdin))
            # It has ended. Whoever is impatient now ends it without a word.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except config.ConfigFaults as faults:
        raise Failed(str(faults), hint="`tollbridge check` says the same without starting anything.") from None
    except workers.PortTaken as error:
        hint = "Choose others with TOLLBRIDGE_REST_LISTEN and TOLLBRIDGE_GRPC_LISTEN; port 0 takes a free one."
        raise Failed(str(error), hint=hint) from error
    except (workers.DataDirUnusable, workers.WorkerFailed) as error:
        raise Failed(str(error)) from error
    except (database.DatabaseError, EmbeddedPostgresError) as error:
        raise Failed(str(error), code="control_store_unavailable") from error
    except GatewayError as error:
        raise Failed(f"{error.param}: {error.message}" if error.param else error.message, code=error.code) from error
    if not clean:
        # Something still runs that did not let itself be cancelled; waiting for it is what was not wanted.
        write_out()
        os._exit(1)
