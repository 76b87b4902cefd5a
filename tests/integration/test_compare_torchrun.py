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

from tests.integration.ranks_driver import Node, go, launch_config, with_fake_torch

SCRIPTS = Path(__file__).parents[1] / "scripts" / "compare"
WHOLE = ("whole.py", "--lr", "3e-4")
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
# torchrun of several targets, one after the other: its import of torch takes 2 s
TORCHRUN = """
import json, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

for target in json.loads(sys.argv[1]):
    try:
        main(["--standalone", "--nproc-per-node", "1", *target])
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
"""

pytestmark = pytest.mark.torch


def environ(**changes: str) -> dict[str, str]:
    names = ("PATH", "HOME", "LANG", "VIRTUAL_ENV")
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **changes,
    }


def plain(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *args], cwd=SCRIPTS, env=environ(), stdin=subprocess.DEVNULL, capture_output=True
    )


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Return what the script, the module and a process with its variables found under torchrun, and their stderr."""
    script = tmp_path_factory.mktemp("torchrun") / "script.py"
    script.write_text(ELASTIC)
    targets = [WHOLE, ("-m", "package.train", "--fast"), (str(script), "variables")]
    done = plain("-c", TORCHRUN, json.dumps(targets))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")], done.stderr.decode()


def supervised(
    kind: str, name: str, *args: str, **variables: str
) -> tuple[str, str, dict[str, Any], list[dict[str, Any]]]:
    """Return stdout, stderr, the rank's end, and what it raised."""
    with Node(launch_config(SCRIPTS, name, *args, kind=kind, listen=False, environ=environ(**variables))) as node:
        go(node)
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


def test_a_script_sees_no_difference(torchrun: tuple[list[dict[str, Any]], str]) -> None:
    by_python = plain(*WHOLE)
    out, err, end, raised = supervised("script", *WHOLE, LOADERS="1")
    expected, by_supervisor = found(by_python.stdout.decode()), found(out)
    assert by_supervisor.pop("loaders") == {"forked": [1, 2, 5, 10], "spawned": [0, 1, 4, 9]}
    assert expected["handled"] == ["SIGUSR1"]
    assert by_supervisor == expected
    # torchrun passes -u on the command line, which shows in the flags; all else must be the same.
    assert {**torchrun[0][0], "flags": expected["flags"]} == expected
    assert by_python.returncode == end["code"] == 1
    assert without_rank(err) == by_python.stderr.decode()
    bars = "".join(f"\r\x1b[32m{n}/4\x1b[0m" for n in range(1, 5)) + "\n"
    assert err.startswith(bars)
    assert bars in torchrun[1]
    assert (raised[0]["type"], raised[0]["message"], raised[0]["function"]) == ("ValueError", "the last word", "fail")
    assert raised[0]["file"] == str(SCRIPTS / "whole.py")


def test_the_variables_of_torchrun_and_what_record_writes(
    torchrun: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    expected = torchrun[0][2]
    with Node(launch_config(tmp_path, "script.py", listen=False, environ=environ(), preimport=False)) as node:
        go(node)
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


def test_a_module_of_a_package_sees_no_difference(torchrun: tuple[list[dict[str, Any]], str], tmp_path: Path) -> None:
    fake = str(with_fake_torch(tmp_path) / "fake")
    by_python = plain("-m", "package.train", "--fast")
    out, _, end, raised = supervised("module", "package.train", "--fast", PYTHONPATH=fake)
    expected, by_supervisor = found(by_python.stdout.decode()), found(out)
    by_supervisor["path"].remove(fake)
    assert expected["child"][0] == "values"
    assert by_supervisor == torchrun[0][1] == expected
    assert by_python.returncode == end["code"] == 5
    assert raised == []


def test_a_missing_module_is_reported_as_by_python(tmp_path: Path) -> None:
    by_python = plain("-m", "package.missing")
    _, err, end, _ = supervised("module", "package.missing", PYTHONPATH=str(with_fake_torch(tmp_path) / "fake"))
    assert (err, end["code"]) == (by_python.stderr.decode(), by_python.returncode)
