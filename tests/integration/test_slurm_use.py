"""`run` and `launch` on a login node with GPUs from Slurm: over steps of the job, without ssh."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.slurm_lab import FAKE, ON_GPUS, Lab, opened
from tests.integration.slurm_leases import all_gone, allocate, do, gpuboard, left, line_of, shell
from tests.slurm import SlurmCluster
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

WHO = """import os
print(" ".join(os.environ[name] for name in "RANK LOCAL_RANK CUDA_VISIBLE_DEVICES MASTER_ADDR GPUBOARD_LEASE".split()),
      os.uname().nodename, flush=True)
"""
# where torch's process group would meet
STORE = """import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
"""


@pytest.fixture
def lab(slurm: SlurmCluster) -> Iterator[Lab]:
    """A lab in which no node accepts ssh."""
    with opened(slurm) as lab:
        yield lab


def printed(out: str) -> list[list[str]]:
    """The words that each rank printed, in their order."""
    lines = [line.partition("] ")[2].split() for line in out.splitlines() if line.startswith("[rank ")]
    return sorted(lines, key=lambda words: int(words[0]))


def ranks(out: str) -> list[str]:
    """What each rank printed, in their order, without the lease."""
    return [" ".join([*words[:4], words[5]]) for words in printed(out)]


def test_run_runs_on_the_node_of_its_gpus_and_returns_the_exit_code(lab: Lab) -> None:
    lab.slurm.submit(["-N1", "--gpus=2", "-w", "gpu01", "--wrap", "sleep 600"], user="bob", running=True)
    command = 'echo $(hostname) $CUDA_VISIBLE_DEVICES $(pwd) "a  b" $(nproc >/dev/null; echo ok); cat; exit 9'
    done = lab.login.run(["gpuboard", "run", "--n", "2", "--nodes", "gpu01", "--", "sh", "-c", command], stdin="line\n")
    assert (done.returncode, done.stdout) == (9, "gpu01 2,3 /srv/home/alice a  b ok\nline\n"), done.stderr
    until(lambda: len(lab.slurm.jobs()) == 1, "the job has ended with the command")
    until(lambda: not left(lab.slurm), "nothing is left of it")


@pytest.mark.parametrize(
    ("slurm", "binds"),
    [({}, False), ({"conf_lines": "TaskPlugin=task/affinity"}, True)],
    indirect=["slurm"],
    ids=["task/none", "task/affinity"],
)
def test_srun_prints_nothing_and_binds_to_no_core(lab: Lab, binds: bool) -> None:
    command = ["gpuboard", "run", "--n", "1", "--", "sh", "-c", "echo up; read line"]
    with lab.login.popen(command, stdin=subprocess.PIPE) as process:
        assert read_line(process) == "up\n"
        started = lab.login.processes(lambda p: p.name == "srun", user="alice")
        # the srun of the agent that read the GPUs may still be ending
        runs = [p for p in started if p.argv and "gpuboard.agent" not in p.argv[-1]]
        assert ["--gpus=1" in p.argv for p in runs].count(True) > 0
        assert {"--cpu-bind=none" in p.argv for p in runs} == {binds}
        _, errors = process.communicate("end\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    all_gone(lab.slurm)


def test_the_terminal_is_passed_on(lab: Lab) -> None:
    words = "test -t 0 && test -t 1 && stty size && echo up; read line; echo got $line; exec sleep 600"
    argv = lab.login.command(["gpuboard", "run", "--n", "1", "--", "sh", "-c", words], user="alice")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)
    seen = b""

    def read(until_seen: bytes) -> None:
        nonlocal seen
        while until_seen not in seen:
            seen += os.read(terminal, 4096)

    read(b"up")
    os.write(terminal, b"word\n")
    read(b"got word")
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) in {128 + signal.SIGINT, -signal.SIGINT}, seen
    all_gone(lab.slurm)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command_and_its_exit_code_is_returned(lab: Lab, number: int) -> None:
    words = "trap 'echo ended; sleep 1; exit 7' INT TERM; trap 'echo noted' USR1; echo up; while :; do sleep 0.1; done"
    alone = "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    command = ["python3", "-c", alone, "gpuboard", "run", "--n", "1", "--", "sh", "-c", words]
    with lab.login.popen(command) as process:
        assert read_line(process) == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert read_line(process) == "noted\n"
        group = f"-{process.process.inner}"  # as timeout(1) and a terminal do it
        lab.login.run(["kill", f"-{number:d}", "--", group], user="alice", check=True)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "ended\n"), err
    all_gone(lab.slurm)


def test_nothing_of_a_command_outlives_gpuboard(lab: Lab) -> None:
    words = "setsid sleep 601 & echo up; trap '' TERM HUP; while :; do sleep 0.1; done"
    with lab.login.popen(["gpuboard", "run", "--n", "1", "--", "sh", "-c", words]) as process:
        assert read_line(process) == "up\n"
        process.send_signal(signal.SIGKILL)
        until(lambda: not lab.processes(), "nothing runs on the nodes", 60)
    all_gone(lab.slurm)


def leave(lab: Lab, **free: int) -> None:
    """Have bob hold all GPUs of each node but this many."""
    for name, count in free.items():
        lab.slurm.submit(["-N1", f"--gpus={8 - count}", "-w", name, "--wrap", "sleep 600"], user="bob", running=True)


def test_launch_reserves_starts_and_releases(lab: Lab) -> None:
    lab.put("script.py", WHO + STORE)
    leave(lab, gpu01=2, gpu02=1, gpu03=0)
    done = lab.login.run(["sh", "-c", f"gpuboard launch --n 3 {ON_GPUS} script.py"])
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == ["0 0 6,7 10.88.0.11 gpu01", "1 1 6,7 10.88.0.11 gpu01", "2 0 7 10.88.0.11 gpu02"]
    until(lambda: len(lab.slurm.jobs()) == 3 and not left(lab.slurm), "nothing is left of it")
    until(lambda: not lab.processes(), "nothing runs on the nodes")


def test_launch_on_an_existing_lease_keeps_it(lab: Lab) -> None:
    lab.put("script.py", WHO)
    leave(lab, gpu01=2, gpu02=1, gpu03=0)
    lease = allocate(lab.slurm, "--n", "3")["lease"]["id"]
    done = lab.login.run(["sh", "-c", f"gpuboard launch --lease {lease} {ON_GPUS} script.py"])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in ranks(done.stdout)] == ["0", "1", "2"]
    done = lab.login.run(["sh", "-c", f"gpuboard launch --lease {lease[:3]} --n 2 {ON_GPUS} script.py"])
    assert ranks(done.stdout) == ["0 0 6,7 127.0.0.1 gpu01", "1 1 6,7 127.0.0.1 gpu01"], done.stderr
    assert len(lab.slurm.jobs()) == 4
    assert gpuboard(lab.slurm, "release", lease).returncode == 0
    done = lab.login.run(["sh", "-c", f"gpuboard launch --lease {lease} {ON_GPUS} script.py"])
    assert done.returncode == 5
    until(lambda: len(lab.slurm.jobs()) == 3 and not left(lab.slurm), "nothing is left of it")


def test_launch_in_a_shell_that_holds_a_lease(lab: Lab) -> None:
    lab.put("script.py", WHO)
    with shell(lab.slurm, "--n", "3", "--nodes", "gpu03") as process:
        assert line_of(process) == "code 0"
        lease = do(process, "echo $GPUBOARD_LEASE")
        assert do(process, f"gpuboard launch {ON_GPUS} script.py >out 2>err; echo $?") == "0", lab.text("err")
        assert ranks(lab.text("out")) == [f"{k} {k} 0,1,2 127.0.0.1 gpu03" for k in range(3)]
        assert {words[4] for words in printed(lab.text("out"))} == {lease}
        assert do(process, "squeue -h -o %T") == "RUNNING"
        process.kill()
    all_gone(lab.slurm)


def test_a_launch_that_is_interrupted_while_it_waits_leaves_no_job(lab: Lab) -> None:
    lab.slurm.submit(["-N3", "--gpus-per-node=8", "--wrap", "sleep 600"], user="bob", running=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with lab.login.popen(["sh", "-c", f"exec gpuboard launch --n 2 --wait 5m {FAKE} script.py"]) as process:
            until(lambda: len(lab.slurm.jobs()) == 2, "it waits in the queue")
            process.send_signal(number)
            process.communicate(timeout=60)
        until(lambda: len(lab.slurm.jobs()) == 1, f"no job is left after {number.name}")
    until(lambda: not left(lab.slurm), "no file is left")
