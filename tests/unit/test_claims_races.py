"""Many processes of two users take, release and die at once, on real files."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import random
import stat
import time
from pathlib import Path

import pytest

from gpuboard.agent.claims import protocol
from gpuboard.agent.claims import store as claims
from tests.unit.claims_help import ALICE, BOB, ask, claims_folder, root, take
from tests.waiting import until

__all__ = ["claims_folder"]


def racer(path: str, uid: int, seed: int, over: ctypes.c_byte, log: int) -> None:
    """Take 1 to 4 of 12 GPUs and release them, again and again; write what we hold, from when to when."""
    os.setgroups([])
    os.setresuid(uid, uid, uid)
    rng = random.Random(seed)
    number = 0
    while not over.value:
        number += 1
        lease = f"r{seed}x{number}"
        gpus = [f"GPU-{i:02}" for i in rng.sample(range(12), rng.randint(1, 4))]
        try:
            take(path, lease, *gpus)
        except claims.Refuse as refusal:
            assert refusal.kind == "conflict"
            continue
        os.write(log, (json.dumps(["has", time.monotonic(), lease, gpus]) + "\n").encode())
        os.write(log, (json.dumps(["ends", time.monotonic(), lease, gpus]) + "\n").encode())
        ask("release", path, lease=lease)


def overlaps(lines: list[str], killed_at: float) -> list[str]:
    """Return where two leases held one GPU. A lease without an end was its taker's until he was killed."""
    begun: dict[str, tuple[float, list[str]]] = {}
    spans: list[tuple[str, float, float, str]] = []
    for line in lines:
        what, at, lease, gpus = json.loads(line)
        if what == "has":
            begun[lease] = (at, gpus)
        else:
            since, _ = begun.pop(lease)
            spans += [(gpu, since, at, lease) for gpu in gpus]
    spans += [(gpu, at, killed_at, lease) for lease, (at, gpus) in begun.items() for gpu in gpus]
    spans.sort()
    return [
        f"{gpu}: {lease} until {end}, {later} from {start}"
        for (gpu, _, end, lease), (other, start, _, later) in itertools.pairwise(spans)
        if gpu == other and start < end
    ]


@root
@pytest.mark.parametrize("lock", ["honoured", "held by a hostile user"])
def test_two_users_race_and_die(lock: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 processes of two users, one killed every 30 ms: no GPU twice, and no part of a set left by the living."""
    log = tmp_path / "log"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # opened here: the users need no way to it
    hostile = os.open(folder, os.O_RDONLY)
    if lock != "honoured":
        fcntl.flock(hostile, fcntl.LOCK_EX)
        monkeypatch.setattr(protocol, "LOCK_WAIT_S", 0.0)
    context = multiprocessing.get_context("fork")
    over = context.RawValue(ctypes.c_byte, 0)  # it has no lock that one who is killed would keep
    processes = [context.Process(target=racer, args=(folder, (ALICE, BOB)[i % 2], i, over, fd)) for i in range(12)]
    try:
        for process in processes:
            process.start()
        rng = random.Random(7)
        killed: set[int] = set()
        for victim in rng.sample(range(12), 8):
            time.sleep(0.03)  # the pace of the killing, not a wait for anything
            processes[victim].kill()
            killed.add(victim)
        until(lambda: log.read_bytes().count(b"\n") > 12, "they hold some, and others after them")
        raced = log.read_bytes().count(b"\n")
        until(lambda: log.read_bytes().count(b"\n") > raced + 200, "the living go on racing")
        over.value = 1
        for process in processes:
            process.join(120)
    finally:
        over.value = 1
        os.close(fd)
        os.close(hostile)
    lines = log.read_text().splitlines()
    assert lines
    assert overlaps(lines, time.monotonic()) == []
    assert {process.exitcode for i, process in enumerate(processes) if i not in killed} == {0}
    left = {name.split(".")[2] for name in os.listdir(folder) if name.startswith("gpuboard.")}
    assert {int(lease[1:].split("x")[0]) for lease in left} <= killed
    for name in os.listdir(folder):
        assert stat.S_ISREG(os.lstat(f"{folder}/{name}").st_mode)
