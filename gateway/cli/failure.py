"""How a command says that it could not do what it was asked for: one line with a stable code, one with what to do."""

from __future__ import annotations

from typing import IO, Any

import click
from typing_extensions import override


class Failed(click.ClickException):
    """Exit status 1. `code` is the gateway's where it has one; `hint` says what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint

    @override
    def show(self, file: IO[Any] | None = None) -> None:
        about = f"{self.code}: {self.message}" if self.code else self.message
        click.echo(f"error: {about}", file=file, err=file is None)
        if self.hint:
            click.echo(f"  {self.hint}", file=file, err=file is None)
