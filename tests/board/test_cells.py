"""Text into cells: always exactly as wide as asked for, whatever it is made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuboard.board.text.cells import fit, fit_names, fit_runs, inert, width

FAMILY = "👨‍👩‍👧"
PILE = "é" + "\u0301" * 30
HOSTILE = [
    "[/x]", "[bold]x", "日本語の名前", "ＡＢＣ", FAMILY, "🇩🇪🇫🇷", "👍🏽", "❤️", PILE, "\u0301\u0301", "שלום עולם",
    "مرحبا 12", "ไทยที่", "हिन्दी", "한국어", "a\u200db\u200fc\u202ed", "\x1b]8;;http://x\x07y", "x" * 10_000,
    "語" * 10_000, "\t\r\n", "",
]  # fmt: skip


@given(text=st.one_of(st.text(), st.sampled_from(HOSTILE)), size=st.integers(0, 40))
def test_a_cell_is_exactly_as_wide_as_asked(text: str, size: int) -> None:
    assert cell_len(fit(text, size)) == size


@given(
    runs=st.lists(st.tuples(st.one_of(st.text(), st.sampled_from(HOSTILE)), st.integers()), max_size=5),
    size=st.integers(0, 40),
    right=st.booleans(),
)
def test_runs_of_several_styles_too(runs: list[tuple[str, int]], size: int, right: bool) -> None:
    assert sum(cell_len(text) for text, _ in fit_runs(runs, size, -1, right=right)) == size


@pytest.mark.parametrize(
    ("text", "size", "fitted"),
    [
        ("free", 6, "free  "),
        ("reserved", 6, "reser…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日… "),  # half a character would stand in the next column
        ("日本語", 1, "…"),
        ("x", 0, ""),
    ],
)
def test_what_does_not_fit_ends_in_an_ellipsis(text: str, size: int, fitted: str) -> None:
    assert fit(text, size) == fitted


@pytest.mark.parametrize(
    ("names", "size", "fitted"),
    [
        (["erin", "dave"], 10, "erin, dave"),
        (["erin", "dave"], 9, "erin +1  "),
        (["erin", "dave", "bob"], 13, "erin, dave +1"),
        (["erin", "dave", "bob"], 12, "erin +2     "),
        (["erin", "dave"], 5, "erin…"),
        (["alexandra", "bob"], 8, "alex… +1"),
        (["日本語", "bob"], 9, "日本語 +1"),
        ([], 3, "   "),
    ],
)
def test_names_that_do_not_fit_are_counted(names: list[str], size: int, fitted: str) -> None:
    assert fit_names(names, size) == fitted


def test_numbers_stand_at_the_right() -> None:
    fitted = [fit_runs([(number, None)], 4, None, right=True) for number in ("7", "100", "12345")]
    assert ["".join(text for text, _ in runs) for runs in fitted] == ["   7", " 100", "123…"]


def test_a_cut_in_a_later_run_keeps_the_styles() -> None:
    assert fit_runs([("ab", 1), ("cd", 2)], 3, 0) == [("ab", 1), ("…", 2)]
    assert fit_runs([("abc", 1), ("d", 2)], 3, 0) == [("ab…", 1)]


def test_sequences_that_terminals_disagree_on_are_taken_apart() -> None:
    assert inert(FAMILY) == "👨👩👧"
    assert inert("🇩🇪") == "DE"
    assert inert("👍🏽") == "👍"
    assert inert("❤️") == "❤"
    assert inert("\u0301a") == "a"
    assert width(inert(PILE)) == 1
    assert len(inert(PILE)) == 3  # é and two more marks: a pile runs over the lines above
    assert inert("a\nb\x1b[31mc") == "a b [31mc"


def test_right_to_left_text_does_not_reach_into_the_next_column() -> None:
    # A left-to-right mark of no width: without it terminals that reorder text draw the next column's digits before it
    assert fit("שלום", 6).startswith("שלום\u200e")
