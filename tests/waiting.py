"""Waiting for a condition, in place of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "", timeout_s: float = 60.0) -> T:
    """Wait until ``condition`` gives something true and return that; fail after ``timeout_s``, saying ``what`` is."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what or 'it did not happen'}"
        time.sleep(0.02)
    return value
