"""What travels to the nodes compiles under every older Python that is found here, from 3.6 on (also: `make lint`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[2] / "gpuboard" / "agent"
VERSIONS = ("3.6", "3.7", "3.8", "3.9", "3.10")
_COMPILE = """
import sys
print("%d.%d" % sys.version_info[:2])
sys.stdout.flush()
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        compile(file.read(), path, "exec", dont_inherit=True)
"""


def compiled(version: str, files: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Compile with a Python of ``version``: on PATH, or installed by pyenv or uv. Return how it ended; None without."""
    candidates = [shutil.which(f"python{version}")]
    home = Path(os.environ.get("HOME", "/nonexistent"))
    for folder in (Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions", home / ".local/share/uv/python"):
        candidates += [str(path) for path in sorted(folder.glob(f"*{version}.*/bin/python{version}"))]
    for candidate in candidates:
        if candidate is None:
            continue
        done = subprocess.run([candidate, "-c", _COMPILE, *files], capture_output=True, text=True, timeout=60)
        if done.stdout:  # a version manager's shim exists and refuses to run
            return done
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_compiles_under_the_real_interpreter(version: str) -> None:
    done = compiled(version, [str(path) for path in sorted(AGENT.rglob("*.py"))])
    if done is None:
        pytest.skip(f"no Python {version} on this machine")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, version, "")
