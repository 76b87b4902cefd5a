"""Where faults are tried: on this machine, and on two test nodes that are reached over ssh from a third."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.hosts import ADDRESSES
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import kill_each

TARGET = Path(__file__).parent / "target.py"
MASTER_PORT = 29511  # for faults of a port that is known before the launch
RankMap = dict[str, Any]


def rank_map(counts: Mapping[str, int], addresses: Mapping[str, str]) -> RankMap:
    """Return a rank map with ``counts`` ranks per node, on GPUs 0, 1, … of each, in JSON's types."""
    ranks: list[dict[str, Any]] = []
    for node, count in counts.items():
        for at in range(count):
            ranks.append({"rank": len(ranks), "node": node, "local_rank": at, "index": at, "uuid": f"GPU-{node}-{at}"})
    nodes = [
        {
            "name": node,
            "address": addresses[node],
            "node_rank": at,
            "local_world_size": count,
            "cuda_visible_devices": ",".join(map(str, range(count))),
        }
        for at, (node, count) in enumerate(counts.items())
    ]
    master = addresses[next(iter(counts))]
    whole = {"schema": 1, "lease": None, "master_addr": master, "master_port": 0, "world_size": len(ranks)}
    return {**whole, "nodes": nodes, "ranks": ranks}


class Place(Protocol):
    """A place for launches. ``begun`` is the file into which the target writes the moment of its fault."""

    nodes: int
    begun: Path

    def launch(
        self, words: Sequence[str], options: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object]
    ) -> subprocess.Popen[str]:
        """Start `gpuboard launch`: ``words`` are target and arguments, ``change`` changes the rank map."""

    def torchrun(
        self, words: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object], env: Sequence[str]
    ) -> subprocess.Popen[str]:
        """Start torchrun on all nodes with the same target, ``change``d master address, and variables ``env``."""

    def gpuboard(self, *words: str) -> str:
        """Return what another gpuboard command prints."""

    def left(self) -> list[int]:
        """Return the living processes of launches, ssh sessions and keepers not counted."""

    def clear(self) -> None:
        """Kill those, undo what a fault has changed, and forget the moment of the fault."""

    def close(self) -> None:
        """Stop the place."""


class OneNode:
    """This machine, with three ranks."""

    nodes = 1

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpuboard-faults-"))
        self.begun = self.folder / "fault"
        self._env = {**os.environ, "HOME": str(self.folder), "OMP_NUM_THREADS": "1", "FAULTS_IN": str(self.folder)}
        self._env.pop("XDG_STATE_HOME", None)

    def launch(
        self, words: Sequence[str], options: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object]
    ) -> subprocess.Popen[str]:
        host = socket.gethostname()
        mapped = rank_map({host: 3}, {host: "127.0.0.1"})
        change(mapped)
        (self.folder / "map.json").write_text(json.dumps(mapped))
        start = [sys.executable, "-m", "gpuboard", "launch", "--rank-map", "map.json", "--device", "cpu"]
        return self._start([*before, *start, "--python", sys.executable, "--grace", "1s", *options, *words])

    def torchrun(
        self, words: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object], env: Sequence[str]
    ) -> subprocess.Popen[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        return self._start([*before, *start, *words])

    def gpuboard(self, *words: str) -> str:
        command = [sys.executable, "-m", "gpuboard", *words]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, check=False).stdout

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def left(self) -> list[int]:
        mark = f"FAULTS_IN={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX" and mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def clear(self) -> None:
        kill_each(self.left())
        self.begun.unlink(missing_ok=True)

    def close(self) -> None:
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class TwoNodes:
    """gpu01 with rank 0 and gpu02 with ranks 1 and 2, launched by alice on login1."""

    nodes = 2
    home = "/srv/home/alice"

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.cluster.start()
        self.begun = self.cluster.home("alice") / "fault"
        self.held: RankMap | None = None  # that of a lease, in place of the usual one
        self._spared: list[int] = []  # processes of the lease
        self.clear()

    def launch(
        self, words: Sequence[str], options: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object]
    ) -> subprocess.Popen[str]:
        mapped = self.held or rank_map({"gpu01": 1, "gpu02": 2}, ADDRESSES)
        change(mapped)
        self.put("map.json", json.dumps(mapped))
        start = [*before, "gpuboard", "launch", "--rank-map", "map.json", "--device", "cpu", "--python", sys.executable]
        return self._start([*start, "--grace", "1s", "--env", "OMP_NUM_THREADS=1", *options, *words])

    def torchrun(
        self, words: Sequence[str], before: Sequence[str], change: Callable[[RankMap], object], env: Sequence[str]
    ) -> subprocess.Popen[str]:
        mapped = rank_map({"gpu01": 1}, ADDRESSES)
        change(mapped)
        once = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        once += ["--master-addr", mapped["master_addr"], "--master-port", str(MASTER_PORT)]
        each = [
            f"ssh gpu0{at + 1} {shlex.join([*env, *once, '--node-rank', str(at), *words])} 2>&1 &" for at in range(2)
        ]
        return self._start(["sh", "-c", "\n".join([*each, "wait"])])

    def gpuboard(self, *words: str) -> str:
        return self.cluster["login1"].run(["gpuboard", *words]).stdout

    def reserve(self) -> None:
        """Reserve GPU 0 of gpu01 and two of gpu02 for the next launch."""
        for name in ("gpu01", "gpu02"):
            self.cluster[name].script([Gpu() for _ in range(8)])
        words = ["gpuboard", "allocate", "--gpus", "gpu01:0@gpu02:0-1", "--for", "10m", "--detach", "--format", "json"]
        self.held = json.loads(self.cluster["login1"].run(words, check=True).stdout)["rank_map"]
        self._spared = self.left()

    def put(self, name: str, text: str) -> None:
        """Write a file into alice's home."""
        self.cluster["login1"].run(["sh", "-c", 'cat > "$0"', name], stdin=text, check=True)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        return self.cluster["login1"].popen(command, stderr=subprocess.STDOUT)

    def left(self) -> list[int]:
        hosts = [self.cluster[name] for name in ("gpu01", "gpu02")]
        found = [p for host in hosts for p in host.processes(user="alice") if not p.name.startswith("sshd")]
        return [p.pid for p in found if p.pid not in self._spared]

    def clear(self) -> None:
        self.cluster.reset()
        self.put(".ssh/config", "Host *\n    KexAlgorithms curve25519-sha256\n")
        self.cluster["login1"].run(["mkdir", "-p", ".config/gpuboard"], check=True)
        self.put(".config/gpuboard/config.toml", 'nodes = ["gpu0[1-2]"]\n')
        self.begun.unlink(missing_ok=True)
        self.held = None
        self._spared = []

    def close(self) -> None:
        self.cluster.stop()
