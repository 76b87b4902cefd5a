"""The process of a detached run's head on the run's first node, which an agent of role ``head`` has started.

Lines of the command arrive on fd 0, those to it go to fd 1, messages for people to fd 2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gpuboard.errors import GpuboardError
from gpuboard.files import write_all
from gpuboard.keeper import client as keeper
from gpuboard.keeper.holder import identify
from gpuboard.keeper.record import decode
from gpuboard.launch.detached.heartbeats import share
from gpuboard.launch.detached.remote import FromHead, HeadConfig, unpacked
from gpuboard.launch.output import Screen
from gpuboard.launch.parent_watch import Lifeline
from gpuboard.model.decoding import from_json

_PROCEED_S = 60.0  # a network that drops packets ends no connection


class ServedHead:
    """This process, until it detaches: the end of the connection ends the run."""

    def __init__(self) -> None:
        """Read the config. Raises GpuboardError when the connection ends before that."""
        self.left = False
        self._proceed = threading.Event()
        self._data = b""
        while b"\n" not in self._data:
            data = os.read(0, 65536)
            if not data:
                raise GpuboardError("no config on standard input: this option is for gpuboard itself")
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        self.config: HeadConfig = unpacked(from_json(line)["config"])
        self._received(b"")  # a signal may have come in the same read
        self.line = Lifeline(0, lambda: os.kill(os.getpid(), signal.SIGINT), self._received)

    def adopt(self, env: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Take over the lease, if there is one: return once the command's keeper has given it up.

        A lease that the command has not reserved itself stays with its keeper, and gets heartbeats from here, too;
        ``report`` receives a message about it. Raises GpuboardError. If the connection ends before that, both keepers
        release what the command has reserved.
        """
        if self.config.lease is None:
            return
        record = decode(self.config.lease)
        if record.shared:
            share(record, env, self.config.nodes[0].name, report)
            return
        mine = keeper.record(record.lease, record.nodes, record.settings, identify(os.getpid()), record.until)
        try:
            handed = keeper.hand_over(mine, env)  # its first heartbeats have been sent
        except keeper.KeeperError as error:
            name, others = self.config.nodes[0].name, [node.host for node in self.config.nodes if node.host]
            cure = f"; `ssh {name} ssh {others[0]} true` shows whether it can" if others else ""
            raise GpuboardError(
                f"{name} cannot lead this run: {error}\n  its head has to reach the other nodes by ssh from {name}, "
                f"without the ssh agent of this login{cure}"
            ) from error
        self._send(FromHead("adopted"))
        if not self._proceed.wait(_PROCEED_S):
            raise GpuboardError(f"the command did not give up lease {record.lease} within {_PROCEED_S:.0f} s")
        handed.confirm()

    def leave(self, screen: Screen, message: bytes) -> None:
        """Leave the pipes to the command, after one line to it. In the main thread only."""
        self.left = True
        self.line.then(lambda: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        screen.settle(1.0)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 2)
        self._send(FromHead("started", message.decode()))
        os.dup2(null, 1)
        os.close(null)

    def ended(self, outcome: Mapping[str, Any]) -> None:
        """Report the end of a run that has not been detached."""
        self._send(FromHead("ended", msgspec.json.encode(outcome).decode()))

    def _send(self, line: FromHead) -> None:
        with contextlib.suppress(OSError):  # the connection's end is handled where it is read
            write_all(1, msgspec.json.encode(line) + b"\n")

    def _received(self, data: bytes) -> None:
        *lines, self._data = (self._data + data).split(b"\n")
        for line in lines:
            request: dict[str, Any] = from_json(line)
            if "proceed" in request:
                self._proceed.set()
            elif "signal" in request:
                os.kill(os.getpid(), request["signal"])
