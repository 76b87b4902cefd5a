"""The terminal's own notifications: inert text in the sequences that terminals know."""

from __future__ import annotations

import pytest

from gpuboard.board.terminal.notify import sequences

_SEVEN = "\x1b]777;notify;gpuboard: Available;4 free\x1b\\"
_NINE = "\x1b]9;gpuboard: Available: 4 free\x07"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm-256color"}, _NINE + _SEVEN),
        ({"TERM": "xterm-kitty"}, _SEVEN),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, _NINE),
        ({}, _NINE + _SEVEN),
    ],
)
def test_what_each_terminal_knows(env: dict[str, str], expected: str) -> None:
    assert sequences("Available", "4 free", env) == expected


def test_through_tmux() -> None:
    found = sequences("Available", "4 free", {"TERM": "xterm-kitty", "TMUX": "/tmp/tmux-0/default,1,0"})
    assert found == "\x1bPtmux;\x1b\x1b]777;notify;gpuboard: Available;4 free\x1b\x1b\\\x1b\\"


def test_text_neither_ends_a_sequence_nor_begins_one() -> None:
    hostile = "a;b\x07c\x1b\\d\x9ce\x1b]0;title\x07\nf" + "x" * 10_000
    found = sequences(hostile, hostile, {})
    nine, seven = found.split("\x07")
    assert nine.startswith("\x1b]9;gpuboard: a,bc") and "\x1b" not in nine[1:]
    assert seven.startswith("\x1b]777;notify;") and seven.endswith("\x1b\\")
    assert seven.count(";") == 3
    assert not set(seven[1:-2]) & set("\x1b\x9c\n")
    assert len(found) < 1000
