"""Opens channels through a transport and prints their events as JSON lines. Runs on a test node.

    transport_driver.py '{"settings": {…}, "hosts": ["gpu01", …], "command": "cat" or null, "job": "12" or null}'

A list of commands has one for each host.

Out: {"event": "connected", "n": 0}, {"event": "data", "n": 0, "bytes": …, "sha256": …, "text": "…"},
{"event": "ended", "n": 0, "kind": "…", "words": "…"}, {"event": "closed", "s": 0.1}
In: {"op": "write", "n": 0, "bytes": 1048576} (that many bytes, the last one a line end), {"op": "write", "n": 0,
"text": "…"}, {"op": "reset"} (forget received data), {"op": "report", "n": 0} (print received data), {"op": "close"}
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from gpuboard.config import Settings
from gpuboard.transport.base import Channel, Transport, TransportError
from gpuboard.transport.connector import ssh_transport
from gpuboard.transport.slurm.srun import SrunTransport

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.waiting import Stopwatch

_lock = threading.Lock()


def emit(**event: Any) -> None:
    with _lock:
        print(json.dumps(event), flush=True)


class Listener:
    """Records the data of one channel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reset()

    def reset(self) -> None:
        self.parts: list[bytes] = []

    def connected(self) -> None:
        emit(event="connected", n=self.number)

    def received(self, data: bytes) -> None:
        self.parts.append(data)

    def ended(self, error: TransportError) -> None:
        emit(event="ended", n=self.number, kind=error.kind, words=str(error))

    def report(self) -> None:
        data = b"".join(list(self.parts))
        digest = hashlib.sha256(data).hexdigest()
        emit(event="data", n=self.number, bytes=len(data), sha256=digest, text=data[-200:].decode("utf-8", "replace"))


def line(size: int) -> bytes:
    """Return a line of ``size`` bytes without repetition."""
    return random.Random(size).randbytes(size // 2).hex().encode()[: size - 1] + b"\n"


def main() -> None:
    """Run the commands of stdin until its end, then close."""
    options = json.loads(sys.argv[1])
    settings = Settings(**options["settings"])
    transport: Transport = SrunTransport(settings, options["job"]) if options.get("job") else ssh_transport(settings)
    listeners = [Listener(number) for number in range(len(options["hosts"]))]
    command = options["command"]
    commands = command if isinstance(command, list) else [command] * len(listeners)
    channels: list[Channel] = [
        transport.open(host, "node", listener, run)
        for host, listener, run in zip(options["hosts"], listeners, commands, strict=True)
    ]
    for words in sys.stdin:
        order = json.loads(words)
        number = order.get("n", 0)
        if order["op"] == "write":
            channels[number].write(line(order["bytes"]) if "bytes" in order else order["text"].encode())
        elif order["op"] == "reset":
            listeners[number].reset()
        elif order["op"] == "report":
            listeners[number].report()
        elif order["op"] == "close":
            break
    closing = Stopwatch()
    transport.close()
    emit(event="closed", s=closing.stop())


if __name__ == "__main__":
    main()
