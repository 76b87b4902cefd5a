"""Drives one node's supervisor over the local transport, as the head does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gpuboard.model.reading import Event, Pushed
from gpuboard.transport.base import TransportError
from gpuboard.transport.connector import LocalTransport
from gpuboard.transport.link import AgentLink
from tests.waiting import Clock, next_step

SECRET = "5ecre7" * 5


def launch_config(
    folder: Path, name: str, *args: str, count: int = 1, kind: str = "script", **changes: Any
) -> dict[str, Any]:
    """Return a start config for one node on CPU."""
    config: dict[str, Any] = {
        "run": f"rtest{os.getpid()}x{time.monotonic_ns()}",
        "secret": SECRET,
        "lease": None,
        "node": "here",
        "node_rank": 0,
        "nodes": 1,
        "world_size": count,
        "ranks": [
            {"rank": r, "local_rank": r, "index": r, "uuid": f"GPU-{r}", "memory_fraction": None} for r in range(count)
        ],
        "cuda_visible_devices": ",".join(str(r) for r in range(count)),
        "device": "cpu",
        "master_addr": "127.0.0.1",
        "listen": True,
        "target": {"kind": kind, "name": name, "args": list(args)},
        "python": sys.executable,
        "cwd": str(folder),
        "environ": {"OMP_NUM_THREADS": "1"},
        "wrap": [],
        "backend": "gloo",
        "timeout_s": 60,
        "lost_head_s": 60,
        "preimport": True,
        "helper_grace_s": 30,
        "attempt": 1,
        "max_restarts": 0,
        "stdin_rank": None,
    }
    config.update(changes)
    return config


class Node:
    """A supervisor on this machine; a context manager that ends it."""

    def __init__(self, config: dict[str, Any], command: Callable[[], list[str]] | None = None) -> None:
        self.config = config
        self.run: str = config["run"]
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.over: TransportError | None = None
        self.times: dict[str, float] = {}
        self._changed = threading.Condition()
        self._transport = LocalTransport() if command is None else LocalTransport(command)
        self.link = AgentLink("here", "launch", config, self._listen, self._end)
        self.link.attach(self._transport.open("here", "launch", self.link))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self._transport.close()

    def _listen(self, message: Pushed) -> None:
        if isinstance(message, Event):
            with self._changed:
                self.events.append((message.kind, msgspec.json.decode(message.data)))
                self.times.setdefault(message.kind, time.monotonic())
                self._changed.notify_all()

    def _end(self, error: TransportError) -> None:
        with self._changed:
            self.over = error
            self._changed.notify_all()

    def call(self, op: str, wait_s: float = 60.0, **args: Any) -> Any:
        """Call the supervisor."""
        return self.link.call(op, args, wait_s, dict)

    def start(self, **environ: str) -> dict[str, int]:
        """Bind a port, start the ranks and open the gate; return pids by rank."""
        port = self.call("listen", host="127.0.0.1", port=0)["port"]
        pids: dict[str, int] = self.call("spawn")["pids"]
        self.call("go", master_addr="127.0.0.1", master_port=port, environ=environ)
        return pids

    def wait(self, condition: Callable[[Node], Any], timeout_s: float = 60.0) -> Any:
        """Wait until ``condition`` holds and return its value. Fails with the events so far."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not (value := condition(self)):
                left = until - time.monotonic()
                if left <= 0 or (self.over is not None and not condition(self)):
                    raise AssertionError(f"{self.over}; events: {self.events}")
                self._changed.wait(min(left, 0.5))
        return value

    def data(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of every event of a kind so far."""
        return [data for name, data in self.events if name == kind]

    def text(self, stream: str = "out", rank: int = 0) -> str:
        """Return the output of a rank so far."""
        return "".join(d.get("text", "?") for d in self.data("output") if d["rank"] == rank and d["stream"] == stream)

    def wait_ended(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait for the end of all processes; return the ranks' exits in the order of the ranks."""
        assert self.wait(lambda n: n.data("ended"), timeout_s) == [{"left": 0}]
        return sorted(self.data("exited"), key=lambda d: d["rank"])


def carriers(run: str) -> list[int]:
    """Return the processes with the run's id in their environment."""
    variable = f"GPUBOARD_RUN={run}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] * (state != "Z")
        except OSError:
            continue
    return found


def wait_gone(run: str, timeout_s: float = 5.0) -> float:
    """Wait until no process has the run's id; return the seconds it took."""
    clock, step_s = Clock(), 0.02
    while left := carriers(run):
        if clock.spent_s() > timeout_s:
            raise AssertionError(
                f"still alive after {timeout_s} s: {[(p, Path(f'/proc/{p}/cmdline').read_bytes()) for p in left]}"
            )
        clock.sleep(step_s)
        step_s = next_step(step_s)
    return clock.spent_s()


def with_fake_torch(folder: Path) -> Path:
    """Put an empty package named torch below ``folder``/fake; return ``folder``."""
    (folder / "fake" / "torch").mkdir(parents=True)
    (folder / "fake" / "torch" / "__init__.py").write_text('__version__ = "0"\n')
    return folder


def node(folder: Path, script: str, *args: str, count: int = 1, **changes: Any) -> Node:
    """Return a node that runs ``script`` with the torch of :func:`with_fake_torch`."""
    (folder / "script.py").write_text(script)
    environ = {"PYTHONPATH": str(folder / "fake"), **changes.pop("environ", {})}
    return Node(launch_config(folder, "script.py", *args, count=count, listen=False, environ=environ, **changes))


def go(node: Node) -> dict[str, int]:
    """Start the ranks and open their gate; return their pids by rank."""
    pids: dict[str, int] = node.call("spawn")["pids"]
    node.call("go", master_addr="127.0.0.1", master_port=1, environ={})
    return pids
