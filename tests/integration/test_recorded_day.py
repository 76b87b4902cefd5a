"""A recorded day of a real cluster: a lost GPU, a node that hangs, Slurm without its controller; then the replay."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuboard.board.replay.core import ReplayCore
from gpuboard.board.scene import Scene
from gpuboard.config import Settings
from gpuboard.errors import UsageError
from gpuboard.model.snapshot import NodeView
from gpuboard.recording.events import ClusterEvent
from gpuboard.recording.file import Recording
from gpuboard.recording.frames import Frame
from tests.hosts import Running, eight
from tests.integration.slurm_truth import configure
from tests.nvml import LOST, Gpu
from tests.slurm import SlurmCluster
from tests.waiting import until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(480)]  # a hung node and an outage take their time

PATIENCE_S = 120.0


class Day:
    """A running `gpuboard record`, and the moments that a test notes."""

    def __init__(self, file: Path, process: Running) -> None:
        self.file = file
        self.process = process
        self.moments: dict[str, float] = {}

    def note(self, name: str, holds: Callable[[Frame], bool]) -> None:
        """Wait until the newest recorded frame is as expected, and note its moment."""

        def found() -> Frame | None:
            assert self.process.poll() is None, self.process.communicate()
            try:
                recording = Recording(self.file)
            except UsageError:  # it has no frame yet
                return None
            frame = recording.at(recording.end)
            recording.close()
            return frame if holds(frame) else None

        frame = until(found, f"{name} is in the recording", PATIENCE_S)
        assert frame is not None
        self.moments[name] = frame.at

    def end(self) -> None:
        """End the recording."""
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err


@contextmanager
def ended(process: Running) -> Iterator[None]:
    """Kill a process that still runs at the end, so that a test that fails does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def nodes_of(at: Frame | Scene) -> dict[str, NodeView]:
    return {node.name: node for node in at.snapshot.nodes}


def cluster(at: Frame | Scene) -> tuple[list[str] | None, ...]:
    """Return the states of the GPUs of each node; None for a node that is not up."""
    return tuple([gpu.state for gpu in node.gpus] if node.state == "up" else None for node in at.snapshot.nodes)


def test_a_day_is_replayed_as_it_was(slurm: SlurmCluster, tmp_path: Path) -> None:
    hosts = slurm.nodes
    job = slurm.submit(["--gres=gpu:2", "-w", "gpu03", "--wrap", "sleep 600"], user="bob", running=True)
    configure(slurm, "alice", 'ssh = "all"')
    free = ["free"] * 8
    held = ["allocated"] * 2 + ["free"] * 6
    broken = ["free"] * 7 + ["broken"]

    command = ["gpuboard", "record", "day.gz", "--every", "1s"]
    with hosts["login1"].popen(command, user="alice", stderr=subprocess.PIPE) as process, ended(process):
        day = Day(hosts.home("alice") / "day.gz", process)
        day.note("calm", lambda at: cluster(at) == (free, free, held))
        gpus: list[Gpu] = eight()
        hosts["gpu01"].script([*gpus[:7], Gpu(trouble=(f"fault * {LOST}",))])
        day.note("lost", lambda at: cluster(at) == (broken, free, held))
        hosts["gpu02"].pause_sshd()
        day.note("hung", lambda at: cluster(at) == (broken, None, held))
        hosts["gpu02"].resume_sshd()
        day.note("back", lambda at: cluster(at) == (broken, free, held))
        slurm.controller("kill")
        day.note("outage", lambda at: cluster(at)[1] == ["unknown"] * 8)
        day.end()

    # the command that prints one moment
    recording = Recording(day.file)
    before_end = f"--at=-{recording.end - day.moments['back']:.2f}s"
    recording.close()
    done = slurm.run(["gpuboard", "status", "--replay", "day.gz", before_end, "--json"], user="alice", host="login2")
    assert done.returncode == 0, done.stderr
    back = {node["name"]: node["gpus"] for node in json.loads(done.stdout)["nodes"]}
    assert [gpu["state"] for gpu in back["gpu01"]] == broken
    assert [[one["id"], one["user"]] for gpu in back["gpu03"] for one in gpu["jobs"]] == [[str(job), "bob"]] * 2

    # the board, moment by moment: what hangs, is lost or is not known affects nothing else
    core = ReplayCore(Recording(day.file), Settings(), {"HOME": str(tmp_path)})
    core.player.pause()
    shown: dict[str, Scene] = {}
    for name, moment in day.moments.items():
        core.player.seek(moment)
        shown[name] = core.scene()
    assert {name: cluster(scene) for name, scene in shown.items() if name != "outage"} == {
        "calm": (free, free, held),
        "lost": (broken, free, held),
        "hung": (broken, None, held),
        "back": (broken, free, held),
    }
    assert nodes_of(shown["lost"])["gpu01"].gpus[7].reason.startswith("GPU lost")
    hung = nodes_of(shown["hung"])["gpu02"]
    assert {gpu.state for gpu in hung.gpus} == {"unknown"}
    assert hung.error or (hung.age_s is not None and hung.age_s >= 5)
    assert nodes_of(shown["back"])["gpu02"].error is None
    slurm_lines = {name: [line for line in scene.banners if "Slurm" in line] for name, scene in shown.items()}
    assert [name for name, lines in slurm_lines.items() if lines] == ["outage"]
    assert slurm_lines["outage"][0].startswith("no answer from Slurm for ")
    assert {name for name, scene in shown.items() if scene.leases.outdated == ["slurm"]} == {"outage"}
    assert "free" not in [gpu.state for node in shown["outage"].snapshot.nodes for gpu in node.gpus]

    # its list of events
    core.player.seek(core.recording.end)
    core.scene()

    def listed(kind: str) -> list[ClusterEvent]:
        return [event for event in core.events.events if event.kind == kind]

    assert [(event.nodes, event.gpus) for event in listed("lost")] == [(("gpu01",), "7")]
    assert "gpu02" in [name for event in (*listed("stale"), *listed("unreachable")) for name in event.nodes]
    assert "gpu02" in [name for event in listed("back") for name in event.nodes]
    core.close()
