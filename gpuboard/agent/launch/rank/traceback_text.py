"""Tracebacks as text: what a child process of a rank printed, or put into the message of its parent's exception."""

import re
import sysconfig

MYPY = False
if MYPY:
    from typing import Any, List, Optional, Sequence, Tuple

    Place = Tuple[Optional[str], Optional[int], Optional[str]]  # file, line, function

_HEADER = re.compile(r"^[ |+]*(?:Exception Group )?Traceback \(most recent call last\):$|Original Traceback .*:$", re.M)
_FRAME = re.compile(r' +File "(.+)", line (\d+)(?:, in (.+))?$')
_RAISED = re.compile(r"([^\W\d][\w.<>]*)(?:: (.*)|(?=\n|$))", re.S)
# Between two tracebacks of a chain
_ABOVE = re.compile(
    r"(The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):$"
)
_GROUP = re.compile(r"^ *[|] ?", re.M)  # the margin of an exception group
_LIBRARIES = tuple({sysconfig.get_path(key) + "/" for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.]\d+/")
_INSTALLED = re.compile(r"/(site|dist)-packages/(?!torch/)")


def is_library(filename: str) -> bool:
    """Return whether a frame's file is of the standard library or of an installed package, or is no file."""
    return filename.startswith(_LIBRARIES + ("<",)) or bool(_LIBRARY.search(filename))


def remoteness(filename: str) -> int:
    """Return how far a frame's file is from the user's own code: 0 for that itself, 1 for an installed package, which
    the user's code may be a part of (in a container), 2 for torch, the standard library and no file."""
    return 0 if not is_library(filename) else 1 if _INSTALLED.search(filename) else 2


def within(line: int, body: "Sequence[Any]") -> bool:
    """Return whether a line is in these statements of a syntax tree."""
    return bool(body) and body[0].lineno <= line <= getattr(body[-1], "end_lineno", body[-1].lineno)  # Python 3.8


def innermost(frames: "List[Place]") -> "Place":
    """Return the innermost one of the frames that are nearest to the user's own code."""
    return min(reversed(frames), key=lambda frame: remoteness(frame[0] or "<none>"), default=(None, None, None))


def last_traceback(text: str) -> "Optional[Tuple[str, str, Place]]":
    """Return type, message (with all text after it) and place of the last complete traceback, None without one.

    The last one is the cause: torch puts the traceback of a DataLoader worker or of a spawned process into the message
    of the parent's exception, which follows the parent's frames.
    """
    for header in reversed(list(_HEADER.finditer(text))):
        frames: "List[Place]" = []
        rest = text[header.end() :]
        lines = (_GROUP.sub("", rest) if "|" in header.group() or "+" in header.group() else rest).splitlines()
        for at, line in enumerate(lines):
            frame = _FRAME.match(line)
            if frame:
                frames.append((frame.group(1), int(frame.group(2)), frame.group(3)))
            elif line.strip() and not line.startswith("  "):
                raised = _RAISED.match("\n".join(lines[at:]).rstrip())
                if raised is None or not (frames or raised.group(2)):  # a word alone may be other output
                    break
                return raised.group(1), raised.group(2) or "", innermost(frames)
    return None


def above(text: str) -> "List[Tuple[str, Tuple[str, str, Place]]]":
    """Return the exceptions above the last traceback in its chain, the nearest first, each with its relation to it."""
    found: "List[Tuple[str, Tuple[str, str, Place]]]" = []
    for header in reversed(list(_HEADER.finditer(text))):
        text = text[: header.start()].rstrip()
        relation = _ABOVE.search(text)
        one = last_traceback(text[: relation.start()]) if relation else None
        if relation is None or one is None:
            break
        found.append(("caused by" if "direct cause" in relation.group() else "while handling", one))
    return found
