"""One measurement: start a launch with a fault, wait for its explanation, end it, and see what is left."""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from tests.faults.cases import NEVER, Fault, words
from tests.faults.places import Place

_START_S = 120.0  # until the fault happens
_END_S = 40.0  # from the explanation to the end of the launch
_LEFT_S = 6.0  # after the end of the launch, for processes of the run
# Messages that call a run failed
_FAILED = re.compile(r"gpuboard: .*( failed|root cause|connection lost|was killed| ended with)")


class Measured(msgspec.Struct):
    """What a launch made of a fault. ``seconds``: to the explanation, None without one within the limit."""

    seconds: float | None = None
    line: str = ""
    code: int | None = None
    left: int = 0  # processes that remained
    output: str = ""  # of gpuboard itself
    begun: bool = True  # the fault has happened

    def wrong(self, fault: Fault) -> str:
        """Return what differs from what the fault demands, "" if nothing does."""
        found = []
        if not self.begun:
            found.append("the fault did not happen")
        if fault.words is None and (failed := _FAILED.search(self.output)):
            found.append(f"called a failure: {failed.group()}")
        if fault.words is not None and self.seconds is None:
            found.append("not explained")
        if self.code != fault.code:
            found.append(f"exit code {self.code}, not {fault.code}")
        if self.left:
            found.append(f"{self.left} processes left")
        return "; ".join(found)


def measure(place: Place, name: str, fault: Fault, limit_s: float) -> Measured:
    """Launch ``fault`` with gpuboard."""
    place.clear()
    found = Measured()
    target = words(*(fault.target or (name,)), script=fault.script)
    with fault.around(place):
        started = time.time()
        running = place.launch(target, fault.options, fault.before, fault.change)
        lines = _lines(running)
        if fault.during is not None:
            for _, line in lines(_START_S, place.begun.exists):
                _note(found, line)
            started = time.time()
            fault.during(place, running)
        limit = limit_s if fault.words is not None else 300.0
        begun_at: float | None = None

        def over() -> bool:
            nonlocal begun_at
            if begun_at is None and (place.begun.exists() or fault.at_launch):
                begun_at = time.time()
            return begun_at is not None and time.time() - begun_at > limit

        message = ""
        for at, line in lines(_START_S + limit, over):
            _note(found, line)
            message = f"{message} {line.strip()}" if line.startswith("  ") else line.strip()
            if fault.words is not None and not line.startswith("[rank") and re.search(fault.words, message):
                found.seconds, found.line = at, message
                break
        if fault.stands_still and running.poll() is None:
            running.send_signal(signal.SIGINT)
        ended = time.monotonic()
        for _, line in lines(_END_S, lambda: False):
            _note(found, line)
        if running.poll() is None and time.monotonic() - ended >= _END_S - 1:
            running.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            found.code = running.wait(10)
        if fault.code == -signal.SIGKILL:
            _ask_runs(place, fault, found, limit_s)
        if found.seconds is not None:
            if not fault.at_launch and fault.during is None:
                found.begun = place.begun.exists()
                started = float(place.begun.read_text()) if found.begun else started
            found.seconds = max(0.0, found.seconds - started)
        until = time.monotonic() + _LEFT_S
        while (left := place.left()) and time.monotonic() < until:
            time.sleep(0.1)
        found.left = len(left)
    return found


def measure_torchrun(place: Place, name: str, fault: Fault, limit_s: float) -> Measured:
    """Launch the same script with the same fault under torchrun; ``left`` are not judged."""
    assert fault.torchrun is not None
    place.clear()
    found = Measured()
    with fault.around(place):
        started = time.time()
        target = words(*(fault.target or (name,)), script=fault.script)
        env = [value for name, value in itertools.pairwise(fault.options) if name == "--env"]
        running = place.torchrun(target, fault.before, fault.change, ["OMP_NUM_THREADS=1", *env])
        lines = _lines(running)
        if fault.during is not None:
            for _ in lines(_START_S, place.begun.exists):
                pass
            started = time.time()
            fault.during(place, running)
        text = ""

        def since() -> float | None:
            """Return when the fault began."""
            if fault.at_launch or fault.during is not None:
                return started
            return float(place.begun.read_text()) if place.begun.exists() else None

        def over() -> bool:
            begun_at = since()
            return begun_at is not None and time.time() - begun_at > limit_s

        for at, line in lines(_START_S + limit_s, over):
            text += line
            if fault.torchrun != NEVER and re.search(fault.torchrun, text):
                found.seconds, found.line = max(0.0, at - (since() or at)), line.strip()
                break
        running.send_signal(signal.SIGTERM)
        for _ in lines(5.0, lambda: False):
            pass
        place.clear()
        running.kill()
        running.wait()
    return found


def _note(found: Measured, line: str) -> None:
    if not line.startswith("[rank"):
        found.output += line


def _ask_runs(place: Place, fault: Fault, found: Measured, limit_s: float) -> None:
    """Search the explanation in `gpuboard runs`: the launch itself is gone."""
    until = time.time() + limit_s
    while found.seconds is None and time.time() < until:
        listed = place.gpuboard("runs", "--json")
        if fault.words is not None and re.search(fault.words, listed):
            found.seconds, found.line = time.time(), "gpuboard runs: " + fault.words


def _lines(running: subprocess.Popen[str]) -> Callable[[float, Callable[[], bool]], Iterator[tuple[float, str]]]:
    """Return an iterator over lines with their times, until the end of output, a time limit or a condition."""
    found: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
    ended = False

    def read() -> None:
        assert running.stdout is not None
        for line in running.stdout:
            found.put((time.time(), line))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()

    def lines(limit_s: float, done: Callable[[], bool]) -> Iterator[tuple[float, str]]:
        nonlocal ended
        until = time.monotonic() + limit_s
        while not ended and time.monotonic() < until and not done():
            with contextlib.suppress(queue.Empty):
                item = found.get(timeout=0.1)
                if item is None:
                    ended = True
                else:
                    yield item

    return lines
