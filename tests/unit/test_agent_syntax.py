"""What travels to the nodes is Python 3.6: by a tool, and compiled by every older interpreter that is found here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[2] / "gpuboard" / "agent"
VERSIONS = ("3.6", "3.7", "3.8", "3.9", "3.10")
_COMPILE = """
import sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        compile(file.read(), path, "exec", dont_inherit=True)
print("%d.%d" % sys.version_info[:2])
"""


@cache
def interpreter(version: str) -> str | None:
    """Return a Python of ``version``: on PATH, or installed by pyenv or uv."""
    candidates = [shutil.which(f"python{version}")]
    home = Path(os.environ.get("HOME", "/nonexistent"))
    for folder in (Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions", home / ".local/share/uv/python"):
        candidates += [str(path) for path in sorted(folder.glob(f"*{version}.*/bin/python{version}"))]
    for candidate in candidates:
        if candidate is None:
            continue
        done = subprocess.run([candidate, "-c", "pass"], capture_output=True, timeout=60)
        if done.returncode == 0:  # a version manager's shim exists and refuses to run
            return candidate
    return None


def test_vermin_finds_nothing_newer_than_3_6() -> None:
    vermin = Path(sys.executable).with_name("vermin")
    command = [str(vermin), "--target=3.6-", "--no-tips", "--violations", str(AGENT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_compiles_under_the_real_interpreter(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    files = [str(path) for path in sorted(AGENT.glob("*.py"))]
    done = subprocess.run([python, "-c", _COMPILE, *files], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (version, "")
