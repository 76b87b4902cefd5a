"""What a node reports of itself for preflight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpuboard.agent.launch import CallRefused, evidence, preflight, start


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user: root is exempt from ulimit -u")
def test_the_room_below_ulimit_u_counts_the_users_threads() -> None:
    program = """
import json, os, resource, sys, threading
sys.path.insert(0, sys.argv[1])
from gpuboard.agent.launch import preflight
os.setuid(40000 + os.getpid() % 20000)  # of no other process on this machine
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
        [sys.executable, "-c", preflight.script(), "script", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target_sha256"] is not None


# A finder of its own, as editable installs add one in a .pth file
EDITABLE = """\
import sys
from importlib.util import spec_from_file_location

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "lab":
            return spec_from_file_location(name, {0!r} + "/__init__.py", submodule_search_locations=[{0!r}])

sys.meta_path.append(Editable)
"""


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("module", "lab.train", None),
        ("function", "lab.train:main", None),
        ("module", "lab", None),
        ("module", "lab.nothing", "no module named lab.nothing"),
        ("module", "lab.train.deep", "no module named lab.train.deep"),
        ("module", "packed.train", None),
        ("module", "packed", "no module named packed.__main__"),
        ("module", "empty", "no module named empty.__main__"),
        ("module", "this", None),
        ("script", "empty", "a folder without __main__.py"),
    ],
)
def test_a_target_is_found_where_python_finds_it(tmp_path: Path, kind: str, name: str, error: str | None) -> None:
    for file in ("src/lab/__init__.py", "src/lab/__main__.py", "src/lab/train.py", "here/empty/notes.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "sitecustomize.py").write_text(EDITABLE.format(str(tmp_path / "src/lab")))
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("packed/__init__.py", "raise ImportError('packages are not imported')")
        archive.writestr("packed/train.py", "")
    done = subprocess.run(
        [sys.executable, "-c", preflight.script(), kind, name],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'code.zip'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts.get("target_error"), facts["target_sha256"] is None) == (error, error is not None)


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
