"""Durations, sizes and times as people type them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.model.units import format_duration, format_size, iso, parse_duration, parse_size, ranges


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("15m", 900), ("8h", 28800), ("2d", 172800), ("1h30m", 5400), (" 1.5h ", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-3m", "3 m 2", "1h30", "0s", "1e3s", "9999d", "\uff13m", "3m;id"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|between"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * 2**30), ("40G", 40 * 10**9), ("512 MiB", 512 * 2**20), ("0.5gib", 2**29), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1 PiB", "forty", "1G1G", "40", "0A"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused_by_value_error(text: str) -> None:
    for parse in (parse_duration, parse_size):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (3900, "1h05m"), (86399, "23h59m"), (183600, "2d03h")]
)
def test_durations_as_printed(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(None, "?"), (0, "0.0 GiB"), (80 * 2**30, "80 GiB"), (3 * 2**29, "1.5 GiB")]
)
def test_sizes_as_printed(size: int | None, text: str) -> None:
    assert format_size(size) == text


def test_iso_is_utc_with_milliseconds() -> None:
    assert iso(1769860800.25) == "2026-01-31T12:00:00.250Z"
    assert iso(-1e300) == "1970-01-01T00:00:00.000Z"
    latest = datetime.fromisoformat(iso(1e300))
    assert latest.astimezone(timezone(timedelta(hours=14))).year == 9999  # the earliest morning on earth


def test_ranges() -> None:
    assert [ranges(numbers) for numbers in ([], [3], [2, 0, 1], [0, 1, 3, 7, 6])] == ["", "3", "0-2", "0-1,3,6-7"]
