"""A simulated cluster on one unix socket: the real protocol lines of 1,000 nodes at 1 Hz, in a separate process.

    python bench/feeder.py SOCKET NODES

Every node is a connection with an agent's messages: it receives the start line, then sends hello, static and a reading
a second, at the same time as all other nodes, like aligned agents. The values come from agent/simulate/gpus.py and
change; jobs start and end, and every fourth node has a claim. `FeederConnector`, the client's end, replaces the
transports; all other code, from decoding a line on, is the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpuboard.agent.delta import Deltas
from gpuboard.agent.simulate.gpus import Simulated
from gpuboard.config import Settings
from gpuboard.shellprobe.connector import NodeConnector
from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.link import AgentLink, Listener

PHASES = 8  # different readings of a node, in turn
GPUS = 8
GIB = 2**30
USERS = ("alice", "bob", "carol", "dave")


def serve(path: str, nodes: int) -> None:
    """Answer until the client has disconnected."""
    lines = [_lines(number) for number in range(nodes)]
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path)
        listener.listen(1024)
        print("ready", flush=True)
        waiting = selectors.DefaultSelector()
        waiting.register(listener, selectors.EVENT_READ)
        agents: dict[socket.socket, _Agent] = {}
        seq, served = 0, False
        while agents or not served:
            due = time.time() // 1 + 1
            while (left := due - time.time()) > 0:
                for key, _ in waiting.select(left):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 262144)
                        waiting.register(connection, selectors.EVENT_READ)
                        continue
                    agent = key.fileobj
                    assert isinstance(agent, socket.socket)
                    said = b""  # a reset also ends the connection
                    with contextlib.suppress(ConnectionResetError):
                        said = agent.recv(65536)
                    if not said:
                        waiting.unregister(agent)
                        agents.pop(agent, None)
                        agent.close()
                    elif agent not in agents:
                        start = json.loads(said.split(b"\n", 1)[0])
                        number = int(start["config"]["node"].removeprefix("gpu"))
                        nonce = start["nonce"].encode()
                        agents[agent] = _Agent(nonce, number)
                        served = True
                        agent.sendall(b"".join(b"@%s%s\n" % (nonce, line) for line in lines[number][0]))
            seq += 1
            for agent, state in agents.items():
                body, delta = lines[state.number][1 + seq % PHASES]
                if state.whole and delta:
                    head, body = b'"delta","of":%d' % state.whole, delta
                else:
                    head, state.whole = b'"reading"', seq
                line = b'@%s{"t":%s,"seq":%d,"at":%.3f,%s\n' % (state.nonce, head, seq, time.time(), body)
                with contextlib.suppress(OSError):  # closed: handled when it is read above
                    agent.sendall(line)


class _Agent:
    """One connection."""

    def __init__(self, nonce: bytes, number: int) -> None:
        self.nonce = nonce
        self.number = number
        self.whole = 0  # number of the last whole reading


def _lines(number: int) -> list[tuple[bytes, bytes]]:
    """Return a node's hello and static lines, then for each phase the ends of two lines.

    They are those of the whole reading, and of its delta to the phase before: b"" where more than numbers has changed.
    """
    name = f"gpu{number:04d}"
    hello = {"t": "hello", "hostname": name, "boot_id": "b", "uid": os.getuid(), "user": "root", "pid": 1}
    static: dict[str, Any] = {"t": "static", "driver": "580.95", "cuda": "13.0", "source": "simulated"}
    static["gpus"] = _node(number, 0).statics()
    found = [(json.dumps({**hello, "python": "3.11.7"}).encode(), json.dumps(static).encode())]
    readings = [_reading(name, number, phase) for phase in range(PHASES)]
    for before, reading in zip([readings[-1], *readings], readings, strict=False):
        deltas = Deltas()
        deltas.shortened(before)
        delta = deltas.shortened(reading)
        found.append((_end(reading), b"" if delta is reading else _end(delta)))
    return found


def _reading(name: str, number: int, phase: int) -> dict[str, Any]:
    gpus = _node(number, phase).readings(time.time(), lambda _: None)
    for place, gpu in enumerate(gpus):
        gpu["temperature"] += (phase + place) % 3
        gpu["power"] = round(gpu["power"] + phase, 1)
        gpu["utilization"] = max(0, gpu["utilization"] - phase) if gpu["processes"] else 0
        for process in gpu["processes"]:
            process["started"] = 1.7e9 + 1000 * place
    return {
        "seq": phase,
        "interval_s": 1.0,
        "gpus": gpus,
        "claims": [_claim(name, number, phase)] if number % 4 == 0 else [],
        "cpu_percent": 10.0 + phase,
        "memory_used": (64 + phase) * GIB,
        "memory_total": 512 * GIB,
    }


def _end(message: dict[str, Any]) -> bytes:
    """Return a message as JSON, without the keys that `serve` writes."""
    left = {key: value for key, value in message.items() if key not in {"t", "seq", "of"}}
    return json.dumps(left, separators=(",", ":")).encode()[1:]


def _node(number: int, phase: int) -> Simulated:
    """Return a node with 60 % of its GPUs busy; in each phase one GPU in a hundred has gained or lost its job."""
    busy = {}
    for place in range(GPUS):
        runs = (number * 7 + place * 3) % 10 < 6
        if (number * GPUS + place + phase * 13) % 100 == 0:
            runs = not runs
        if runs:
            command = f"python train.py --config configs/run-{number}.yaml --lr 3e-4"
            user = USERS[(number + place) % len(USERS)]
            busy[str(place)] = {"user": user, "command": command, "memory": 61 * GIB, "utilization": 90}
    return Simulated({"cluster": "bench", "count": GPUS, "busy": busy}, f"gpu{number:04d}")


def _claim(name: str, number: int, phase: int) -> dict[str, Any]:
    return {
        "lease": f"k{number:05d}", "uuid": f"SIM-bench-{name}-{number % GPUS}", "uid": 1000, "owner": "alice",
        "state": "live", "from": 1.7e9, "until": 1.7e9 + 9000, "remaining_s": 5000.0 - phase, "age_s": float(phase),
        "purpose": "sweep", "host": "login1", "nodes": [name], "gpus": 1,
    }  # fmt: skip


class FeederConnector(NodeConnector):
    """Opens links to the feeder's nodes; one thread reads all of them, like an event loop."""

    def __init__(self, path: str) -> None:
        super().__init__(Settings())
        self._path = path
        self._handlers: dict[int, tuple[socket.socket, Handler]] = {}
        self._poll = select.epoll()
        threading.Thread(target=self._run, name="transport", daemon=True).start()

    def open(
        self,
        node: str,
        host: str | None,
        *,
        role: str,
        config: dict[str, Any],
        listener: Listener,
        ended: Callable[[TransportError], None],
        job: str | None = None,
    ) -> AgentLink:
        """Return a link to a node of the feeder."""
        link = AgentLink(node, role, config, listener, ended)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        self._handlers[connection.fileno()] = (connection, link)
        link.connected()
        link.attach(_Channel(connection))
        self._poll.register(connection.fileno(), select.EPOLLIN)
        return link

    def close(self) -> None:
        """End every link."""
        for connection, _ in self._handlers.values():
            connection.close()

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                connection, handler = self._handlers[fd]
                try:
                    data = connection.recv(65536)
                except OSError:
                    continue  # we closed it
                if data:
                    handler.received(data)


class _Channel:
    """A connection to one node of the feeder."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send bytes: short lines, which do not block."""
        with contextlib.suppress(OSError):
            self._connection.sendall(data)

    def close(self) -> None:
        """End it."""
        self._connection.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
