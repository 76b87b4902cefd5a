"""The Python interface, in separate Python processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.model.text import clean
from tests.integration.here import Here
from tests.integration.test_allocate import claims
from tests.nodes import Cluster
from tests.waiting import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("_claims")


@pytest.fixture
def _claims(here: Here) -> None:
    here.needs_claims()


def python(here: Here, script: str) -> list[object]:
    """Run a script and return the JSON values that it printed, one per line."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, os, gpuboard\ndef say(x): print(json.dumps(x), flush=True)\n{script}"],
        env=here.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_block_has_its_gpus_and_releases_them(here: Here) -> None:
    values = python(
        here,
        """
os.environ["CUDA_VISIBLE_DEVICES"] = "before"
with gpuboard.lease(n=1, model="h100", for_="1h", purpose="sweep") as lease:
    same = os.environ["GPUBOARD_LEASE"] == lease.id
    say([[gpu.index for gpu in lease.gpus], os.environ["CUDA_VISIBLE_DEVICES"], same])
    say([gpu.state for gpu in gpuboard.status().nodes[0].gpus])
    lease.renew("2h")
    say([lease.rank_map.world_size, lease.allocation.lease.purpose])
say([os.environ["CUDA_VISIBLE_DEVICES"], "GPUBOARD_LEASE" in os.environ])
say([gpu.state for gpu in gpuboard.status().nodes[0].gpus])
""",
    )
    assert values == [[[0], "0", True], ["reserved", "free"], [1, "sweep"], ["before", False], ["free", "free"]]


def test_exception_in_the_block_and_process_end_release_the_gpus(here: Here) -> None:
    values = python(
        here,
        """
try:
    with gpuboard.lease(n=2):
        1 / 0
except ZeroDivisionError:
    say([gpu.state for gpu in gpuboard.status().nodes[0].gpus])
lease = gpuboard.lease(n=1).__enter__()
os._exit(0)
""",
    )
    assert values == [["free", "free"]]
    until(lambda: not claims(here), "the process has ended, its claim has not")


def test_purpose_may_be_any_text(here: Here) -> None:
    purposes = ["\x1b[31mred", "\ud800lost", "x" * 600]
    values = python(
        here,
        f"""
for purpose in {purposes!a}:
    with gpuboard.lease(n=1, purpose=purpose) as lease:
        say(lease.allocation.lease.purpose)
""",
    )
    assert values == [clean(purpose, 200) for purpose in purposes]


def test_refusals_and_misuse_raise_exceptions_with_reasons(here: Here) -> None:
    values = python(
        here,
        """
from gpuboard.errors import NeverPossible, UsageError
try:
    with gpuboard.lease(n=3):
        pass
except NeverPossible as error:
    say([error.exit_code, [gpu.reason for gpu in error.refusal.gpus]])
for wrong in (
    {"n": 0}, {}, {"n": 1, "gpu_mem": "lots"}, {"gpus": "x"}, {"n": 1, "for_": "9d"}, {"n": 2.0}, {"n": "2"},
    {"n": 1, "per_node": 0}, {"n": 1, "max_nodes": -1}, {"n": 1, "topology": "ring"}, {"n": 1, "for_": 0},
    {"n": 1, "for_": float("nan")}, {"n": 1, "wait": -1}, {"gpus": ["gpu01:0"]}, {"n": 1, "purpose": 5},
    {"n": 1, "nodes": ["gpu01"]}, {"n": 1, "slurm": "--nice=3"}, {"n": 1, "for_": [1]},
):
    try:
        gpuboard.lease(**wrong)
    except UsageError as error:
        say(str(error) != "")
""",
    )
    assert values == [[3, ["available", "available"]], *[True] * 18]


@pytest.mark.nodes
def test_node_that_connects_late_makes_no_other_node_stale(nodes: Cluster) -> None:
    """A reading is valid for 5 s; the other nodes are polled again."""
    slow = nodes.home("alice") / "slow"
    slow.write_text('#!/bin/sh\nsleep 6\nexec /usr/bin/python3 "$@"\n')
    slow.chmod(0o755)
    nodes["gpu02"].use_python("/srv/home/alice/slow")
    script = "import gpuboard; print([node.state for node in gpuboard.status('gpu0[1-2]').nodes])"
    done = nodes["login1"].run([sys.executable, "-c", script], user="alice")
    assert done.stdout == "['up', 'up']\n", done.stderr
