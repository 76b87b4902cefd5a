"""`allocate` stopped at each of ten points on its way to a job, by SIGINT, SIGTERM and SIGKILL: no job is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.hosts import PATH, Running
from tests.integration.slurm_leases import all_gone, left
from tests.slurm import SlurmCluster
from tests.waiting import until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]

# Precedes a Slurm command on PATH. It counts its calls and, at the one that $HOME/stop/at names, creates the file
# $HOME/stop/reached and waits: before the real command starts, or after its end and before its output is passed on.
WRAPPER = """\
#!/bin/sh
name=${0##*/} stop=$HOME/stop
calls=$(($(cat "$stop/$name" 2>/dev/null || echo 0) + 1)); echo "$calls" >"$stop/$name"
hold() {
    [ "$(cat "$stop/at")" = "$name $1 $calls" ] || return 0
    touch "$stop/reached"
    while [ ! -e "$stop/go" ]; do sleep 0.02; done
}
hold before
/usr/bin/$name "$@" >"$stop/out.$$" 2>"$stop/err.$$"; code=$?
hold after
cat "$stop/out.$$"; cat "$stop/err.$$" >&2
exit $code
"""
# srun's stdin and stdout are an agent's, so it is stopped only before it starts.
PASSING = WRAPPER[: WRAPPER.index("/usr/bin")] + 'exec /usr/bin/$name "$@"\n'

POINTS = [
    ("sinfo", "before", 1, "--n 2"),  # the partitions: nothing is submitted yet
    ("sinfo", "after", 1, "--n 2"),
    ("sbatch", "before", 1, "--n 2"),  # the keeper has the lease, no job is submitted
    ("sbatch", "after", 1, "--n 2"),  # there is a job, whose number is unknown
    ("squeue", "before", 1, "--n 2"),  # the number is known
    ("squeue", "after", 1, "--n 2"),  # it runs, which is not known yet
    ("squeue", "before", 3, "--n 24 --wait 5m"),  # it waits in the queue
    ("scontrol", "before", 1, "--n 2"),  # it runs: its nodes are queried
    ("scontrol", "after", 2, "--n 2"),
    ("srun", "before", 1, "--n 2"),  # its GPUs are read
]


@pytest.fixture
def home(slurm: SlurmCluster) -> Path:
    """Alice's home, with the wrappers in its folder bin."""
    home = slurm.nodes.home("alice")
    (home / "bin").mkdir()
    for name in ("sinfo", "sbatch", "squeue", "scontrol", "scancel", "srun"):
        wrapper = home / "bin" / name
        wrapper.write_text(PASSING if name == "srun" else WRAPPER)
        wrapper.chmod(0o755)
    return home


def start(slurm: SlurmCluster, home: Path, point: str, args: str, holder: int) -> Running:
    """Start an allocation that stops at ``point``."""
    stop = home / "stop"
    if stop.exists():
        for path in stop.iterdir():
            path.unlink()
    stop.mkdir(exist_ok=True)
    os.chown(stop, 2001, 2001)
    (stop / "at").write_text(point)
    words = ["gpuboard", "allocate", *args.split(), "--holder", str(holder), "--format", "shell"]
    return slurm.nodes["login1"].popen(words, env={"PATH": f"/srv/home/alice/bin:{PATH}"})


@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point[:3])))
def test_no_job_is_left(slurm: SlurmCluster, home: Path, point: tuple[str, str, int, str]) -> None:
    *words, args = point
    stop = home / "stop"
    blocker = 0
    if "--wait" in args:
        blocker = slurm.submit(["-N1", "--gpus=1", "--wrap", "sleep 600"], user="bob", running=True)
    # `status` fills the cache of Slurm's answers, so that the counted scontrol calls are allocate's own.
    with slurm.nodes["login1"].popen(["sleep", "600"]) as holder:
        try:
            slurm.run(["gpuboard", "status"], check=True)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                with start(slurm, home, " ".join(map(str, words)), args, holder.process.inner) as process:
                    until(lambda: (stop / "reached").exists() or process.poll() is not None, f"{words} is reached")
                    assert process.poll() is None, process.communicate()
                    process.send_signal(number)
                    if number == signal.SIGKILL:
                        process.wait(60)
                    (stop / "go").touch()
                    out, _ = process.communicate(timeout=60)
                code = -9 if number == signal.SIGKILL else 130
                assert process.returncode in {code, 128 - code}
                if number != signal.SIGKILL:
                    assert out.startswith("export CUDA_VISIBLE_DEVICES=''; ")
                    assert slurm.jobs(ending=False) == {blocker} - {0}  # ended when the command has
                until(lambda: slurm.jobs() == {blocker} - {0}, f"no job is left after {number.name}")
                until(lambda: not left(slurm), f"no file is left after {number.name}: {left(slurm)}")
        finally:
            holder.kill()


def test_a_closed_stdout_leaves_no_job(slurm: SlurmCluster) -> None:
    read, write = os.pipe()
    os.close(read)
    command = ["gpuboard", "allocate", "--n", "2", "--detach", "--for", "5m"]
    with slurm.nodes["login1"].popen(command, stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 141, err
    all_gone(slurm)
