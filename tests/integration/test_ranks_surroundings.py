"""Ranks and supervisors under other interpreters, and a rank in a cgroup with too little memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpuboard.transport.base import CallFailed
from gpuboard.transport.spawn import agent_command
from tests.integration.ranks_driver import Node, go, launch_config, node, with_fake_torch
from tests.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_fake_torch(tmp_path)


def interpreter(version: str) -> str:
    """Return a Python of ``version``, on PATH or installed by pyenv; skip without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
    for path in found:
        if path is not None and subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    pytest.skip(f"needs Python {version}")


SEEN = """
import json, multiprocessing, os, sys
print(json.dumps([__name__, __file__, str(__spec__), __package__, sys.argv, sys.path, os.getcwd(), sorted(globals()),
                  getattr(sys, "orig_argv", None), str(sys.flags), multiprocessing.get_start_method(allow_none=True)]))
def fail():
    raise KeyError("x")
fail()
"""


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.12", "3.13", "3.14"])
def test_a_script_sees_no_difference_under_any_interpreter(folder: Path, version: str) -> None:
    python = interpreter(version)
    environ = {"PYTHONPATH": str(folder / "fake"), "PYTHONUNBUFFERED": "1"}
    with node(folder, SEEN, "--lr", "1", python=python, environ=environ) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 1
        plain = subprocess.run(
            [python, "script.py", "--lr", "1"],
            cwd=folder,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
        )
        assert here.text() == plain.stdout
        assert here.text("err") == plain.stderr
        assert here.data("raised")[0]["type"] == "KeyError"


@pytest.mark.parametrize("version", ["3.6", "3.7"])
def test_a_supervisor_under_an_old_interpreter(folder: Path, version: str) -> None:
    python = interpreter(version)
    (folder / "script.py").write_text("import sys; print(sys.version_info >= (3, 8))")
    config = launch_config(folder, "script.py", environ={"PYTHONPATH": str(folder / "fake")}, listen=False)
    with Node(config, command=lambda: [python, *agent_command()[1:]]) as here:
        assert here.call("check")["torch"] is None
        assert here.call("probe-listen", count=1)["ports"] != []
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert here.text() == "True\n"
        assert here.link.hello is not None
        assert here.link.hello.python.startswith(version)


def test_a_node_whose_ranks_ended_at_once_reports_why(folder: Path) -> None:
    with node(folder, "pass", python="/bin/false") as here:
        here.call("spawn")
        here.wait(lambda n: n.data("exited"))
        with pytest.raises(CallFailed, match="/bin/false ended with exit code 1"):
            here.call("check")
        here.call("go", master_addr="127.0.0.1", master_port=1, environ={})
        assert here.wait_ended()[0]["code"] == 1


def empty(group: Path) -> bool:
    return not (group / "cgroup.procs").read_text()


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit of 300 MB, of either version."""
    for base, name, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", None),
        ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
    ):
        group = Path(base) / f"gpuboard-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / name).exists():
            group.rmdir()
            continue
        (group / name).write_text("300000000")
        if limit and (group / limit).exists():
            (group / limit).write_text("0")
        yield group
        until(partial(empty, group), "its processes have ended")
        group.rmdir()
        return
    pytest.skip("needs a memory cgroup that this user may make")


def test_a_rank_killed_for_memory_is_reported_as_such(folder: Path, memory_cgroup: Path) -> None:
    (folder / "script.py").write_text("held = []\nwhile True:\n    held.append(bytearray(b'x') * 10_000_000)\n")
    config = launch_config(folder, "script.py", environ={"PYTHONPATH": str(folder / "fake")}, listen=False)
    enter = f'echo $$ > {memory_cgroup}/cgroup.procs; exec "$@"'
    with Node(config, command=lambda: ["/bin/sh", "-c", enter, "sh", *agent_command()]) as here:
        rank = go(here)["0"]
        end = here.wait_ended()[0]
        assert end["signal"] == signal.SIGKILL
        assert f"Killed process {rank}" in end["oom"] or "oom_kill 0 -> 1" in end["oom"]
