"""Slurm's controller killed, hung and restarted while gpuboard watches: nothing becomes free by that, NVML goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.hosts import Running
from tests.integration.slurm_truth import Status, configure, gpus, states, status
from tests.nvml import Gpu
from tests.slurm import SlurmCluster
from tests.waiting import read_line

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]

SLEEP = ("--wrap", "sleep 600")


class Watch:
    """`gpuboard status --watch --json`."""

    def __init__(self, process: Running) -> None:
        self.process = process
        self.lines: list[Status] = []

    def next(self) -> Status:
        """Return the next line."""
        line = read_line(self.process)
        assert line, f"the watch has ended with {self.process.wait(60)}"
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def until(self, holds: Callable[[Status], Any], what: str, timeout_s: float = 90) -> Status:
        """Read lines until one fits, and return that."""
        deadline = time.monotonic() + timeout_s
        while not holds(line := self.next()):
            seen = [(node["name"], states(line, node["name"])) for node in line["nodes"]]
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}; now {line['scheduler']}, {seen}"
        return line


@contextmanager
def watching(slurm: SlurmCluster, user: str = "root") -> Iterator[Watch]:
    """Watch with Slurm asked each second: two nodes as root, who may connect to all, or all by a user's defaults."""
    if user == "root":
        configure(slurm, user, 'ssh = "all"', nodes="gpu[01-02]")
    else:
        configure(slurm, user)
    command = ["gpuboard", "status", "--watch", "0.5", "--json"]
    with slurm.nodes["login1"].popen(command, user=user) as process:
        watch = Watch(process)
        yield watch
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130


def all_states(line: Status) -> list[str]:
    return [states(line, node["name"]) for node in line["nodes"]]


BEFORE = ["aaffffff", "ffffffff"]
MEANWHILE = ["aauuuuuu", "uuuuuuuu"]


@pytest.mark.parametrize(("fault", "cure"), [("kill", "restart"), ("stop", "continue")])
def test_without_a_controller_nothing_is_called_free(slurm: SlurmCluster, fault: str, cure: str) -> None:
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.save()
    with watching(slurm) as watch:
        before = watch.until(lambda line: all_states(line) == BEFORE, "Slurm and the nodes are read")
        assert before["scheduler"]["error"] is None
        slurm.controller(fault)
        begun = time.monotonic()
        first = watch.until(lambda line: line["scheduler"]["error"], "the fault is said")
        said_after_s = time.monotonic() - begun
        late = watch.until(lambda line: all_states(line) == MEANWHILE, "nothing is called free")

        assert said_after_s < 30
        assert first["scheduler"]["age_s"] is not None
        assert late["scheduler"]["current"] is False
        assert late["scheduler"]["age_s"] > before["scheduler"]["age_s"]
        held, free = gpus(late, "gpu01")[1], gpus(late, "gpu01")[2]
        assert [job["id"] for job in held["jobs"]] == [str(number)]
        assert "as of" in held["reason"]  # what Slurm said last, and when
        assert free["reason"].startswith("scheduler: no answer since")
        for line in watch.lines[watch.lines.index(before) :]:  # never, not even for one line
            assert all_states(line)[0].startswith("aa")

        slurm.nodes["gpu02"].script([Gpu(temperature=77)] * 8)  # NVML goes on, at its pace

        def read_on(line: Status) -> bool:
            warm = bool(gpus(line, "gpu02")[0]["temperature"] == 77)
            return warm and all(node["age_s"] < 5 for node in line["nodes"])

        watch.until(read_on, "NVML is read")

        slurm.controller(cure)
        after = watch.until(lambda line: all_states(line) == BEFORE, "it recovers by itself")
        assert after["scheduler"]["error"] is None
        assert after["scheduler"]["current"] is True


def test_nodes_that_only_slurm_shows_are_unknown_without_it(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    other = slurm.submit(["--gres=gpu:3", "-w", "gpu02", *SLEEP], user="bob", running=True)
    slurm.save()
    before = ["aaffffff", "aaafffff", "ffffffff"]
    with watching(slurm, "alice") as watch:
        first = watch.until(lambda line: all_states(line) == before, "Slurm and the node of the own job are read")
        assert [node["source"] for node in first["nodes"]] == ["nvml", "slurm", "slurm"]
        slurm.controller("kill")
        late = watch.until(lambda line: "f" not in "".join(all_states(line)), "nothing is called free")
        assert all_states(late) == ["aauuuuuu", "aaauuuuu", "uuuuuuuu"]
        assert [job["id"] for job in gpus(late, "gpu02")[0]["jobs"]] == [str(other)]
        slurm.nodes["gpu01"].script([Gpu(temperature=77)] * 8)
        watch.until(lambda line: gpus(line, "gpu01")[0]["temperature"] == 77, "its node is read on")
        slurm.controller("restart")
        watch.until(lambda line: all_states(line) == before, "it recovers by itself")


def test_a_restart_of_the_controller_is_hardly_noticed(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    with watching(slurm) as watch:
        watch.until(lambda line: all_states(line) == BEFORE, "Slurm and the nodes are read")
        slurm.controller("restart")
        later = slurm.submit(["--gres=gpu:1", "-w", "gpu02", *SLEEP], user="bob", running=True)

        def sees_it(line: Status) -> bool:  # Slurm is asked for nodes and for jobs one after the other
            jobs = [job["id"] for job in gpus(line, "gpu02")[0]["jobs"]] if all_states(line)[1] == "afffffff" else []
            return jobs == [str(later)]

        watch.until(sees_it, "what came after the restart is seen")
        assert {all_states(line)[0][:2] for line in watch.lines[1:] if len(all_states(line)[0]) == 8} <= {"aa", "uu"}


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_status_once_without_a_controller(slurm: SlurmCluster, fault: str) -> None:
    """Nothing is known of Slurm, and nodes are read all the same where the configuration names them."""
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.controller(fault)
    configure(slurm, "root", 'ssh = "all"', nodes="gpu01")
    begun = time.monotonic()
    found = status(slurm, "root")
    assert time.monotonic() - begun < 40
    assert all_states(found) == ["u" * 8]
    assert found["scheduler"]["error"]
    assert found["scheduler"]["age_s"] is None
    assert {node["source"] for node in found["nodes"]} == {"nvml"}
    table = slurm.run(["gpuboard", "status"], user="root")
    assert "Slurm does not answer" in table.stdout
    assert "no GPU counts as free meanwhile" in table.stdout


def test_without_munge_nothing_is_called_free(slurm: SlurmCluster) -> None:
    login1 = slurm.nodes["login1"]
    configure(slurm, "root", 'ssh = "all"', nodes="gpu01")
    socket = login1.path("/run/munge/munge.socket.2")
    socket.rename(socket.with_name("away"))
    try:
        found = status(slurm, "root")
    finally:
        socket.with_name("away").rename(socket)
    assert all_states(found) == ["u" * 8]
    assert "munge" in found["scheduler"]["error"].lower()


def test_a_node_that_is_lost_is_unknown_while_its_jobs_stay(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    with watching(slurm) as watch:
        watch.until(lambda line: all_states(line) == BEFORE, "Slurm and the nodes are read")
        slurm.nodes["gpu01"].unplug()
        lost = watch.until(lambda line: all_states(line)[0] == "aauuuuuu", "the node is missed")
        assert all_states(lost)[1:] == BEFORE[1:]
        slurm.nodes["gpu01"].plug()
        watch.until(lambda line: all_states(line) == BEFORE, "it is back")
