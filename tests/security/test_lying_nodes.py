"""Lying nodes: what one sends beyond all measure costs that node its connection, and its neighbours nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nvml import Gpu, library, write_script
from tests.security import liar
from tests.sshd import SSHD, Sshd

pytestmark = pytest.mark.skipif(SSHD is None, reason="needs sshd (openssh-server)")
HONEST = ("honest-1", "honest-2")
# One byte at a time: nothing is heard, and then there is too much noise or there are too many pieces.
SLOWLY = ("nothing heard", "malformed answer", "sent more data than an agent may")
SAYS = {
    "uuids": "different GPUs so far; at most 256",
    "gpus": "lists 100000 GPUs; at most 256",
    "lines": "many of which belong to no GPU or claim",
    "noise": "malformed answer",
    "fast": "sent more data than an agent may",
    "claims": "lists 40000 claims; at most 4096",
    "processes": "lists 100000 processes; at most 8192",
    "migs": "lists 1000 MIG devices of a GPU; at most 64",
    "replies": "sent more data than an agent may",
}
MARKS = {f"{kind}-liar": SLOWLY if kind == "bytes" else (SAYS[kind],) for kind in liar.KINDS}


def liars(folder: Path) -> Sshd:
    """Return an sshd on which the interpreter is the liar."""
    return Sshd(folder / "sshd", extra="SetEnv LIAR=1\n")


def honest(folder: Path) -> Sshd:
    """Return an sshd of a node with two GPUs."""
    write_script(folder / "nvml", [Gpu(), Gpu()])
    return Sshd(folder / "sshd", extra=f"SetEnv LD_LIBRARY_PATH={library()} FAKE_NVML={folder / 'nvml'}\n")


class Servers:
    """Both servers, and one ssh_config for them."""

    def __init__(self, folder: Path) -> None:
        (folder / "liars").mkdir()
        (folder / "honest").mkdir()
        self._both = liars(folder / "liars"), honest(folder / "honest")
        for sshd, names in zip(self._both, ("*-liar", "honest-*"), strict=True):
            sshd.host(names, KexAlgorithms="curve25519-sha256")
        self.python = folder / "python3"
        self.python.write_text(
            f'#!/bin/sh\nif [ "$LIAR" ]; then exec {sys.executable} {liar.__file__}; fi\nexec {sys.executable} "$@"\n'
        )
        self.python.chmod(0o755)
        self.config = folder / "ssh_config"
        self.config.write_text("".join(sshd.ssh_config.read_text() for sshd in self._both))

    def watch(self, marks: Mapping[str, Sequence[str]], seconds: float) -> Any:
        """Return what a client beside these liars reports."""
        command = [sys.executable, "-m", "tests.security.lying_client"]
        command += [str(self.config), str(self.python), str(seconds), json.dumps(marks), *marks, *HONEST]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def stop(self) -> None:
        for sshd in self._both:
            sshd.stop()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path)
    yield found
    found.stop()


def test_lying_nodes_are_identified_and_take_no_memory_and_no_time_of_others(servers: Servers) -> None:
    alone = servers.watch({}, 1.0)
    beside = servers.watch(MARKS, 3.0)
    for name, marks in MARKS.items():
        told = beside["errors"][name]
        assert any(mark in words for words in told for mark in marks), (name, told)
    assert beside["mib"] - alone["mib"] <= 100
    assert [beside["last"][name] for name in HONEST] == [["up", 2], ["up", 2]]
    assert beside["ages"][-1] < 8.0
    assert all(count <= 256 for _, count in beside["last"].values())
