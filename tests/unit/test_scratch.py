"""The private folder of a run on its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuboard.agent.launch import scratch


@pytest.mark.parametrize("parent", ["/no/such/folder", "/" + 60 * "x", "/proc"], ids=["missing", "long", "read-only"])
def test_a_tmpdir_that_cannot_be_used_is_replaced_by_tmp(monkeypatch: pytest.MonkeyPatch, parent: str) -> None:
    monkeypatch.setenv("TMPDIR", parent)
    config = {"run": f"rtest{os.getpid()}", "node_rank": 0, "attempt": 1}
    folder = Path(scratch.create(config))
    assert folder.parent == Path("/tmp")
    assert folder.stat().st_mode & 0o777 == 0o700
    scratch.remove(config)
    assert not folder.exists()
