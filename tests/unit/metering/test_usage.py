from __future__ import annotations

from metering.usage import NOTHING, Usage


def test_the_last_report_wins_field_by_field():
    first = Usage(input_total=25, output_total=1)
    assert first.merge(Usage(input_total=30, output_total=40, reasoning=3)) == Usage(
        input_total=30, output_total=40, reasoning=3
    )


def test_neither_absence_nor_zero_takes_a_figure_back():
    told = Usage(input_total=25, cache_read=5, cache_write_5m=4, cache_write_1h=3, output_total=10, reasoning=2)
    zeros = Usage(input_total=0, cache_read=0, cache_write_5m=0, cache_write_1h=0, output_total=0, reasoning=0)
    assert told.merge(NOTHING) == told.merge(zeros) == told


def test_a_zero_is_kept_where_nothing_was_told():
    assert NOTHING.merge(Usage(input_total=25, output_total=0)) == Usage(input_total=25, output_total=0)


def test_absent_stays_absent():
    assert NOTHING.merge(NOTHING) == NOTHING
