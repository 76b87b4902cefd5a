"""Why a run failed, where no rank could report an exception, or the system lacks something."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from gpuboard.transport.base import CallFailed
from tests.integration.launch_lab import Launch, write_torch
from tests.integration.ranks_driver import node, with_fake_torch


def test_the_error_of_a_child_process_is_quoted_not_the_advice_after_it(tmp_path: Path) -> None:
    script = """
import json, subprocess, sys
if len(sys.argv) > 1:
    json.loads("[")
subprocess.run([sys.executable, __file__, "child"])
print("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
sys.exit(1)
"""
    with Launch(tmp_path, script, n=1) as run:
        assert run.wait() == 1
        verdict = run.view().verdicts[0]
        assert verdict.text.endswith(f":0) ended with exit code 1 (sys.exit() at {tmp_path}/script.py:7)")
        error = "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)"
        assert verdict.evidence == f"last error on stderr: {error} at {tmp_path}/script.py:4"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small /dev/shm")
def test_a_bus_error_is_reported_with_the_use_of_shared_memory(tmp_path: Path) -> None:
    script = """
import mmap
with open("/dev/shm/full", "w+b") as file:
    file.truncate(2**22)
    mmap.mmap(file.fileno(), 2**22).write(b"x" * 2**22)
"""
    small = 'mount -t tmpfs -o size=1m shm /dev/shm && exec "$@"'
    with Launch(tmp_path, script, n=1, before=("unshare", "-m", "sh", "-c", small, "sh")) as run:
        assert run.wait() == 128 + 7
        verdict = run.view().verdicts[0]
        assert ":0) was killed by SIGBUS: " in verdict.text
        assert verdict.evidence == "/dev/shm: 1 of 1 MiB in use"


@pytest.mark.parametrize(
    ("file", "text", "code", "words"),
    [
        (
            "__init__.py",
            "import ctypes\nctypes.CDLL('libcudart.so.0')\n",
            1,
            ":0) failed to import torch: OSError: libcudart.so.0: cannot open shared object file: "
            "No such file or directory at {}/torch/__init__.py:2\n",
        ),
        ("version.py", "version = (\n", 7, " is damaged; {}/torch/version.py: SyntaxError: "),
    ],
)
def test_a_damaged_torch_is_not_a_missing_one(tmp_path: Path, file: str, text: str, code: int, words: str) -> None:
    broken = write_torch(tmp_path / "broken")
    (broken / "torch" / file).write_text(text)
    with Launch(tmp_path, "", "--env", f"PYTHONPATH={broken}", n=1, torch=True) as run:
        assert run.wait() == code
        assert words.format(broken) in run.text["err"]
        assert "has no torch" not in run.text["err"]


def test_too_few_open_files_are_named_with_their_limit(tmp_path: Path) -> None:
    with Launch(tmp_path, "", before=("sh", "-c", 'ulimit -n 200; exec "$@"', "sh")) as run:
        assert run.wait() == 7
        assert "fail open files: " in run.text["err"]
        assert "limit 200 (ulimit -n)" in run.text["err"]


def test_a_supervisor_out_of_open_files_names_the_limit(tmp_path: Path) -> None:
    def children(pid: int) -> set[int]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {int(child) for task in tasks for child in (task / "children").read_text().split()}

    others = children(os.getpid())
    with node(with_fake_torch(tmp_path), "", count=2) as here:
        here.call("ping")
        (guard,) = children(os.getpid()) - others
        (supervisor,) = children(guard)
        limit = max(int(fd) for fd in os.listdir(f"/proc/{supervisor}/fd")) + 1
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (limit, limit))
        for op in ("spawn", "check"):
            with pytest.raises(CallFailed) as refused:
                here.call(op)
            assert refused.value.kind == "open-files"
            assert f"{op}: too many open files: the limit is {limit}" in str(refused.value)


MUCH = "for number in range(3000): print('x' * 99)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small disk")
def test_a_full_disk_is_reported_once_and_the_ranks_run_on(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    full = 'mount -t tmpfs -o size=64k small state && exec "$@"'
    with Launch(tmp_path, MUCH, before=("unshare", "-m", "sh", "-c", full, "sh")) as run:
        assert run.wait() == 0, "all output is on stdout"
        assert run.text["out"].count("x" * 99 + "\n") == 6000
        (line,) = run.text["err"].splitlines()
        assert line.startswith("gpuboard: logs are incomplete: ")
        assert "No space left on device" in line


def test_a_stdout_that_cannot_be_written_fails_the_run_after_its_end(tmp_path: Path) -> None:
    with Launch(tmp_path, MUCH, n=1, before=("sh", "-c", 'exec "$@" > /dev/full', "sh")) as run:
        assert run.wait() == 1
        (line,) = run.text["err"].splitlines()
        assert line.startswith("gpuboard: cannot write to stdout: No space left on device; ")
        assert (run.view().state, run.view().exit_code) == ("done", 0)
        assert (Path(run.view().folder) / "rank-0.out").read_text() == ("x" * 99 + "\n") * 3000
