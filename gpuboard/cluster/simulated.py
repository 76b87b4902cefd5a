"""The demo's cluster: simulated GPUs on this machine, under the real agent, claims and launcher."""

from __future__ import annotations

import os

from gpuboard.cluster.inventory import Node

_GIB = 2**30


def demo_nodes(claims_dir: str | None = None) -> list[Node]:
    """Return two simulated nodes, of 4 and of 2 GPUs, one GPU of the first busy.

    Their GPUs' UUIDs begin with ``SIM-`` and hold our uid and pid, so that two demos on one machine, or a demo and the
    machine's real GPUs, never meet in one claim. ``claims_dir`` None: where the settings say, as for real ones.
    """
    cluster = f"demo-{os.getuid()}-{os.getpid()}"
    busy = {"user": "bob", "command": "python finetune.py", "memory": 61 * _GIB, "utilization": 91}
    return [
        Node(
            name="sim01",
            host=None,
            simulate={"cluster": cluster, "model": "NVIDIA H100 80GB HBM3", "count": 4, "busy": {"1": busy}},
            claims_dir=claims_dir,
        ),
        Node(
            name="sim02",
            host=None,
            simulate={"cluster": cluster, "model": "NVIDIA L40S", "count": 2, "memory": 48 * _GIB},
            claims_dir=claims_dir,
        ),
    ]
