"""The time of preflight in `gpuboard launch --preflight-only`: on 2 nodes over ssh, and on 64 simulated nodes.

    python bench/preflight.py [--ssh 2] [--simulated 64] [--rounds 5] [--rtt-ms 20]

Measured from the beginning of the run, before any connection is opened, to the file with the results.

``--ssh``: the real command on that many nodes, with a real sshd on this machine behind a proxy that delays every byte
by half of ``--rtt-ms``. Supervisors, interpreters and handshakes of all nodes share this machine, and connections
between the nodes are not delayed. The whole command, from its start to its end, is printed beside it.

``--simulated``: the real head and the real checks, in this process, on links to simulated nodes. Such a node sends its
first message after four round trips and ``START_S``, and replies to a call after one round trip and the time that it
takes on a real node (``TAKES_S``), one call after the other as a supervisor does. Not simulated is what a hundred nodes
do to a network, an ssh server or a shared file system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' sshd and NVML library, not in the package

import msgspec
from feed import server

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch.head import Head
from gpuboard.launch.output import Screen
from gpuboard.launch.plan import LaunchOptions, launch_plan
from gpuboard.launch.rank_map_source import cpu_rank_map
from gpuboard.launch.runs.folder import RunFolder
from gpuboard.launch.target import Target
from gpuboard.model.units import seconds_of
from gpuboard.transport.link import AgentLink

GOALS_S = {2: 3.0, 64: 5.0}
START_S = 0.3  # python3 and the bundle on a node
TAKES_S = {"check": 0.25}  # an interpreter that finds torch
RANKS = 8  # of each simulated node


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="time of preflight")
    parser.add_argument("--ssh", type=int, default=2)
    parser.add_argument("--simulated", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    args = parser.parse_args()
    rtt_s = args.rtt_ms / 1000
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text("")
        found = over_ssh(folder, args.ssh, args.rounds, rtt_s)
        show(args.ssh, "over ssh, all on this machine", args.rtt_ms, [preflight_s for preflight_s, _ in found])
        print(f"  the whole command: median {statistics.median(whole_s for _, whole_s in found):.2f} s")
        seconds, connections = [], ""
        for _ in range(args.rounds):
            taken, connections = simulated(folder, args.simulated, rtt_s)
            seconds.append(taken)
        show(args.simulated, "simulated", args.rtt_ms, seconds)
        print(f"  connections between them: {connections}")


def show(nodes: int, where: str, rtt_ms: float, seconds: list[float]) -> None:
    """Print one result beside its goal."""
    median = statistics.median(seconds)
    goal = GOALS_S.get(nodes)
    words = f"; goal at most {goal:.0f} s: {'met' if median <= goal else 'missed'}" if goal else ""
    spread = f"from {min(seconds):.2f} to {max(seconds):.2f}"
    print(f"{nodes} nodes {where}, {rtt_ms:.0f} ms round trip: median {median:.2f} s ({spread}){words}", flush=True)


def over_ssh(folder: Path, count: int, rounds: int, rtt_s: float) -> list[tuple[float, float]]:
    """Return the seconds of preflight and of the whole command, for each round."""
    names = [f"node{number:03d}" for number in range(1, count + 1)]
    found = []
    with server(folder, names) as sshd, delayed(sshd.port, rtt_s / 2) as port:
        text = sshd.ssh_config.read_text().replace(f"Port {sshd.port}", f"Port {port}")
        sshd.ssh_config.write_text(text)
        sshd.known_hosts.write_text(sshd.known_hosts.read_text().replace(f":{sshd.port} ", f":{port} "))
        path = folder / "map.json"
        path.write_text(json.dumps(rank_map(names)))
        ours = {name: value for name, value in os.environ.items() if not name.startswith("GPUBOARD_")}
        ours |= {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "GPUBOARD_SCHEDULER": "none"}
        ours |= {"GPUBOARD_SSH_CONFIG": str(sshd.ssh_config), "GPUBOARD_PYTHON": sys.executable}
        command = [sys.executable, "-m", "gpuboard", "launch", "--nodes", ",".join(names), "--rank-map", str(path)]
        command += ["--device", "cpu", "--preflight-only", "--json", "--python", sys.executable, "train.py"]
        for _ in range(rounds):
            started = time.monotonic()
            done = subprocess.run(command, env=ours, cwd=folder, capture_output=True, text=True)
            whole_s = time.monotonic() - started
            if done.returncode:
                sys.exit(f"preflight ended with code {done.returncode}:\n{done.stderr}")
            found.append((preflight_s(json.loads(done.stdout)["run"]), whole_s))
    return found


def preflight_s(run: dict[str, Any]) -> float:
    """Return the seconds from the beginning of a run to the results of its preflight."""
    began = seconds_of(run["started"])
    return (Path(run["folder"]) / "preflight.json").stat().st_mtime - began


def rank_map(names: list[str]) -> dict[str, Any]:
    """Return a map of one rank on each node, all reached at 127.0.0.1."""
    at = "127.0.0.1"
    nodes = [
        {"name": name, "address": at, "node_rank": rank, "local_world_size": 1, "cuda_visible_devices": "0"}
        for rank, name in enumerate(names)
    ]
    ranks = [
        {"rank": rank, "node": name, "local_rank": 0, "index": 0, "uuid": f"GPU-{rank}"}
        for rank, name in enumerate(names)
    ]
    whole = {"schema": 1, "lease": None, "master_addr": at, "master_port": 0, "world_size": len(names)}
    return {**whole, "nodes": nodes, "ranks": ranks}


@contextlib.contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """Yield a port whose connections are passed on to ``port``, every byte ``delay_s`` later in both directions."""
    loop = asyncio.new_event_loop()
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            loop.call_later(delay_s, writer.write, data)
        loop.call_later(delay_s, writer.close)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async def listen() -> None:
        listening = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=1024)
        ready.put(listening.sockets[0].getsockname()[1])

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    listening = loop.create_task(listen())  # kept: the loop holds tasks weakly
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield ready.get()
    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join()
    assert listening.done()


def simulated(folder: Path, count: int, rtt_s: float) -> tuple[float, str]:
    """Return the seconds of one preflight on simulated nodes, and which connections it tried."""
    names = [f"node{number:03d}" for number in range(1, count + 1)]
    nodes = {name: Node(name, name) for name in names}
    addresses = {name: f"10.0.0.{at + 1}" for at, name in enumerate(names)}
    chosen = cpu_rank_map(count * RANKS, list(nodes.values()), spread=True, addresses=addresses)
    run = f"r{time.monotonic_ns()}"
    options = LaunchOptions(device="cpu", preflight_only=True)
    target = Target("script", "train.py")
    plan = launch_plan(chosen, target, run=run, secret="5ec", cwd=str(folder), environ={}, options=options)
    connector = Simulated(rtt_s, addresses)
    with open(os.devnull, "w", encoding="utf-8") as null, contextlib.closing(Screen(null, null)) as screen:
        store = RunFolder({"XDG_STATE_HOME": str(folder / "state")}, run)
        head = Head(plan, store, screen, connector=connector, nodes=nodes, read_gpus=None)  # type: ignore[arg-type]
        code = head.run()
    connector.stop()
    if code:
        sys.exit(f"preflight of simulated nodes ended with code {code}: {head.checks}")
    tried = next(check.evidence for check in head.checks if check.name == "connect" and check.node is None)
    return preflight_s(msgspec.to_builtins(head.view())), tried


class Simulated:
    """Opens links to simulated nodes; one thread runs them all."""

    def __init__(self, rtt_s: float, addresses: dict[str, str]) -> None:
        self.rtt_s = rtt_s
        self.addresses = addresses
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, node: str, _host: str | None, **options: Any) -> AgentLink:
        """Return a link to a simulated node."""
        link = AgentLink(node, options["role"], options["config"], options["listener"], options["ended"])
        link.attach(SimulatedNode(self, node, link))
        return link

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class SimulatedNode:
    """The channel to one simulated supervisor: honest replies, late."""

    def __init__(self, cluster: Simulated, node: str, link: AgentLink) -> None:
        self._cluster = cluster
        self._node = node
        self._link = link
        self._free_at = 0.0  # when all calls so far are done; monotonic
        self._closed = False

    def write(self, data: bytes) -> None:
        """Take calls, and reply to each later."""
        for line in data.splitlines():
            message = json.loads(line)
            if message["t"] == "start":
                self._nonce = message["nonce"]
                hello = {"t": "hello", "hostname": self._node, "boot_id": "b", "uid": 0, "user": "root", "pid": 1}
                self._free_at = time.monotonic() + 4 * self._cluster.rtt_s + START_S
                self._send(self._free_at, {**hello, "python": "3.11.7"})
                continue
            op, rtt_s = message["op"], self._cluster.rtt_s
            self._free_at = max(self._free_at, time.monotonic() + rtt_s / 2) + TAKES_S.get(op, 0.0)
            value = self._value(op, message["args"])
            self._send(self._free_at + rtt_s / 2, {"t": "reply", "id": message["id"], "value": value})
            if op == "stop":
                self._send(self._free_at + rtt_s / 2, {"t": "event", "kind": "ended", "data": {"left": 0}})

    def close(self) -> None:
        """End the connection."""
        self._closed = True

    def _send(self, at: float, message: dict[str, Any]) -> None:
        data = b"@" + self._nonce.encode() + json.dumps(message).encode() + b"\n"

        def arrive() -> None:
            if not self._closed:
                self._link.received(data)

        loop = self._cluster.loop
        schedule: Callable[[], object] = lambda: loop.call_later(max(0.0, at - time.monotonic()), arrive)  # noqa: E731
        loop.call_soon_threadsafe(schedule)

    def _value(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        own = self._cluster.addresses[self._node]
        if op == "check":
            facts = {
                "python": "/venv/bin/python",
                "python_version": "3.11.7",
                "torch": "2.13.0",
                "hostname": self._node,
            }
            return {**facts, "target_sha256": "0" * 64, "addresses": {"lo": ["127.0.0.1"], "eth0": [own]}}
        if op == "listen":
            return {"port": 29500, "address": own}
        if op == "probe-listen":
            return {"ports": list(range(40000, 40000 + args["count"]))}
        if op == "probe-connect":
            reached = {"result": "ok", "ms": 1000 * self._cluster.rtt_s, "local_address": own, "interface": "eth0"}
            return {"results": [{**target, **reached} for target in args["targets"]]}
        return {}


if __name__ == "__main__":
    main()
