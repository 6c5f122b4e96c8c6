"""`tollbridge import-litellm`: from the configuration of a LiteLLM proxy to one of ours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from gateway import config
from gateway.cli import litellm_mapping, litellm_yaml, tables
from gateway.cli.failure import Failed
from gateway.cli.litellm_mapping import Fate, Note

#: Exit status where --strict finds that something was left out.
LEFT_OUT = 3


@click.command("import-litellm")
@click.argument("source", metavar="CONFIG.YAML", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--output", "-o", default=config.FILE_NAME, show_default=True, help="Where to; `-` is standard output.")
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@click.option(
    "--strict", is_flag=True, help="Exit status 3 if anything was left out. The file is written all the same."
)
def command(source: Path, output: str, force: bool, strict: bool) -> None:
    """
    Write a tollbridge.toml that does what the configuration of a LiteLLM proxy says, as far as that can be said here.

    What became of each entry is listed on standard error, with the place where it stands: carried over, changed in
    meaning, left out (with the reason and what to do), or not needed. No secret is written: a key that stands in clear
    is named by the variable to put it into. docs/migration.md explains the differences.

    \b
    Exit status: 0 written; 1 not written; 2 wrong usage; 3 written, and with --strict something was left out.

    \b
    Examples:
      tollbridge import-litellm config.yaml
      tollbridge import-litellm config.yaml --output new/tollbridge.toml --strict
      tollbridge check --config new/tollbridge.toml
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    target = None if output == "-" else Path(output)
    try:
        read = litellm_yaml.read(source)
    except litellm_yaml.Unreadable as error:
        raise Failed(str(error)) from None
    if target is not None and target.exists() and not force:
        raise Failed(f"{target} is there already", hint="Name another --output, or use --force.")
    made = litellm_mapping.imported(read, source.name)
    _show(made.notes)
    if not made.models:
        raise Failed(f"{source} has no model that could be carried over: nothing was written")
    _check(made.toml)
    if target is None:
        click.echo(made.toml, nl=False)
    else:
        try:
            target.write_text(made.toml, encoding="utf-8")
        except OSError as error:
            raise Failed(f"{target} cannot be written: {error.strerror}") from None
        click.echo(f"{target}: {made.models} models. Next: tollbridge check --config {target}", err=True)
    if strict and any(note.fate is Fate.LEFT_OUT for note in made.notes):
        raise click.exceptions.Exit(LEFT_OUT)


def _check(toml: str) -> None:
    """What was made must be a configuration. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="tollbridge-") as directory:
        file = Path(directory, config.FILE_NAME)
        file.write_text(toml, encoding="utf-8")
        try:
            config.load(file, {})
        except config.ConfigFaults as error:
            faults = "; ".join(f"{fault.path}: {fault.reason}" for fault in error.faults)
            raise Failed(f"what it says cannot be said here: {faults}", hint="Nothing was written.") from None


def _show(notes: Sequence[Note]) -> None:
    out = tables.console(stderr=True)
    rows = [
        (_coloured(note.fate), note.path or "-", os.path.relpath(note.place) if note.place else "-", note.said)
        for note in notes
    ]
    tables.table(out, "what became of it", ("", "entry", "at", "as what, or why not"), rows)
    counts = {fate: sum(note.fate is fate for note in notes) for fate in Fate}
    out.print(", ".join(f"{count} {fate.value}" for fate, count in counts.items() if count))


def _coloured(fate: Fate) -> object:
    style = {Fate.CARRIED: "green", Fate.CHANGED: "yellow", Fate.LEFT_OUT: "red"}.get(fate, "dim")
    return tables.text(fate.value, style)
