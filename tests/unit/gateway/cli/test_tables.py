from __future__ import annotations

import io
from decimal import Decimal

import pytest
from rich.console import Console

from gateway.cli import tables
from gateway.cli.failure import Failed


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "$0.00"),
        ("12.5", "$12.50"),
        ("0.00000015", "$0.00000015"),
        ("1E-7", "$0.0000001"),
        ("1234567.891000", "$1234567.891"),
        (None, "unknown"),
    ],
    ids=str,
)
def test_money_is_shown_to_its_last_digit_and_never_as_an_exponent(amount, shown):
    assert tables.usd(amount) == shown


def test_an_amount_that_is_no_number_is_not_shown_as_money():
    with pytest.raises(Failed):
        tables.usd("NaN")


def test_a_cell_is_never_read_as_markup_nor_as_control_of_the_terminal():
    out = Console(record=True, width=80, force_terminal=False, file=io.StringIO())
    tables.table(out, "t", ["a", "b"], [["[red]x[/red]", "a\x1b[2Jb"], [None, Decimal("1E+2")]])
    text = out.export_text()
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "100" in text


def test_a_table_into_a_pipe_has_a_line_a_row_however_long_its_cells_are(capsys):
    key_id = "01932c5e-7f31-7cc3-a1d2-3f4e5d6c7b8a"
    tables.table(tables.console(), "keys", ["name", "may use", "id"], [["web", "gpt-4o, " * 60, key_id]])
    title, header, row, *_ = capsys.readouterr().out.splitlines()
    assert (title.strip(), header.split()[0]) == ("keys", "name")
    assert row.split()[0] == "web"
    assert row.rstrip().endswith(key_id)
