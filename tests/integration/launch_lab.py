"""Runs `gpuboard launch` as a user does and checks what it leaves. Ranks may import a small replacement of torch."""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch.rank_map_source import cpu_rank_map
from gpuboard.launch.runs.folder import RunView, read_runs
from tests.integration.ranks_driver import carriers
from tests.waiting import read_line

# The parts of torch that launch itself uses: saves 1.5 s per rank. `meet()` is in place of init_process_group.
_TORCH = {
    "__init__.py": '__version__ = "0"\n',
    "version.py": '__version__ = "0"\ncuda = None\n',
    "_C.py": """
def _c10d_init(): pass
class _distributed_c10d:
    class TCPStore(dict):
        def __init__(self, *args, **options): pass
        def set(self, key, value): self[key] = value.encode()
        def get(self, key): return self[key]
""",
    "distributed/__init__.py": """
import time
from torch.distributed import rendezvous
def meet(): return rendezvous.TCPStore()
def barrier(): time.sleep(600)
""",
    "distributed/rendezvous.py": "class TCPStore: pass\n",
}

# Scripts that many tests use
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
# Rank 0 runs on, the others fail once the file `fail` exists; all ignore SIGTERM.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while os.environ["RANK"] == "0" or not os.path.exists("fail"):
    time.sleep(0.02)
sys.exit(5)
"""
# Grandchildren: one in a session of its own, one orphaned, one stopped.
FAMILY = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import os,time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"])
os.kill(subprocess.Popen(["sleep", "600"]).pid, signal.SIGSTOP)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def write_torch(folder: Path) -> Path:
    """Write the replacement and return its folder, for PYTHONPATH."""
    for name, text in _TORCH.items():
        file = folder / "torch" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def without_torch(folder: Path) -> tuple[str, ...]:
    """Return options of a launch whose ranks import the replacement."""
    return ("--env", f"PYTHONPATH={write_torch(folder / 'fake')}")


class Launch:
    """One `gpuboard launch` on this machine, on CPU; a context manager that ends it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        n: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        torch: bool = False,
        terminal: int | None = None,
        before: Sequence[str] = (),
        port: int = 0,
        stdin: int = subprocess.DEVNULL,
        keep: Sequence[int] = (),
    ) -> None:
        """``script``: text of what the ranks run. ``torch``: imported first. ``terminal``: fd for stdout and stderr.

        With the option --no-python ``script`` is a program. ``before``: what runs the command (``unshare -n``).
        ``port``: the rank map's master_port. ``stdin``: a file. ``keep``: descriptors that it inherits.
        """
        self.folder = folder
        self.env = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), **(env or {})}
        for stale in ("RANK", "WORLD_SIZE", "GPUBOARD_LEASE", "VIRTUAL_ENV"):
            if stale not in (env or {}):
                self.env.pop(stale, None)
        (folder / "script.py").write_text(script)
        nodes = [Node(os.uname().nodename.partition(".")[0], None)]
        rank_map = msgspec.structs.replace(cpu_rank_map(n, nodes, spread=False), master_port=port)
        (folder / "map.json").write_bytes(msgspec.json.encode(rank_map))
        program = "--no-python" in options
        (folder / "script.py").chmod(0o755)
        python = [] if program else ["--python", sys.executable]
        imports = [] if torch else ["--no-preimport"]  # saves 1.5 s per rank
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(*before, sys.executable, "-m", "gpuboard", "launch", "--device", "cpu", "--rank-map", "map.json"),
                *(*python, *imports, *options, "./script.py" if program else "script.py", *args),
            ],
            cwd=folder,
            env=self.env,
            stdin=stdin,
            pass_fds=keep,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
        )
        self.text = {"out": "", "err": ""}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")() for name in self.text}  # a read may cut one

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def wait_for(self, words: str, stream: str = "out", timeout_s: float = 60.0, times: int = 1) -> str:
        """Read until ``words`` were printed ``times`` times; return all output of that stream."""
        self._read(lambda: self.text[stream].count(words) >= times, timeout_s, f"{words!r} on {stream}")
        return self.text[stream]

    def wait(self, timeout_s: float = 60.0) -> int:
        """Read to the end and return the exit code."""
        self._read(lambda: False, timeout_s, "its end")
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> float:
        """Send a signal to the head; return the time it was sent."""
        at = time.monotonic()
        self.process.send_signal(number)
        return at

    def view(self) -> RunView:
        """Return the newest run of this test's state folder."""
        return read_runs(self.env)[-1]

    def wait_view(self, condition: Callable[[RunView], bool], timeout_s: float = 60.0) -> RunView:
        """Wait until ``condition`` holds for the run's state, and return it."""
        until = time.monotonic() + timeout_s
        while not condition(view := self.view()):
            assert time.monotonic() < until, view
            time.sleep(0.05)
        return view

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another gpuboard command with the same state folder."""
        command = [sys.executable, "-m", "gpuboard", *words]
        return subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def carriers(self) -> list[int]:
        """Return the running processes of this run."""
        return carriers(self.view().id)

    def _read(self, done: Callable[[], Any], timeout_s: float, what: str) -> None:
        until = time.monotonic() + timeout_s
        files = {"out": self.process.stdout, "err": self.process.stderr}
        fds = {file.fileno(): name for name, file in files.items() if file is not None and not file.closed}
        while fds and not done():
            ready = select.select(list(fds), [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise AssertionError(f"no {what} after {timeout_s} s; out: {self.text['out']} err: {self.text['err']}")
            for fd in ready:
                data = os.read(fd, 65536)
                self.text[fds[fd]] += self._decoders[fds[fd]].decode(data)
                if not data:
                    del fds[fd]
        if not fds and not done() and what != "its end":
            raise AssertionError(f"ended without {what}; out: {self.text['out']} err: {self.text['err']}")


def wait_up(process: subprocess.Popen[str], times: int) -> None:
    """Read the launch's stdout until ``times`` ranks have printed that they are up."""
    seen = 0
    while seen < times:
        line = read_line(process)
        assert line, process.stderr.read() if process.stderr else ""
        seen += "] up" in line


def parent(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pid: int) -> float:
    """Send SIGKILL; return the time."""
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at
