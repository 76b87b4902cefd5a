"""The same scripts under ``python``, ``torchrun`` and a supervisor see no difference."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks_driver import Node, launch_config

SCRIPTS = Path(__file__).parents[1] / "scripts" / "compare"

pytestmark = pytest.mark.torch


def environ() -> dict[str, str]:
    names = ("PATH", "HOME", "LANG", "VIRTUAL_ENV")
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def plain(args: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *args], cwd=SCRIPTS, env=environ(), stdin=subprocess.DEVNULL, capture_output=True
    )


def torchrun(args: list[str]) -> subprocess.CompletedProcess[bytes]:
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return plain([*starter, *args])


def supervised(kind: str, name: str, *args: str) -> tuple[str, str, dict[str, Any], list[dict[str, Any]]]:
    """Return stdout, stderr, the rank's end, and what it raised."""
    with Node(launch_config(SCRIPTS, name, *args, kind=kind, environ=environ())) as node:
        node.start()
        (end,) = node.wait_ended(120)
        return node.text("out"), node.text("err"), end, node.data("raised")


def found(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if line.startswith("{"))
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


def without_rank(text: str) -> str:
    """Remove the prefix that torch adds to tracebacks under torchrun."""
    return re.sub(r"(?m)^\[rank0\]: ?", "", text)


def test_a_script_sees_no_difference() -> None:
    by_python = plain(["whole.py", "--lr", "3e-4"])
    by_torchrun = torchrun(["whole.py", "--lr", "3e-4"])
    out, err, end, raised = supervised("script", "whole.py", "--lr", "3e-4")
    expected = found(by_python.stdout.decode())
    assert expected["loaders"] == {"forked": [1, 2, 5, 10], "spawned": [0, 1, 4, 9]}
    assert expected["handled"] == ["SIGUSR1"]
    assert found(out) == expected
    # torchrun passes -u on the command line, which shows in the flags; all else must be the same.
    flagged = {**found(by_torchrun.stdout.decode()), "flags": expected["flags"]}
    assert flagged == expected
    assert by_python.returncode == end["code"] == 1
    assert without_rank(err) == by_python.stderr.decode()
    bars = "".join(f"\r\x1b[32m{n}/4\x1b[0m" for n in range(1, 5)) + "\n"
    assert err.startswith(bars)
    assert bars in by_torchrun.stderr.decode()
    assert (raised[0]["type"], raised[0]["message"], raised[0]["function"]) == ("ValueError", "the last word", "fail")
    assert raised[0]["file"] == str(SCRIPTS / "whole.py")


ELASTIC = """
import json, os, subprocess, sys
if sys.argv[1:] != ["recorded"]:
    print(json.dumps(dict(os.environ)), flush=True)
    os._exit(0 if sys.argv[1:] else subprocess.run([sys.executable, __file__, "recorded"]).returncode)
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("in a process of the rank")

main()
"""


def test_the_variables_of_torchrun_and_what_record_writes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    expected = found(torchrun([str(script), "variables"]).stdout.decode())
    with Node(launch_config(tmp_path, "script.py", environ=environ(), preimport=False)) as node:
        node.start()
        (end,) = node.wait_ended(120)
        own = found(node.text("out"))
        assert (end["code"], end["evidence"]) == (1, f"ValueError: in a process of the rank at {script}:10")
    assert expected.keys() <= own.keys()
    per_run = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PWD"}
    elastic = {name for name in expected if name not in environ()} - per_run
    assert {name: sorted(own[name].split(",")) for name in elastic} == {
        name: sorted(expected[name].split(",")) for name in elastic
    }
    assert not Path(own["TORCHELASTIC_ERROR_FILE"]).parent.exists()


def test_a_module_of_a_package_sees_no_difference() -> None:
    by_python = plain(["-m", "package.train", "--fast"])
    by_torchrun = torchrun(["-m", "package.train", "--fast"])
    out, _, end, raised = supervised("module", "package.train", "--fast")
    expected = found(by_python.stdout.decode())
    assert expected["child"][0] == "values"
    assert found(out) == expected
    assert found(by_torchrun.stdout.decode()) == expected
    assert by_python.returncode == end["code"] == 5
    assert raised == []


def test_a_missing_module_is_reported_as_by_python() -> None:
    by_python = plain(["-m", "package.missing"])
    _, err, end, _ = supervised("module", "package.missing")
    assert (err, end["code"]) == (by_python.stderr.decode(), by_python.returncode)
