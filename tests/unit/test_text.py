"""Hostile text is made inert before anybody sees it."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gpuboard.model.text import clean


def test_escapes_bidi_and_line_ends_go() -> None:
    assert clean("\x1b[31mred\x1b]0;owned\x07\u202etxt.exe\nnext\tcell") == "[31mred]0;ownedtxt.exe next cell"


def test_what_people_write_stays() -> None:
    assert clean("python train.py --name=Größe 模型 café") == "python train.py --name=Größe 模型 café"


def test_long_text_is_cut_and_marked() -> None:
    assert clean("x" * 10_000_000, 5) == "xxxx…"


@given(st.text(), st.integers(1, 50))
def test_nothing_printed_can_steer_a_terminal(text: str, limit: int) -> None:
    result = clean(text, limit)
    assert len(result) <= limit
    assert not [c for c in result if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}]
    assert clean(result, limit) == result
