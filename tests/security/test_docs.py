"""What docs/reservations.md promises about malicious users is tested: each row names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNTESTABLE = {"run the node as root"}


def rows() -> list[list[str]]:
    """Return the cells of the table about malicious users."""
    text = (ROOT / "docs/reservations.md").read_text(encoding="utf-8")
    section = text.split("## What a malicious user can do\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_each_sentence_about_a_malicious_user_names_a_test_that_exists() -> None:
    tests = set(re.findall(r"\bdef (test_\w+)", "\n".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))))
    found = rows()
    assert len(found) > 15
    for cells in found:
        assert len(cells) == 3, cells
        named = re.findall(r"`(test_\w+)`", cells[2])
        assert named or cells[0] in UNTESTABLE, cells
        assert set(named) <= tests, set(named) - tests
