"""Lines of text as runs of one style each, and wrapping (pure)."""

from __future__ import annotations

from functools import lru_cache

from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import width

Runs = list[tuple[str, str]]  # (text, role of Look; "" is plain)
NAME = 13  # cells of the names before values


def title(text: str) -> Runs:
    """Return the heading of a section."""
    return [(text, "title")]


def above(scene: Scene, cells: int) -> list[Runs]:
    """Return the lines at the top of a screen: the scene's label, and what is wrong with the cluster as a whole."""
    label: list[Runs] = [[(scene.label, "warn")]] if scene.label else []
    return label + [[(line, "bad")] for banner in scene.banners for line in wrapped(banner, cells)]


def banner_lines(scene: Scene, columns: int) -> list[tuple[tuple[str, str], ...]]:
    """Return what is wrong with the cluster as a whole, in at most two lines each, as the cluster view shows it."""
    lines = (line for banner in scene.banners for line in wrapped(banner, columns - 2, most=2))
    return [((f" {line}", "bad"),) for line in lines]


def named(name: str, words: str, role: str, cells: int) -> list[Runs]:
    """Return a name and its text, wrapped into aligned lines, ``cells`` wide in all."""
    lines = wrapped(words, max(10, cells - NAME)) or [""]
    return [[((name if not number else "").ljust(NAME), "dim"), (line, role)] for number, line in enumerate(lines)]


def wrapped(text: str, cells: int, *, most: int = 6) -> list[str]:
    """Return ``text`` wrapped at blanks to ``cells``, at most ``most`` lines; the last one holds the rest."""
    return [*_wrapped(text, cells, most)]


@lru_cache(maxsize=256)  # the same words are on show for long
def _wrapped(text: str, cells: int, most: int) -> list[str]:
    lines: list[str] = []
    current, used = "", 0
    words = text.split()
    for number, word in enumerate(words):
        size = width(word)
        if current and used + 1 + size > cells:
            if len(lines) == most - 1:
                return [*lines, " ".join([current, *words[number:]])]
            lines.append(current)
            current, used = word, size
        else:
            current, used = (f"{current} {word}", used + 1 + size) if current else (word, size)
    return [*lines, current] if current else lines
