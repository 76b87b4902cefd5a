"""Opens channels through a transport and says, a JSON line each, what becomes of them. Runs on a test node.

    transport_driver.py '{"settings": {…}, "hosts": ["gpu01", …], "command": "cat" or null, "job": "12" or null}'

Out: {"event": "connected", "n": 0}, {"event": "data", "n": 0, "bytes": …, "sha256": …, "text": "…"},
{"event": "ended", "n": 0, "kind": "…", "words": "…"}, {"event": "closed", "s": 0.1}
In: {"op": "write", "n": 0, "bytes": 1048576} (that many bytes, the last one a line end), {"op": "write", "n": 0,
"text": "…"}, {"op": "reset"} (count anew), {"op": "say", "n": 0} (what has come), {"op": "close"}
"""

from __future__ import annotations

import hashlib
import json
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


def say(**what: Any) -> None:
    with _lock:
        print(json.dumps(what), flush=True)


class Listener:
    """Counts what arrives on one channel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reset()

    def reset(self) -> None:
        self.parts: list[bytes] = []

    def connected(self) -> None:
        say(event="connected", n=self.number)

    def received(self, data: bytes) -> None:
        self.parts.append(data)

    def ended(self, error: TransportError) -> None:
        say(event="ended", n=self.number, kind=error.kind, words=str(error))

    def report(self) -> None:
        data = b"".join(list(self.parts))
        digest = hashlib.sha256(data).hexdigest()
        say(event="data", n=self.number, bytes=len(data), sha256=digest, text=data[-200:].decode("utf-8", "replace"))


def line(size: int) -> bytes:
    """Return a line of ``size`` bytes that no two places of look alike."""
    words = b"".join(b"%08x" % number for number in range(size // 8 + 1))
    return words[: size - 1] + b"\n"


def main() -> None:
    """Do what stdin says until its end, then close."""
    asked = json.loads(sys.argv[1])
    settings = Settings(**asked["settings"])
    transport: Transport = SrunTransport(settings, asked["job"]) if asked.get("job") else ssh_transport(settings)
    listeners = [Listener(number) for number in range(len(asked["hosts"]))]
    channels: list[Channel] = [
        transport.open(host, "node", listener, asked["command"])
        for host, listener in zip(asked["hosts"], listeners, strict=True)
    ]
    for words in sys.stdin:
        what = json.loads(words)
        number = what.get("n", 0)
        if what["op"] == "write":
            channels[number].write(line(what["bytes"]) if "bytes" in what else what["text"].encode())
        elif what["op"] == "reset":
            listeners[number].reset()
        elif what["op"] == "say":
            listeners[number].report()
        elif what["op"] == "close":
            break
    closing = Stopwatch()
    transport.close()
    say(event="closed", s=closing.stop())
    if asked.get("linger"):
        sys.stdin.read()


if __name__ == "__main__":
    main()
