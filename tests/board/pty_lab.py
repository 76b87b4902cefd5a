"""gpuboard on a terminal of a test's own: a pseudo-terminal whose other end the test holds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import Clock, until

ROOT = Path(__file__).parents[2]
_LAST = b"\x1b[0m\x1b[0m-last-"  # nothing that is tested here writes this


class Terminal:
    """A program on a pseudo-terminal, as the leader of a session of its own, as under sshd or a terminal emulator."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int] = (100, 30), cwd: Path = ROOT
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before: list[Any] = termios.tcgetattr(slave)
        self.written = b""
        self._reading = True
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # no other way to get a terminal
        )  # fmt: skip
        self.slave = slave
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while self._reading:
            with contextlib.suppress(OSError):
                if select.select([self.master], [], [], 0.02)[0]:
                    self.written += os.read(self.master, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def shows(self, words: str, timeout_s: float = 60.0, since: int = 0) -> None:
        """Wait until ``words`` were written, in whatever colours, ``since`` so many bytes."""

        def seen() -> bool:
            assert self.process.poll() is None, self.text
            return words in plain(self.written[since:])

        until(seen, f"{words!r} on the terminal, which has {self.text[-2000:]!r}", timeout_s)

    @property
    def text(self) -> str:
        return plain(self.written)

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, and out of the alternate screen with the cursor on."""
        return (
            termios.tcgetattr(self.slave) == self.before
            and self.written.rfind(b"\x1b[?1049l") > self.written.rfind(b"\x1b[?1049h")
            and self.written.rfind(b"\x1b[?25h") > self.written.rfind(b"\x1b[?25l")
            and self.written.rfind(b"\x1b[?1003l") > self.written.rfind(b"\x1b[?1003h")
        )

    def stop_reading(self) -> None:
        """From now on take nothing of what is written: the terminal is stuck."""
        self._reading = False
        self._reader.join()

    def ends(self, within_s: float) -> float:
        """Wait for the program's end, which must come in time; return how long it took."""
        clock = Clock()
        while self.process.poll() is None:
            took = clock.spent_s()
            assert took < within_s, f"still there after {within_s} s; on the terminal: {self.text[-2000:]}"
            clock.sleep()
        took = clock.spent_s()
        if self._reading:  # what was written last may still be on its way: it has come when what follows it has
            os.write(self.slave, _LAST)
            until(lambda: self.written.endswith(_LAST), "the last of what was written")
            self.written = self.written.removesuffix(_LAST)
        return took

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def hang_up(self) -> None:
        """Take the terminal away, as a dropped connection does."""
        self.stop_reading()
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = -1

    def close(self) -> None:
        self._reading = False
        self._reader.join()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)
        for fd in (self.master, self.slave):
            if fd >= 0:
                os.close(fd)


def plain(written: bytes) -> str:
    return re.sub(
        r"\x1b(\[[0-9;?<>=$]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>()][0-9A-B]?)",
        "",
        written.decode("utf-8", "replace"),
    )
