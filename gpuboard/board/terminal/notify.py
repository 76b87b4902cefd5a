"""Notifications for a user who may be in another window: toast, bell, and the terminal's own (OSC 9 and 777)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuboard.board.terminal.textual_compat import write_to_terminal
from gpuboard.model.text import clean

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp

_LONG = 200  # characters; desktop notifications show less
_TOAST_S = 60.0  # long enough for a user who comes back to the board
# Terminals that support both would show two notifications. Others get both sequences and ignore the unknown one.
_ONE = {"xterm-kitty": 777, "xterm-ghostty": 777, "wezterm": 777, "foot": 777, "rxvt-unicode-256color": 777}


def announce(board: BoardApp, title: str, words: str) -> None:
    """Notify in every way that this terminal may support."""
    board.notify(words, title=title, timeout=_TOAST_S, markup=False)
    board.bell()
    write_to_terminal(board, sequences(title, words, board.core.env))


def sequences(title: str, words: str, env: Mapping[str, str]) -> str:
    """Return the terminal's notification sequences; the text can neither end a sequence nor start another.

    OSC 9 is iTerm2's; its text starts with a letter, because ``9;4`` is a progress bar elsewhere. OSC 777 is
    rxvt-unicode's (``777;notify;title;text``). In tmux both are in its pass-through (tmux(1), ``allow-passthrough``).
    """
    head, body = _inert(title), _inert(words)
    nine = f"\x1b]9;gpuboard: {head}: {body}\x07"
    seven = f"\x1b]777;notify;gpuboard: {head};{body}\x1b\\"
    if env.get("TERM_PROGRAM") == "iTerm.app":
        found = nine
    else:
        found = seven if _ONE.get(env.get("TERM", "")) == 777 else nine + seven
    if not env.get("TMUX"):
        return found
    return "\x1bPtmux;" + found.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def _inert(text: str) -> str:
    return clean(text, _LONG).replace(";", ",")
