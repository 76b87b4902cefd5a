"""The end of the board by signals: a closed terminal sends several, and each can arrive while another is handled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
import os, signal, threading
from gpuboard.board.terminal import guard
from tests.interrupts import interrupted

ended = threading.Event()
os._exit = lambda code: ended.set()

def close_terminal():
    ended.clear()
    guard.Guard(0.0).watch(lambda code: None)
    signal.raise_signal(signal.SIGHUP)

close_terminal()  # from now on SIGTERM has a handler
points = 0
for module in (guard, threading):
    for at, raised in interrupted(module, close_terminal, lambda: signal.raise_signal(signal.SIGTERM)):
        assert ended.wait(60) and raised is None, (at, raised)
        points += 1
print(points)
"""


def test_a_signal_at_any_point_of_another_ones_handler_does_not_prevent_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=60,  # the main thread waited for itself, forever
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 10
