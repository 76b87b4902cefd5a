"""Why a rank ended, where it could not report an exception itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.launch_lab import Launch


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
        assert verdict.text.endswith(":0) ended with exit code 1 (without an exception of its own)")
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
