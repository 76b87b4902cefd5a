"""docs/troubleshooting.md names every check, verdict and claim, and none that does not exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from gpuboard.launch.causes.cause import FailureKind
from gpuboard.launch.lint.rules import RULES
from gpuboard.launch.stalls.verdict import StallKind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def first_column(title: str) -> list[str]:
    """Return the code words in the first column of the table below a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def constants(folder: str, calls: dict[str, int]) -> set[str]:
    """Return the constants that a package passes to these calls, at the given place of their arguments."""
    passed = [
        node.args[calls[node.func.id]]
        for file in (ROOT / "gpuboard" / "launch").glob(f"{folder}/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls
    ]
    return {str(argument.value) for argument in passed if isinstance(argument, ast.Constant)}


def checks_in_code() -> set[str]:
    """Return the names of all checks of a launch."""
    of_files = constants("preflight", {"Check": 0, "same": 0}) | constants("lint", {"Check": 0})
    return of_files | {rule.name for rule in RULES}


def test_every_check_is_described() -> None:
    named = first_column("Preflight checks")
    assert len(named) == len(set(named))
    assert set(named) == checks_in_code()


def test_every_verdict_is_described() -> None:
    named = first_column("Verdicts")
    assert len(named) == len(set(named))
    others = constants(".", {"VerdictView": 1})
    assert {"preflight", "head-died"} <= others
    assert set(named) == {*get_args(FailureKind), *get_args(StallKind), *others}


def test_names_in_the_text_exist() -> None:
    words = set(re.findall(r"`([^`\n]+)`", PAGE))
    assert {word for word in words if re.match(r"script: [^…]", word)} <= checks_in_code()
    assert {word for word in words if word.startswith("stall-")} <= set(get_args(StallKind))


def test_printed_checks_exist() -> None:
    names = re.findall(r"^    gpuboard: (?:warn|fail) (.+?): (?:gpu\d+:|train)", PAGE, re.MULTILINE)
    assert len(names) > 5
    assert set(names) <= checks_in_code()


def test_links_have_their_headings() -> None:
    headings = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#{1,3} (.+)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


def test_every_claim_is_answered_once() -> None:
    section = PAGE.partition("\n## Advice from elsewhere")[2]
    numbers: list[int] = []
    for cell in re.findall(r"^\| (\d[\d, -]*) \|", section, re.MULTILINE):
        for part in cell.split(","):
            first, _, last = part.strip().partition("-")
            numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(1, 75))
