"""The client's cost of 100 real ssh sessions at 1 Hz: CPU of the feed per node and poll, beside a bare asyncssh stream.

    python bench/feed.py [--nodes 100] [--seconds 15] [--rounds 3] [--transports]

One sshd on 127.0.0.1, with a session and an agent of 8 scripted GPUs for every node. Feed and bare stream run as
separate processes, alternating. The bare stream does the minimum that asyncssh allows with the same lines, cipher and
ticks: it reads lines and counts them. CPU is user plus system time of the whole client process. ``--transports``
measures the feed over each transport, with the ssh processes of `openssh` counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' sshd and NVML library, not in the package

from gpuboard.cluster.feed import next_tick_ms
from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from tests.nvml import GIB, Gpu, library, write_script
from tests.sshd import Sshd, children

GOAL_MS = 0.1
SETTLE_S = 3.0
START_S = 120.0


def main() -> None:
    """Measure and print, or be one of the clients."""
    parser = argparse.ArgumentParser(description="CPU of the feed over ssh")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transports", action="store_true", help="the feed over each transport, one after the other")
    parser.add_argument("--transport", default="asyncssh", help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=("feed", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--ssh-config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [f"node{number:03d}" for number in range(1, args.nodes + 1)]
    if args.client == "feed":
        feed_client(names, args.ssh_config, args.seconds, args.transport)
    elif args.client == "bare":
        asyncio.run(bare_client(names, args.ssh_config, args.seconds))
    elif args.transports:
        transports(names, args.seconds, args.rounds)
    else:
        compare(names, args.seconds, args.rounds)


def compare(names: list[str], seconds: float, rounds: int) -> None:
    """Run both clients in turn and print the results."""
    found: dict[str, list[dict[str, float]]] = {"feed": [], "bare": []}
    agents: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder, server(Path(folder), names) as sshd:
        for _ in range(rounds):
            for kind, results in found.items():
                command = [sys.executable, __file__, "--client", kind, "--ssh-config", str(sshd.ssh_config)]
                command += ["--nodes", str(len(names)), "--seconds", str(seconds)]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
                    assert client.stdout is not None
                    if client.stdout.readline() != "ready\n":
                        sys.exit(f"{kind}: not all nodes came up")
                    time.sleep(SETTLE_S)
                    if kind == "feed":
                        agents.append(agent_cost(sshd, len(names), seconds / 2))
                    results.append(json.loads(client.stdout.readline()))
                until_gone(sshd)
    feed, bare = (statistics.median(r["ms"] for r in found[kind]) for kind in ("feed", "bare"))
    watched = statistics.median(r["watched_ms"] for r in found["feed"])
    print(f"{len(names)} ssh sessions, 8 GPUs each, a reading a second; {rounds} rounds of {seconds:.0f} s, medians")
    print(f"feed:                 {feed:.3f} ms of CPU a node and poll; goal at most {GOAL_MS}: {verdict(feed)}")
    print(f"bare asyncssh stream: {bare:.3f} ms; ratio {feed / bare:.2f}")
    print(f"feed and a whole snapshot a tick: {watched:.3f} ms")
    memory = [statistics.median(result["mib"] for result in results) for results in found.values()]
    print(f"client's memory: feed {memory[0]:.0f} MiB, bare stream {memory[1]:.0f} MiB")
    percent, mib = (statistics.median(each) for each in zip(*agents, strict=True))
    print(f"agent, a node: {percent:.2f} % of a core, {mib:.1f} MiB (PSS, its NVML process included)")


def transports(names: list[str], seconds: float, rounds: int) -> None:
    """Run the feed over each transport in turn and print the results."""
    found: dict[str, list[dict[str, float]]] = {"asyncssh": [], "openssh": [], "paramiko": []}
    with tempfile.TemporaryDirectory(prefix="gpuboard-bench-") as folder, server(Path(folder), names) as sshd:
        state = str(Path(folder) / "state")  # has the sockets of shared connections; identifies their ssh
        for _ in range(rounds):
            for transport, results in found.items():
                command = [sys.executable, __file__, "--client", "feed", "--ssh-config", str(sshd.ssh_config)]
                command += ["--nodes", str(len(names)), "--seconds", str(seconds), "--transport", transport]
                started = time.monotonic()
                env = {**os.environ, "XDG_STATE_HOME": state}
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as client:
                    assert client.stdout is not None
                    if client.stdout.readline() != "ready\n":
                        sys.exit(f"{transport}: not all nodes came up")
                    ready_s = time.monotonic() - started
                    time.sleep(SETTLE_S)
                    programs = ssh_programs(str(sshd.ssh_config), state)
                    before = sum(map(cpu_ns, programs))
                    time.sleep(seconds)
                    polls = len(names) * seconds
                    outside_ms = (sum(map(cpu_ns, programs)) - before) / 1e6 / polls
                    memory = sum(map(pss_mib, programs))
                    result = json.loads(client.stdout.readline())
                    results.append({**result, "outside_ms": outside_ms, "ready_s": ready_s, "programs_mib": memory})
                until_gone(sshd)
    print(f"{len(names)} ssh sessions, 8 GPUs each, a reading a second; {rounds} rounds of {seconds:.0f} s, medians")
    for transport, results in found.items():
        each = {key: statistics.median(result[key] for result in results) for key in results[0]}
        programs_words = f" and {each['outside_ms']:.3f} ms in ssh processes" if transport == "openssh" else ""
        memory_words = f" and {each['programs_mib']:.0f} MiB of ssh processes (PSS)" if transport == "openssh" else ""
        print(
            f"{transport}: {each['ms']:.3f} ms of CPU a node and poll{programs_words}; "
            f"{each['mib']:.0f} MiB{memory_words}; all nodes up after {each['ready_s']:.1f} s"
        )


def ssh_programs(*marks: str) -> list[int]:
    """Return the pids of ssh processes whose command line has one of ``marks``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "comm").read_text() == "ssh\n":
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                found += [int(entry.name)] if any(mark in command for mark in marks) else []
    return found


