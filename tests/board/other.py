"""Somebody else on the same nodes: an agent that runs as another user and takes what the board is about to take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuboard.cluster.inventory.nodes import Node
from tests.agent import Agent

UID = 65534  # nobody
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
_THROUGH = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "sh", "-c")


@contextmanager
def somebody(folder: Path, node: Node) -> Iterator[Agent]:
    """Yield the agent of another user on ``node``, whose claims lie in ``folder``/claims."""
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o777 == 0o700:  # pytest's own folders
            path.chmod(0o711)
    with Agent(
        None,
        python="/usr/bin/python3",
        through=_THROUGH,
        node=node.name,
        simulate=node.simulate,
        claims_dir=str(folder / "claims"),
    ) as agent:
        yield agent


def take(agent: Agent, lease: str, uuids: Sequence[str]) -> None:
    """Reserve GPUs of the agent's node for an hour."""
    answer = agent.call(
        "take", lease=lease, uuids=list(uuids), for_s=3600.0, share=None, holder=None, purpose="mine", host="elsewhere",
        nodes=["sim01"], gpus=len(uuids),
    )  # fmt: skip
    assert isinstance(answer, dict) and set(answer) == {"until", "now"}, answer
