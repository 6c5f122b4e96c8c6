"""What the documents say of keys, codes and files must be what the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pydantic
import pytest

from gateway import config, tables
from gateway.errors import STATUS, Code
from gateway.jobs.settings import JobsSettings
from gateway.rest.fields import FIELDS

ROOT = Path(__file__).parents[2]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
PACKAGES = ("gateway", "admission", "adapters", "metering")
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

SECTIONS: dict[str, type[pydantic.BaseModel | msgspec.Struct]] = {
    "[gateway]": tables.GatewayTable,
    "[providers.<id>]": tables.ProviderTable,
    "[providers.<id>.per_model.<pattern>]": tables.RouteTable,
    "[models.<name>]": tables.ModelTable,
    "[models.<name>] providers": tables.TargetTable,
    "[roles.<name>]": tables.RoleTable,
    "[groups.<endpoint>]": tables.GroupTable,
    "[groups.<endpoint>.models.<model>]": tables.ModelLimitsTable,
    "[routing]": tables.RoutingTable,
    "[admission]": tables.AdmissionTable,
    "[metering]": tables.MeteringTable,
    "[jobs]": JobsSettings,
    "[webhooks]": tables.WebhooksTable,
    "[capture]": tables.CaptureTable,
}


def defaults(kind: type[pydantic.BaseModel | msgspec.Struct]) -> dict[str, object]:
    """Each key with its default; `...` where it has none."""
    if issubclass(kind, pydantic.BaseModel):
        # What any route may say is told once.
        told = tables.RouteTable.model_fields if kind is not tables.RouteTable else {}
        return {
            name: ... if field.is_required() else field.default
            for name, field in kind.model_fields.items()
            if not (issubclass(kind, tables.RouteTable) and name in told)
        }
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def table(heading: str) -> dict[str, str]:
    """The rows below a heading of docs/configuration.md: key to default, as they are written."""
    _, found, rest = CONFIGURATION.partition(f"\n## `{heading}`\n")
    assert found, f"docs/configuration.md has no section {heading}"
    section = rest.partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def test_every_part_of_the_file_has_a_section() -> None:
    parts = {heading.strip("[]").partition(".")[0] for heading in SECTIONS}
    assert parts == set(tables.File.model_fields)


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_in_its_table_and_no_other(heading: str) -> None:
    assert set(table(heading)) == set(defaults(SECTIONS[heading]))


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_default_that_is_a_number_is_told_as_it_is(heading: str) -> None:
    told = table(heading)
    for key, value in defaults(SECTIONS[heading]).items():
        if isinstance(value, bool):
            assert told[key] == str(value).lower(), key
        elif isinstance(value, int | float):
            assert float(told[key]) == value, key


def test_every_variable_of_the_environment_is_told() -> None:
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\bTOLLBRIDGE_[A-Z_]+[A-Z]\b", source)}
    assert read
    assert {name for name in read if f"`{name}`" not in CONFIGURATION} == set()


def test_every_code_is_in_the_table_of_errors_with_both_its_statuses() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(code.value, str(STATUS[code].http), STATUS[code].grpc) for code in Code]


def test_every_event_of_the_log_is_in_the_table_of_events() -> None:
    told = (ROOT / "docs/operations.md").read_text()
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    events = {name for source in sources for name in re.findall(r"\blog\.\w+\(\s*\"([a-z_]+\.[a-z_]+)\"", source)}
    assert "gateway.request_ended" in events
    assert {name for name in events if f"`{name}`" not in told} == set()


def test_every_field_of_the_line_is_in_the_table_of_log_fields() -> None:
    source = (ROOT / "gateway/failover.py").read_text()
    fields = re.findall(r"(\w+)=", source.partition('"gateway.request_ended"')[2].partition("\n        )")[0])
    told = (ROOT / "docs/operations.md").read_text().partition("| `gateway.request_ended` | |")[2].partition("\n\n")[0]
    assert "settlement" in fields
    assert [name for name in fields if f"`{name}`" not in told] == []


def test_every_caller_field_is_told() -> None:
    told = (ROOT / "docs/jobs.md").read_text().partition("\n## The caller fields\n")[2]
    assert [field.name for field in FIELDS if f"`{field.name}`" not in told] == []


def links(document: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target.partition("#")[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    folder = (ROOT / document).parent
    assert [target for target in links(document) if target and not (folder / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(
        r"`((?:gateway|admission|adapters|metering|tests|protos|docs)/[\w./]+\.(?:py|sql|toml|md|proto))`", text
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_test_that_shows_a_promise_is_there() -> None:
    """Each cell of docs/security.md names files of tests, and behind each the beginnings of their tests."""
    rows = re.findall(r"^\| .* \| (.+) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)[1:]
    named = 0
    for row in rows:
        tests: set[str] = set()
        for name in re.findall(r"`[^`]+`|\bS(?=,)", row):
            word = "acceptance/test_security.py" if name == "S" else name.strip("`")
            if word.endswith(".py"):
                text = (ROOT / "tests" / (word if "/" in word else f"acceptance/{word}")).read_text()
                tests = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
            else:
                assert any(test.startswith(word.removesuffix("...")) for test in tests), word
                named += 1
    assert named > 30


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_a_configuration_that_is_shown_is_one(document: Path, tmp_path: Path) -> None:
    shown = re.findall(r"^```toml\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    for text in shown:
        file = tmp_path / "tollbridge.toml"
        file.write_text(text)
        assert config.load(file, {}).models
