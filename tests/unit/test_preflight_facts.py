"""What a node reports of itself for preflight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.agent.launch import CallRefused, evidence, preflight, start


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user: root is exempt from ulimit -u")
def test_the_room_below_ulimit_u_counts_the_users_threads() -> None:
    program = """
import json, os, resource, sys, threading
sys.path.insert(0, sys.argv[1])
from gpuboard.agent.launch import preflight
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
before, wait = preflight._tasks(), threading.Event()
threads = [threading.Thread(target=wait.wait) for _ in range(5)]
for thread in threads:
    thread.start()
print(json.dumps([before, preflight._tasks()]))
wait.set()
"""
    words = [sys.executable, "-c", program, str(Path(__file__).parents[2])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert (before["limit"], before["source"]) == (1000, "ulimit -u")
    assert 0 < before["free"] < 1000
    assert before["free"] - after["free"] == 5


def test_the_cgroups_of_a_controller_include_their_ancestors() -> None:
    found = evidence.cgroups("memory")
    assert found
    assert all(os.path.dirname(folder) in found for folder in found if folder.count("/") > 4)
    assert {folder for folder in found if folder in {"/sys/fs/cgroup", "/sys/fs/cgroup/memory"}}


def test_files_of_the_folder_do_not_replace_the_modules_of_python(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not for preflight')\n")
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", preflight._SCRIPT, "script", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target_sha256"] is not None


def test_a_program_whose_interpreter_is_missing_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    config = {"target": {"name": "./train.sh"}, "wrap": [], "cwd": str(tmp_path)}
    for first, refused in (("#!/bin/sh", ""), ("#!/usr/bin/env bash", ""), ("#! /opt/bin/fish -l", "/opt/bin/fish")):
        program.write_text(f"{first}\n")
        program.chmod(0o755)
        if not refused:
            assert start.program(config, {}) == f"{tmp_path}/./train.sh"
            continue
        with pytest.raises(CallRefused, match=f"begins with #!{refused}, which does not exist on this node") as error:
            start.program(config, {})
        assert error.value.kind == "program"


def test_a_wrapper_that_is_missing_is_no_matter_of_the_interpreter(tmp_path: Path) -> None:
    config = {
        "target": {"kind": "script", "name": "x.py"},
        "wrap": ["no-such-wrapper"],
        "cwd": str(tmp_path),
        "python": "",
    }
    with pytest.raises(CallRefused, match="cannot start no-such-wrapper") as error:
        preflight.gather(config, dict(os.environ))
    assert error.value.kind == "wrap"
