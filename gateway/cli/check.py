"""`tollbridge check`: is the configuration usable, and what do its providers lack?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from gateway import config
from gateway.cli import tables
from gateway.cli.failure import Failed
from gateway.provider import Provider

#: Models listed before the rest is counted.
SHOWN = 4


@click.command("check")
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="Instead of tollbridge.toml.")
@click.option("--require-ready", is_flag=True, help="Fail while a provider that a model needs is not ready.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of tables.")
def command(path: Path | None, require_ready: bool, as_json: bool) -> None:
    """
    Validate the configuration without starting anything, and say which providers are ready and what each lacks.

    Every fault is listed with its file and path; one fault is enough for exit status 1. A provider is ready once its
    credentials are in the environment. With --require-ready, for deployment pipelines, it is an error as well if a
    model has a provider that is not.

    \b
    Examples:
      tollbridge check
      OPENAI_API_KEY=... tollbridge check --config tollbridge.toml --require-ready
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    try:
        settings = config.load(path)
    except config.ConfigFaults as faults:
        if as_json:
            tables.json({"ok": False, "faults": faults.faults})
        raise Failed(str(faults), hint=f"{len(faults.faults)} to mend; nothing was started.") from None
    used = {target.provider for model in settings.models.values() for target in model.targets}
    lacking = sorted(
        name for name, provider in settings.providers.items() if name in used and provider.enabled and provider.missing
    )
    if as_json:
        tables.json(
            {
                "ok": True,
                "file": str(settings.file) if settings.file else None,
                "providers": {
                    provider.id: {"ready": provider.ready, "enabled": provider.enabled, "missing": provider.missing}
                    for provider in settings.providers.values()
                },
                "models": {name: [target.provider for target in m.targets] for name, m in settings.models.items()},
                "not_ready": lacking,
            }
        )
    else:
        _show(settings)
    if require_ready and lacking:
        needs = "; ".join(f"{name} lacks {', '.join(settings.providers[name].missing)}" for name in lacking)
        raise Failed(f"not ready: {needs}", code="provider_not_ready", hint="Set them in the environment.")


def _show(settings: config.Settings) -> None:
    out = tables.console()
    out.print(f"configuration: {settings.file or 'built in (no tollbridge.toml here)'}, valid")
    out.print(f"data: {settings.data_dir}, database: {'given' if settings.database_url else 'embedded PostgreSQL'}")
    out.print()
    tables.table(
        out,
        "providers",
        ("provider", "ready", "lacks", "protocol", "capacity group", "models"),
        [
            (
                provider.id,
                _ready(provider),
                ", ".join(provider.missing) or None,
                provider.protocol,
                provider.group,
                _some(provider.models),
            )
            for provider in sorted(settings.providers.values(), key=lambda p: (not p.ready, p.id))
        ],
    )
    if settings.file is not None and settings.models:
        tables.table(
            out,
            "models",
            ("model", "providers, in order"),
            [(name, ", ".join(target.provider for target in m.targets)) for name, m in settings.models.items()],
        )
    if not any(provider.ready for provider in settings.providers.values()):
        out.print(
            "No provider is ready yet: set one of the variables above, or look at `tollbridge demo`.", style="dim"
        )


def _ready(provider: Provider) -> object:
    if not provider.enabled:
        return tables.text("off", "dim")
    return tables.text("yes", "green") if provider.ready else tables.text("no", "yellow")


def _some(names: Iterable[str]) -> str | None:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or None
