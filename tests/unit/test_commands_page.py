"""docs/commands.md names every column, key to sort by, key of the filter and sensor, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from gpuboard.board.filter.conditions import KEYS
from gpuboard.cli.see.columns import COLUMNS
from gpuboard.cli.see.selection import SORT_KEYS
from gpuboard.model.gpu import Sensors

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def section(title: str) -> str:
    """Return the text below a heading."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def row(option: str) -> list[str]:
    """Return the code words in the row of an option of `gpuboard status`."""
    [cells] = re.findall(rf"^\| `{option} [^|]*\|(.*)\|$", section("The table of GPUs"), re.MULTILINE)
    return codes(cells)


def test_every_column_of_status_is_named_and_a_key_of_the_filter() -> None:
    assert row("--columns") == list(COLUMNS)
    assert COLUMNS.keys() <= KEYS.keys()


def test_every_key_to_sort_by_is_named_and_a_column() -> None:
    assert row("--sort") == list(SORT_KEYS)
    assert SORT_KEYS.keys() - COLUMNS.keys() == {"free-gpus"}


def test_every_key_of_the_filter_is_named() -> None:
    terms = re.findall(r"^\| (`.*?) \|", section("The board's filter"), re.MULTILINE)
    assert {re.split("[:<>]", term)[0] for cell in terms for term in codes(cell)} == KEYS.keys()


def test_every_sensor_is_named() -> None:
    [sensors] = re.findall(r"^`sensors` of a GPU.*?\n\n", section("The table of GPUs"), re.MULTILINE | re.DOTALL)
    assert set(Sensors.__struct_fields__) <= set(codes(sensors))
