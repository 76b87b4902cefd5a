"""Interrupt code at every point where ctrl-C can interrupt it: a race as a loop."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

# The interpreter runs signal handlers after these instructions.
_CHECKED = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def interrupted(
    module: ModuleType, action: Callable[[], object], handler: Callable[[], object] = _ctrl_c
) -> Iterator[tuple[str, BaseException | None]]:
    """Run ``action`` again and again, each time with ``handler`` called at a later point in ``module``.

    Yields where that was and what ``action`` raised, until an ``action`` ends before the interrupt. Where SIGINT is
    blocked, nothing is called.
    """
    for number in range(1_000_000):
        at, raised = _interrupt(module, action, handler, number)
        if not at:
            assert number, f"nothing of {module.__name__} was run"
            return
        yield at, raised


def _interrupt(
    module: ModuleType, action: Callable[[], object], handler: Callable[[], object], number: int
) -> tuple[str, BaseException | None]:
    left = number
    at = ""
    checked = False  # after the instruction before this one

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left, at, checked
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            here, checked = checked, dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(_CHECKED)
            if here and not at and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
                left -= 1
                if left < 0:
                    at = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                    handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except BaseException as error:
        return at, error
    finally:
        sys.settrace(before)
    return at, None
