"""The time line: an axis of local times, and bars on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from gpuboard.board.text.detail.timeline import Axis, axis, bar, ruler
from gpuboard.board.theme.styles import ASCII, UNICODE


@pytest.fixture(autouse=True)
def berlin() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Berlin"
    time.tzset()
    yield
    os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOON = 1769857200.0  # 2026-01-31 12:00 in Berlin
H = 3600.0


def text(runs: tuple[tuple[str, str], ...]) -> str:
    return "".join(words for words, _ in runs)


@pytest.mark.parametrize(
    ("hours", "width", "expected"),
    [
        (4.9, 40, "now     13:00   14:00   15:00   16:00   "),
        (4.9, 20, "now     14:00       "),
        (23.9, 40, "now       18:00     Sun 01    06:00     "),
        (7 * 24 - 0.1, 40, "now      Mon 02     Wed 04     Fri 06   "),
        (0.4, 40, "now      12:15    12:30     12:45       "),
        (4.9, 3, "now"),
    ],
)
def test_the_ruler_has_local_times_where_they_are(hours: float, width: int, expected: str) -> None:
    assert ruler(axis([(NOON, NOON + hours * H)], NOON, width)) == expected


def test_the_ruler_has_now_in_place_of_labels_that_would_touch_it() -> None:
    scale = Axis(NOON - 2 * H, NOON + 8 * H, NOON + H / 2, 80)
    assert ruler(scale) == "10:00   11:00       now 13:00   14:00   15:00   16:00   17:00   18:00   19:00   "


def test_a_change_to_summer_time_moves_no_label_off_its_hour() -> None:
    start = at("2026-03-28T18:00")
    labels = ruler(Axis(start, start + 24 * H, start, 80)).split()
    assert labels == ["now", "21:00", "Sun", "29", "03:00", "06:00", "09:00", "12:00", "15:00"]


def test_every_lease_ends_on_the_axis_and_little_of_it_is_past() -> None:
    found = axis([(NOON - 100 * H, NOON + 2 * H), (NOON - H, NOON + 8 * H)], NOON, 100)
    assert found.end >= NOON + 8 * H
    assert found.at(NOON) == pytest.approx(20, abs=2)
    assert axis([], NOON, 0) == Axis(NOON, NOON + H + 300, NOON, 1)


def test_the_axis_is_unchanged_for_minutes() -> None:
    spans = [(NOON - H, NOON + 8 * H)]
    assert axis(spans, NOON + 1, 50)[:2] == axis(spans, NOON + 200, 50)[:2]


def test_a_bar_is_thin_in_the_past_and_full_from_now_on() -> None:
    scale = Axis(NOON - 2 * H, NOON + 8 * H, NOON, 20)
    assert bar(scale, NOON - H, NOON + 4 * H, "mine", UNICODE) == (
        ("  ", ""),
        ("──", "dim"),
        ("━━━━━━━━", "mine"),
        ("        ", ""),
    )
    assert text(bar(scale, NOON - 50 * H, NOON + 50 * H, "mine", ASCII)) == "-" * 4 + "=" * 16


@pytest.mark.parametrize("width", [1, 2, 7, 40])
@pytest.mark.parametrize("since", [-300.0, -1.0, 0.0])
@pytest.mark.parametrize("until", [-1.0, 0.0, 0.01, 3.0, 8.0, 900.0])
def test_a_bar_fills_its_width_and_is_never_invisible(width: int, since: float, until: float) -> None:
    scale = Axis(NOON - 2 * H, NOON + 8 * H, NOON, width)
    found = bar(scale, NOON + since * H, NOON + until * H, "mine", ASCII)
    assert len(text(found)) == width
    assert "=" in text(found)
