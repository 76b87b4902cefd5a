"""Finding and ending the processes of a run, on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.agent.launch import CallRefused, evidence, start, teardown
from gpuboard.agent.proc import read_process
from tests.waiting import read_line

# Prints "up" when its own child runs, which has a session of its own and, with "bare", an empty environment.
PARENT = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "60"], start_new_session=True, env={} if sys.argv[1] == "bare" else None)
print("up", flush=True)
time.sleep(60)
"""


def start_parent(run: str, how: str, attempt: str = "1") -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPUBOARD_RUN": run, "GPUBOARD_ATTEMPT": attempt},
    )
    assert read_line(child) == "up\n"
    return child


def nothing_to_reap() -> None:
    """Popen waits for these children; zombies are not counted."""


def test_process_names_with_brackets_and_blanks(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    found = read_process(child.pid)
    child.kill()
    child.wait()
    assert found is not None
    assert (found.parent, found.name) == (os.getpid(), "a) R (b")
    assert read_process(child.pid) is None


def test_processes_are_found_by_descent_and_by_environment() -> None:
    name = f"r{os.getpid()}"
    run = {"run": name, "attempt": 1}
    bare, marked = start_parent(name, "bare"), start_parent(name, "marked", "1")
    restarted, odd = start_parent(name, "marked", "2"), start_parent(name, "marked", "²")
    of_bare = teardown.descendants(bare.pid, teardown.read_processes())
    assert len(of_bare) == 1
    found = {process.pid for process in teardown.living(run, bare.pid, ())}
    assert of_bare < found  # below bare, without its environment
    assert marked.pid in found  # by its environment, though not below
    assert bare.pid not in found
    assert odd.pid in found
    assert restarted.pid not in found, "a guard that ends late leaves the next attempt alone"
    assert restarted.pid in {process.pid for process in teardown.living(dict(run, attempt=2), bare.pid, ())}
    assert teardown.kill_all(run, bare.pid, [marked.pid], nothing_to_reap, 60.0) == 0
    assert (marked.poll(), restarted.poll()) == (None, None)
    assert teardown.kill_all(dict(run, attempt=2), bare.pid, [marked.pid], nothing_to_reap, 60.0) == 0
    assert restarted.wait() == -signal.SIGKILL
    assert teardown.living(run, bare.pid, [marked.pid]) == []
    for child in (bare, marked, restarted, odd):
        child.kill()
        child.communicate()


def test_a_stopped_process_is_ended() -> None:
    run = f"s{os.getpid()}"
    child = start_parent(run, "marked")
    os.kill(child.pid, signal.SIGSTOP)
    assert teardown.kill_all({"run": run, "attempt": 1}, os.getpid(), (), nothing_to_reap, 60.0) == 0
    assert child.wait() == -signal.SIGKILL
    child.communicate()


def test_the_interpreter_is_python_then_that_of_the_environment_then_of_path(tmp_path: Path) -> None:
    for folder in ("venv/bin", "conda/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("python", "python3"):
            (tmp_path / folder / name).symlink_to(sys.executable)
    environ = {
        "VIRTUAL_ENV": f"{tmp_path}/venv",
        "CONDA_PREFIX": f"{tmp_path}/conda",
        "PATH": f"{tmp_path}/path",
    }
    assert start.interpreter(sys.executable, environ, False) == sys.executable
    assert start.interpreter(None, environ, False) == f"{tmp_path}/venv/bin/python"
    del environ["VIRTUAL_ENV"]
    assert start.interpreter(None, environ, False) == f"{tmp_path}/conda/bin/python"
    environ["CONDA_PREFIX"] = f"{tmp_path}/gone"
    assert start.interpreter(None, environ, False) == f"{tmp_path}/path/python3"
    assert start.interpreter("python", environ, False) == f"{tmp_path}/path/python"
    assert start.interpreter(None, environ, True) == "python3"
    with pytest.raises(CallRefused, match="--python") as refused:
        start.interpreter("python9", environ, False)
    assert refused.value.kind == "python"
    with pytest.raises(CallRefused, match="no python3 or python on PATH"):
        start.interpreter(None, {"PATH": "/nonexistent"}, False)


@pytest.mark.parametrize("how", ["is killed by signal: Bus error.", "was killed by SIGBUS"])
def test_a_process_without_shared_memory_shows_how_full_it_is(how: str) -> None:
    assert (evidence.child_death(f"worker (pid 7) {how}", evidence.KilledForMemory()) or "").startswith("/dev/shm: ")


def test_evidence_of_a_kill_for_memory_since_the_start(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,1000,-;Out of memory: Killed process 999999998 (python3)\n")
    seen = evidence.KilledForMemory(str(log))
    deaths = (
        "DataLoader worker (pid 999999999) is killed by signal: Killed.",
        "Connection reset by peer a process of this rank (pid 999999999) was killed by SIGKILL",
    )
    unnamed = (
        "Command 'x' died with <Signals.SIGKILL: 9>.",
        "process 0 terminated with signal SIGKILL",
        "A process in the process pool was terminated abruptly while the future was running or pending.",
    )
    assert [evidence.child_death(text, seen) for text in (*deaths, *unnamed)] == [None] * 5
    with log.open("a") as file:
        file.write("6,2,2000,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=999999999,uid=0\n")
    assert seen.evidence(999999998) is None, "that was another process"
    for text in deaths:
        assert (evidence.child_death(text, seen) or "").startswith("out of memory: kernel: oom-kill:constraint")


def test_the_nearest_cgroup_decides_about_a_kill_for_memory(tmp_path: Path) -> None:
    for folder in (job := tmp_path / "job", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "memory.events").write_text("oom 0\noom_kill 0\n")
    seen = evidence.KilledForMemory(str(tmp_path / "no log"), [str(job / "rank"), str(job), str(tmp_path)])
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert seen.evidence(7) is None, "another job's process was killed"
    (job / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert seen.evidence(7) == f"{job}: oom_kill 0 -> 1"


def test_where_neither_log_nor_cgroup_can_be_read_there_can_be_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    ways = [("kmsg", "no folder"), ("no log", ""), ("no log", "no folder")]
    seen = [evidence.KilledForMemory(str(tmp_path / log), [str(tmp_path / folder)]) for log, folder in ways]
    assert [one.readable for one in seen] == [True, True, False]
