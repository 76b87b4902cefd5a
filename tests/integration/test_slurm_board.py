"""The board on a cluster with Slurm: what it shows, reserving through Slurm, a controller that is down."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.test_board_tmux import Pane
from tests.slurm import SlurmCluster
from tests.waiting import until

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]


def test_reserving_and_releasing_through_slurm(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:8", "-w", "gpu02", "--wrap", "sleep 600"], user="bob", running=True)
    slurm.update("node", "gpu03", State="DRAIN", Reason="bad fan")
    pane = Pane(slurm.nodes["login1"])
    pane.begin()
    try:
        pane.type("gpuboard board\n")
        pane.shows("h100  8 free of 24  8 reserved  8 allocated")
        pane.states({"gpu01": "FFFFFFFF", "gpu02": "AAAAAAAA", "gpu03": "RRRRRRRR"})  # drawn after the lines above
        pane.shows("bob")  # whose job it is
        pane.keys("r")
        pane.shows("Slurm will choose the GPUs")
        pane.keys("BSpace")
        pane.type("3")
        pane.shows("3 GPUs: 1 node")
        pane.keys("Enter")
        pane.shows("Reserved: ")
        pane.states({"gpu01": "AAAFFFFF"})
        number = max(slurm.jobs())
        assert slurm.held(number) == {"gpu01": {0, 1, 2}}
        assert slurm.job(number)["UserId"].startswith("alice(")
        pane.keys("l")
        pane.shows("1 lease ", "alice, job ")
        pane.keys("d")
        lease = slurm.job(number)["JobName"].removeprefix("gpuboard-")
        pane.shows(f"Release {lease}?")
        pane.keys("y")
        pane.shows(f"Released: {lease}")
        until(lambda: number not in slurm.jobs(), "the job is cancelled")
        pane.keys("Escape")
        pane.states({"gpu01": "FFFFFFFF"})
    finally:
        pane.end()


def test_without_a_controller_a_banner_and_no_free_gpu(slurm: SlurmCluster) -> None:
    config = slurm.nodes.home("alice") / ".config" / "gpuboard"
    config.mkdir(parents=True)
    (config / "config.toml").write_text('interval = "1s"\n[slurm]\ninterval = "1s"\n')
    pane = Pane(slurm.nodes["login1"])
    pane.begin()
    try:
        pane.type("gpuboard board\n")
        pane.shows("h100 24 free of 24")
        slurm.controller("kill")
        pane.shows("no answer from Slurm for", timeout_s=90)
        pane.shows("h100  0 free of 24")
        slurm.controller("restart")
        pane.wait(lambda text: "h100 24 free of 24" in text and "no answer from Slurm" not in text, "all as before", 90)
    finally:
        pane.end()
