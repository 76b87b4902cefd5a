"""`allocate` stopped at each of ten points on its way to a job, by a signal or by SIGKILL: no job is left."""

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

# By command: where it is stopped, at which call, with which arguments, and the signal: one handler takes both.
POINTS = {
    "sinfo": [  # the partitions: nothing is submitted yet
        ("before", 1, "--n 2", signal.SIGINT),
        ("after", 1, "--n 2", signal.SIGTERM),
    ],
    "sbatch": [
        ("before", 1, "--n 2", signal.SIGTERM),  # the keeper has the lease, no job is submitted
        ("after", 1, "--n 2", signal.SIGINT),  # there is a job, whose number is unknown
    ],
    "squeue": [
        ("before", 1, "--n 2", signal.SIGINT),  # the number is known
        ("after", 1, "--n 2", signal.SIGTERM),  # it runs, which is not known yet
        ("before", 3, "--n 24 --wait 5m", signal.SIGINT),  # it waits in the queue
    ],
    "scontrol": [  # it runs: its nodes are queried
        ("before", 1, "--n 2", signal.SIGTERM),
        ("after", 2, "--n 2", signal.SIGINT),
    ],
    "srun": [("before", 1, "--n 2", signal.SIGTERM)],  # its GPUs are read
}


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


def interrupt(slurm: SlurmCluster, home: Path, process: Running, point: str, number: int) -> None:
    """Send a signal to an allocation that stops at ``point``, let it go on, and check its end."""
    stop = home / "stop"
    until(lambda: (stop / "reached").exists() or process.poll() is not None, f"{point} is reached")
    assert process.poll() is None, (point, process.communicate())
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait(60)
    (stop / "go").touch()
    out, _ = process.communicate(timeout=60)
    code = -9 if number == signal.SIGKILL else 130
    assert process.returncode in {code, 128 - code}, point
    assert number == signal.SIGKILL or out.startswith("export CUDA_VISIBLE_DEVICES=''; "), point


@pytest.mark.parametrize("command", POINTS)
def test_no_job_is_left(slurm: SlurmCluster, home: Path, command: str) -> None:
    others: set[int] = set()
    with slurm.nodes["login1"].popen(["sleep", "600"]) as holder:
        try:
            for when, call, args, handled in POINTS[command]:
                if "--wait" in args:
                    others.add(slurm.submit(["-N1", "--gpus=1", "--wrap", "sleep 600"], user="bob", running=True))
                # `status` fills the cache of Slurm's answers, so that the counted scontrol calls are allocate's own.
                slurm.run(["gpuboard", "status"], check=True)
                for number in (handled, signal.SIGKILL):
                    point = f"{command} {when} {call}"
                    with start(slurm, home, point, args, holder.process.inner) as process:
                        interrupt(slurm, home, process, point, number)
                    if number != signal.SIGKILL:
                        assert slurm.jobs(ending=False) == others, f"{point}: it has ended when the command has"
                    until(lambda: slurm.jobs() == others, f"no job is left: {point}, {number.name}")
                    until(lambda: not left(slurm), f"no file is left: {point}, {number.name}: {left(slurm)}")
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
