"""An agent of role ``node`` as a child process of the test, connected by pipes."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from gpuboard.model.reading import Event, Hello, Message, Reading, Reply, Static
from gpuboard.transport import bundle, spawn
from tests.nvml import library
from tests.waiting import Clock, alive, until

NONCE = "0123456789abcdef"


class Agent:
    """The agent on a scripted NVML library; with ``python`` it travels to that interpreter as it would over ssh.

    ``through`` is a command that runs a shell command line given as its last argument, such as ``ssh gpu01``.
    """

    def __init__(
        self,
        script: Path | None,
        *,
        python: str | None = None,
        through: Sequence[str] = ("sh", "-c"),
        old: bool = False,
        **config: Any,
    ) -> None:
        env = {key: value for key, value in os.environ.items() if key not in {"LD_LIBRARY_PATH", "FAKE_NVML"}}
        if script is not None:
            env |= {"LD_LIBRARY_PATH": str(library(old=old)), "FAKE_NVML": str(script)}
        command = spawn.agent_command() if python is None else [*through, bundle.command_line(python)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        full = {"node": "n1", "interval_s": None, "claims_dir": "/var/tmp", "simulate": None, "now": True, **config}
        if python is not None:
            self.write(bundle.bundle("node"))
        self.write(json.dumps({"t": "start", "nonce": NONCE, "role": "node", "config": full}).encode() + b"\n")
        self.hello: Hello | None = None
        self.static: Static | None = None
        self.events: list[tuple[str, Any]] = []
        self._data = b""
        self._decoder = msgspec.json.Decoder(Message)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def end(self) -> int:
        """Close the connection and return the exit code, which must come within 2 s."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        until(lambda: self.process.poll() is not None, "it ends with its connection", 2.0)
        return self.process.wait()

    def message(self, timeout_s: float = 60.0) -> Message | None:
        """Return the next message, None at the end. Raises TimeoutError, ValidationError, AssertionError for noise."""
        return self._message(Clock(), timeout_s)

    def _message(self, clock: Clock, timeout_s: float) -> Message | None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._data:
            if clock.spent_s() > timeout_s:
                raise TimeoutError(f"no such message in {timeout_s} s; events so far: {self.events}")
            if not select.select([fd], [], [], 0.02)[0]:
                continue
            data = os.read(fd, 1 << 20)
            if not data:
                return None
            self._data += data
        line, self._data = self._data.split(b"\n", 1)
        if not line and self.hello is None:
            return self._message(clock, timeout_s)  # before the first frame
        assert line.startswith(b"@" + NONCE.encode()), line
        message: Message = self._decoder.decode(line[1 + len(NONCE) :])
        if isinstance(message, Hello):
            self.hello = message
        elif isinstance(message, Static):
            self.static = message
        elif isinstance(message, Event):
            self.events.append((message.kind, msgspec.json.decode(message.data)))
        return message

    def reading(self, timeout_s: float = 60.0, when: Callable[[Reading], bool] = lambda _: True) -> Reading:
        """Return the next reading for which ``when`` holds, and for which NVML has answered. Raises TimeoutError."""
        clock = Clock()
        while True:
            message = self._message(clock, timeout_s)
            assert message is not None, f"the agent has ended: {self.events}"
            if not isinstance(message, Reading):
                continue
            if str(message.nvml_error).endswith(" has not answered yet"):  # the machine was suspended: query again
                self.write(b'{"t":"call","id":8,"op":"read"}\n')
            elif when(message):
                return message

    def call(self, op: str, timeout_s: float = 60.0, **args: Any) -> Any:
        """Call and return the value, or the CallError. Raises TimeoutError."""
        self.write(json.dumps({"t": "call", "id": 7, "op": op, "args": args}).encode() + b"\n")
        clock = Clock()
        while True:
            message = self._message(clock, timeout_s)
            assert message is not None, f"the agent has ended: {self.events}"
            if isinstance(message, Reply) and message.id == 7:
                return message.error if message.error is not None else msgspec.json.decode(message.value)

    def children(self) -> list[int]:
        """Return the agent's child processes."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def still_there(pids: list[int], timeout_s: float = 2.0) -> list[int]:
    """Return which processes still run after at most ``timeout_s``; one that waits to be reaped has ended."""
    clock = Clock()
    while True:
        left = [pid for pid in pids if alive(pid)]
        if not left or clock.spent_s() > timeout_s:
            return left
        clock.sleep()
