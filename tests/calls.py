"""Calls of a function by the code under test: recorded, or made the moment at which something else happens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal


@contextmanager
def calls_of(
    function: Any, then: Callable[[], object] | None = None, at: Literal["call", "return"] = "call"
) -> Iterator[list[dict[str, Any]]]:
    """Yield the arguments of each call of a Python function by this thread so far; the function itself runs as always.

    ``then`` runs at the first one: before the function, or after it with ``at="return"``.
    """
    calls: list[dict[str, Any]] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == at and frame.f_code is function.__code__:
            calls.append(dict(frame.f_locals))
            if then is not None and len(calls) == 1:
                then()

    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(None)
