"""Spark lines, bars and plots: exact widths, gaps as gaps, 0 as something."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.text.plots import bins, curve, meter, per_cell, plot, plotted, plotted_until, time_axis
from gpuboard.board.theme.styles import ASCII, UNICODE, Glyphs

GLYPHS = pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
values = st.lists(st.one_of(st.none(), st.floats(-50, 150)), max_size=60)


def test_a_meter_has_a_track_to_its_end() -> None:
    assert [meter(part, 4, UNICODE) for part in (None, 0.0, 0.001, 0.5, 0.9, 1.0, 7.0)] == [
        ("", "    "), ("", "────"), ("╸", "───"), ("━━", "──"), ("━━━╸", ""), ("━━━━", ""), ("━━━━", ""),
    ]  # fmt: skip
    assert meter(0.4, 4, ASCII) == ("=-", "..")


def test_a_curve_is_one_thin_line_without_gaps() -> None:
    assert curve([0, 100, 100, 0], 1, UNICODE, 0, 100) == ["⡸⢱"]
    assert curve([50] * 4, 2, UNICODE, 0, 100) == ["⣀⣀", "  "]
    assert curve([0, None, 100, 100, 0], 1, UNICODE, 0, 100) == ["⡀⠉⡆"]


def test_in_ascii_a_curve_is_one_thin_line_too() -> None:
    assert curve([0, 25, None, 75, 100], 2, ASCII, 0, 100) == ["   -'", "_-   "]
    assert curve([0, 100, 100, 0], 3, ASCII, 0, 100) == [" '' ", " | |", "_  _"]


def test_a_plot_has_an_axis_and_the_newest_at_the_right() -> None:
    times = [float(second) for second in range(300)]
    lines = plot(plotted(times, [50.0] * 300, 15, UNICODE, span_s=300), 2, UNICODE, high=100)
    assert lines == [(" 100│", "⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀"), ("   0│", "          ")]
    assert plot(plotted(times, [50.0] * 300, 15, ASCII, span_s=300), 3, ASCII, high=700)[0][0] == " 700|"
    assert plot(plotted([], [], 9, UNICODE, span_s=300), 2, UNICODE, high=100) == [(" 100│", "    "), ("   0│", "    ")]


def test_a_plot_stays_until_a_short_bin_has_ended_and_else_shows_each_sample() -> None:
    times = [1000.0 + 0.9 * number for number in range(300)]
    values = [float(number % 101) for number in range(300)]
    stayed = []
    for width in (20, 64, 120):
        plots = [
            (
                plotted_until(times[k - 1], width, UNICODE, span_s=300),
                plotted(times[:k], values[:k], width, UNICODE, span_s=300),
            )
            for k in range(1, 300)
        ]
        same = [before[1] == after[1] for (before, after) in pairwise(plots) if before[0] == after[0]]
        assert all(same)
        stayed.append(len(same))
    assert stayed == [0, 193, 92]  # of 298: bins of 10, 2.5 and 1.3 s
    assert plotted_until(1234.5, 12, ASCII, span_s=300) == 1234.5  # bins of 43 s: the unfinished one is shown


def test_the_axis_of_time_fits() -> None:
    assert time_axis(35, UNICODE, 300) == "     5 min ago ──────────────── now"
    for span_s in (300, 3600, 86400):
        assert [len(time_axis(width, UNICODE, span_s)) for width in range(9, 120)] == list(range(9, 120))
    assert time_axis(64, UNICODE, 86400) == "     24 h ago ───── 18 ─────────── 12 ────────── 6 ───────── now"


def test_samples_that_are_rare_fill_their_time() -> None:
    assert bins([0.0, 5.0, 10.0], [1.0, 2.0, 3.0], 1.0, 11) == [1.0] * 5 + [2.0] * 5 + [3.0]


def test_a_pause_and_unknown_values_are_gaps() -> None:
    assert bins([0.0, 1.0, 2.0, 8.0, 9.0], [1.0, None, 3.0, 4.0, 5.0], 1.0, 10) == [
        1.0, None, 3.0, None, None, None, None, None, 4.0, 5.0,
    ]  # fmt: skip


def test_of_samples_that_are_many_the_peak_is_shown() -> None:
    assert bins([0.0, 1.0, 2.0, 3.0], [0.0, 10.0, 20.0, None], 2.0, 2) == [10.0, 20.0]
    assert bins([0.0, 1.0, 2.0, 3.0], [0.0, 100.0, 0.0, 0.0], 4.0, 1) == [100.0]


def test_what_came_before_is_left_out() -> None:
    assert bins([0.0, 1.0, 2.0], [9.0, 8.0, 7.0], 1.0, 2) == [8.0, 7.0]


@GLYPHS
def test_a_peak_keeps_its_shape_while_it_moves_through_the_plot(glyphs: Glyphs) -> None:
    step_s, peak_s = (
        1.07,
        1000.0,
    )  # samples come unevenly to the bins of 300 s in 60 cells, and the clock began long ago
    drawn = []
    for count in range(1, 260):
        times = [peak_s + step_s * number for number in range(-20, count)]
        values = [100.0 if time == peak_s else 3.0 for time in times]
        lines = plot(plotted(times, values, 65, glyphs, span_s=300), 2, glyphs, high=100)
        drawn.append([area for _, area in lines])
    peaks = {"'"} if glyphs.ascii else {"⣷", "⢸", "⡆"}
    assert {mark for top, _ in drawn for mark in top if mark != " "} <= peaks
    ends = [len(top.rstrip()) for top, _ in drawn]
    first = next(number for number, end in enumerate(ends) if end)
    assert first <= 5  # once the peak's bin has ended, of 5 s in ASCII
    assert ends[first:] == sorted(ends[first:], reverse=True)


@given(st.lists(st.tuples(st.floats(0.5, 1.9), st.floats(0, 100)), min_size=2, max_size=40), st.integers(1, 60))
def test_what_was_drawn_once_only_moves(samples: list[tuple[float, float]], count: int) -> None:
    times = [1e6 + sum(step for step, _ in samples[: k + 1]) for k in range(len(samples))]
    values = [value for _, value in samples]
    before, after = bins(times[:-1], values[:-1], 5.0, count), bins(times, values, 5.0, count)
    moved = int(times[-1] // 5.0) - int(times[-2] // 5.0)
    assert after[: count - 1 - moved] == before[moved : count - 1]  # all but the newest bin, which is not over


@GLYPHS
@given(values=values, height=st.integers(1, 6))
def test_curves_show_what_is_known(glyphs: Glyphs, values: list[float | None], height: int) -> None:
    lines = curve(values, height, glyphs, 0, 100)
    each = per_cell(glyphs)
    cells = -(-len(values) // each)
    assert [len(line) for line in lines] == [cells] * height
    blank = [all(line[cell] == " " for line in lines) for cell in range(cells)]
    assert blank == [all(value is None for value in values[cell * each : (cell + 1) * each]) for cell in range(cells)]


@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.one_of(st.none(), st.floats(0, 100))), max_size=40), st.integers(1, 60)
)
def test_what_is_shown_lies_between_the_values(samples: list[tuple[float, float | None]], count: int) -> None:
    times, now = [], 0.0
    for step, _ in samples:
        now += step
        times.append(now)
    known = [value for _, value in samples if value is not None]
    made = bins(times, [value for _, value in samples], 300 / count, count)
    assert len(made) == count
    assert all(value in known for value in made if value is not None)
