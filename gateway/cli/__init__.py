"""
The command line, `tollbridge`.

Each command is a module of its own, imported when it is called: help and completion must not wait for the imports of a
server that is not going to start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import threading
from collections.abc import Iterator

import click
from typing_extensions import override

#: In the order in which a newcomer needs them: the module of the command, and its line in the list.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("gateway.cli.demo", "See it work: 200 requests, no provider key, nothing to configure."),
    "serve": ("gateway.cli.serve", "Serve until stopped."),
    "check": ("gateway.cli.check", "Validate the configuration; say which providers are ready."),
    "import-litellm": ("gateway.cli.import_litellm", "Make a tollbridge.toml of a LiteLLM proxy's configuration."),
    "keys": ("gateway.cli.keys", "Create, list and revoke API keys."),
    "jobs": ("gateway.cli.jobs", "Submit work as JSONL; follow it; fetch results."),
    "groups": ("gateway.cli.groups", "Who occupies capacity, who waits and why."),
    "sessions": ("gateway.cli.sessions", "What a session has used, and what it may cost."),
    "usage": ("gateway.cli.usage", "Tokens and cost by session, day and in total."),
    "prices": ("gateway.cli.prices", "What models cost, which have no price, and a newer list of prices."),
    "invocations": ("gateway.cli.invocations", "What each attempt used, cost and took; as CSV and JSONL, too."),
    "stats": ("gateway.cli.stats", "Cost, rates and latencies of a range, by what you like."),
    "simulate": ("gateway.cli.simulate", "A provider that needs no key and misbehaves on request."),
}


@contextlib.contextmanager
def _interrupted_without_a_word() -> Iterator[None]:
    """An import that is interrupted leaves nothing behind, and has nothing to say."""
    # Only the main thread may say what becomes of signals, and only it is interrupted.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        # In the midst of the start of this process, there was none of Python's own.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is signal.SIG_DFL else before)


class Commands(click.Group):
    """Knows its commands by name and imports one only to run it."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        # What is imported stays: looking through it for garbage, again and again, is a sixth of the time it takes.
        gc.disable()
        try:
            with _interrupted_without_a_word():
                command: click.Command = importlib.import_module(module).command
        finally:
            gc.enable()
        gc.freeze()
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"there is no command {args[0]!r}; there are: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        metadata = importlib.import_module("importlib.metadata")
        click.echo(f"tollbridge {metadata.version('tollbridge')}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`tollbridge COMMAND --help` explains each with an example. Exit status: 0 done, 1 failed, 2 wrong usage.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Say which version."
)
def main() -> None:
    """
    Tollbridge stands between your programs and your model providers.

    It shares each provider's capacity exactly among all processes, fails over before the first token, and
    settles every request to a cost.

    \b
    First steps:
      tollbridge demo          see it work
      tollbridge serve         serve; the first start prints an API key
      tollbridge check         what your configuration makes of your provider keys
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
