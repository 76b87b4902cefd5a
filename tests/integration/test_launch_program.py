"""`gpuboard launch --no-python`: ranks that are programs, with and without torch on the node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.launch_lab import Launch

SHELL = """#!/bin/sh
echo "$RANK of $WORLD_SIZE $TORCHELASTIC_USE_AGENT_STORE ${MASTER_PORT:+port} $# $2"
"""


def test_a_program_needs_neither_python_nor_torch(tmp_path: Path) -> None:
    with Launch(tmp_path, SHELL, "--no-python", args=["0", "a b"], env={"PATH": "/nowhere"}, torch=True) as run:
        assert run.wait() == 0, run.text["err"]
        host = run.view().ranks[0].node
        lines = [f"[rank {r} {host}:{r}] {r} of 2 False port 2 a b" for r in (0, 1)]
        assert sorted(run.text["out"].splitlines()) == lines
        assert [(rank.state, rank.pid is not None) for rank in run.view().ranks] == [("done", True)] * 2
        assert run.text["err"] == ""


def test_the_end_of_a_program_ends_the_run(tmp_path: Path) -> None:
    with Launch(tmp_path, '#!/bin/sh\ntest "$RANK" = 0 && exec sleep 600\nexit 3\n', "--no-python") as run:
        assert run.wait() == 3
        assert run.text["err"].startswith("gpuboard: rank 1 (")
        assert ":1) ended with exit code 3\n" in run.text["err"]
        assert run.carriers() == []


def test_a_file_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with Launch(tmp_path, "", "--no-python", "./text") as run:
        assert run.wait() == 7
        assert f"{tmp_path}/./text is not executable; chmod +x it" in run.text["err"]


@pytest.mark.torch
def test_python_started_by_a_program_finds_the_store(tmp_path: Path) -> None:
    train = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(value.item(), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
dist.destroy_process_group()
"""
    (tmp_path / "train.py").write_text(train)
    script = f'#!/bin/sh\nexec "{sys.executable}" train.py\n'
    with Launch(tmp_path, script, "--no-python", n=1, torch=True, env={"VIRTUAL_ENV": sys.prefix}) as run:
        assert run.wait() == 0, run.text["err"]
        assert run.text["out"] == "1.0 True\n", "a rank that opens no store itself"