def verdict(ms: float) -> str:
    return "met" if ms <= GOAL_MS else "missed"


@contextlib.contextmanager
def server(folder: Path, names: list[str], *, blocks: bool = False) -> Iterator[Sshd]:
    """Run an sshd whose sessions have the tests' NVML library with 8 GPUs, each with two processes.

    ``blocks``: ssh_config has a block for each name, in place of one for all.
    """
    script = folder / "nvml"
    pids = (os.getpid(), os.getppid())
    gpu = Gpu(used=8 * GIB, utilization=50, processes=tuple(("compute", pid, 4 * GIB) for pid in pids))
    write_script(script, [gpu] * 8)
    sshd = Sshd(folder / "sshd", extra=f"SetEnv LD_LIBRARY_PATH={library()} FAKE_NVML={script}\n")
    try:
        for hosts in names if blocks else [" ".join(names)]:
            sshd.host(hosts, KexAlgorithms="curve25519-sha256")
        yield sshd
    finally:
        sshd.stop()


def feed_client(names: list[str], ssh_config: str, seconds: float, transport: str) -> None:
    """Keep a fleet open; measure its readings alone, then with a snapshot for every change.

    Readings alone are looked at, too: a feed decodes only what is.
    """
    settings = Settings(ssh_config=ssh_config, python=sys.executable, connect_timeout="2m", transport=transport)
    fleet = Fleet([Node(name, name) for name in names], settings, interval_s=1.0, one_shot=False)
    fleet.start()
    fleet.wait(START_S)
    if missing := [node for node in fleet.snapshot().nodes if node.state != "up" or len(node.gpus) != 8]:
        sys.exit(f"{len(missing)} nodes did not come up: {missing[0].name}: {missing[0].error}")
    print("ready", flush=True)
    time.sleep(SETTLE_S)

    def polls() -> int:
        return sum(feed.facts.reading.seq for feed in fleet._feeds.values() if feed.facts.reading is not None)

    def watch(look: Callable[[], object]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if fleet.wait_change(1.0):
                look()

    alone = measure(polls, lambda: watch(lambda: fleet.facts))
    watched = measure(polls, lambda: watch(fleet.snapshot))
    print(json.dumps({"ms": alone, "watched_ms": watched, "mib": rss_mib()}))
    fleet.close()


async def bare_client(names: list[str], ssh_config: str, seconds: float) -> None:
    """Read the same lines with asyncssh's own stream reader and count them."""
    import asyncssh

    from gpuboard.transport import bundle

    lines = 0
    slots = asyncio.Semaphore(64)

    async def node(name: str) -> None:
        nonlocal lines
        async with slots:
            connection = await asyncssh.connect(
                name, config=[ssh_config], encryption_algs="^aes128-gcm@openssh.com", login_timeout=60
            )
            command = bundle.command_line(sys.executable)
            process: Any = await connection.create_process(command, encoding=None)
        config = {"node": name, "interval_s": 1.0, "claims_dir": "/var/tmp", "simulate": None, "now": True}
        start = {"t": "start", "nonce": "0" * 16, "role": "node", "config": config}
        process.stdin.write(bundle.bundle("node") + json.dumps(start).encode() + b"\n")
        first = True
        async for line in process.stdout:
            if first:
                process.stdin.write(b'{"t":"tick","in_ms":%d}\n' % next_tick_ms(time.time(), 1.0))
                first = False
            if b'"t":"reading"' in line[:64]:
                lines += 1

    tasks = [asyncio.create_task(node(name)) for name in names]
    until = time.monotonic() + START_S
    while lines < len(names) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.sleep(SETTLE_S)
    before, lines_before = cpu_s(), lines
    await asyncio.sleep(seconds)
    ms = (cpu_s() - before) * 1000 / (lines - lines_before)
    print(json.dumps({"ms": ms, "mib": rss_mib()}), flush=True)
    for task in tasks:
        task.cancel()
    os._exit(0)  # skip closing a hundred connections in order


def measure(polls: Callable[[], int], work: Callable[[], None]) -> float:
    """Return this process's CPU in ms per poll while ``work`` runs."""
    before, polls_before = cpu_s(), polls()
    work()
    return (cpu_s() - before) * 1000 / (polls() - polls_before)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def agents(sshd: Sshd) -> list[int]:
    """Return the pids of all agents, their NVML processes included."""
    found = []
    for pid in children(sshd.process.pid):
        with contextlib.suppress(OSError):
            if b"gpuboard.agent.bundle_loader" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def agent_cost(sshd: Sshd, nodes: int, seconds: float) -> tuple[float, float]:
    """Return (percent of a core, PSS in MiB) of one node's agent while the client works."""
    pids = agents(sshd)
    before = {pid: cpu_ns(pid) for pid in pids}
    started = time.monotonic_ns()
    time.sleep(seconds)
    used = sum(cpu_ns(pid) - since for pid, since in before.items())
    percent = 100 * used / (time.monotonic_ns() - started) / nodes
    return percent, sum(pss_mib(pid) for pid in pids) / nodes


def cpu_ns(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def pss_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def until_gone(sshd: Sshd) -> None:
    """Wait until all agents of the last client have ended, so that the next one is measured alone."""
    until = time.monotonic() + 10
    while agents(sshd):
        if time.monotonic() > until:
            sys.exit("agents did not end with their client")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
