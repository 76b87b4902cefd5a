"""The demo's cluster: simulated GPUs on this machine, under the real agent, claims and launcher."""

from __future__ import annotations

import os
import time

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.simulated_script import scripts

_GIB = 2**30


class Kind(msgspec.Struct, frozen=True):
    """A kind of node that the demo's cluster has."""

    model: str
    count: int
    memory: int  # bytes a GPU
    power: tuple[int, int]  # idle and limit, W
    links: tuple[int, int]  # NVLinks between two GPUs of an island, GPUs per island
    pcie: int = 4
    mig: dict[str, list[tuple[str, int]]] = {}


_H100 = Kind("NVIDIA H100 80GB HBM3", 8, 80 * _GIB, (70, 700), (18, 8), pcie=5)
_A100 = Kind("NVIDIA A100-SXM4-80GB", 4, 80 * _GIB, (55, 400), (12, 4))
_MIG = [("3g.40gb", 40 * _GIB), ("3g.40gb", 40 * _GIB)]
_SLICES = [("3g.40gb", 40 * _GIB), ("2g.20gb", 20 * _GIB), ("1g.10gb", 10 * _GIB), ("1g.10gb", 10 * _GIB)]
KINDS = {
    "sim01": _H100,
    "sim02": _H100,
    "sim03": Kind("Tesla V100-SXM3-32GB", 16, 32 * _GIB, (50, 350), (6, 16), pcie=3),
    "sim04": _A100,
    "sim05": msgspec.structs.replace(_A100, mig={"2": _MIG, "3": _SLICES}),
    "sim06": Kind("NVIDIA L40S", 4, 48 * _GIB, (35, 350), (0, 4)),
    "sim07": Kind("NVIDIA RTX A6000", 4, 48 * _GIB, (22, 300), (4, 2)),
}


def demo_nodes(claims_dir: str | None = None) -> list[Node]:
    """Return two simulated nodes, of 4 and of 2 GPUs, one GPU of the first busy.

    Their GPUs' UUIDs begin with ``SIM-`` and contain this process's uid and pid, so that claims of two demos on one
    machine, or of a demo and real GPUs, are never about the same GPU. ``claims_dir`` None: as in the settings.
    """
    cluster = _own_name()
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


def living_nodes(
    claims_dir: str | None = None,
    *,
    seed: int = 7,
    epoch: float | None = None,
    at: float | None = None,
    cluster: str | None = None,
) -> list[Node]:
    """Return seven nodes with 48 GPUs with a changing load and faults that come and go.

    Everything follows from ``seed`` and the seconds since ``epoch`` (epoch seconds; None: now); ``at`` fixes that time.
    ``cluster`` replaces this process's uid and pid in the UUIDs.
    """
    script_of = scripts({name: (kind.count, kind.memory, kind.mig) for name, kind in KINDS.items()}, seed)
    return [
        Node(
            name=name,
            host=None,
            simulate={
                **msgspec.to_builtins(kind),
                "cluster": cluster or _own_name(),
                "epoch": time.time() if epoch is None else epoch,
                "at": at,
                "script": script_of[name],
            },
            claims_dir=claims_dir,
        )
        for name, kind in KINDS.items()
    ]


def _own_name() -> str:
    return f"demo-{os.getuid()}-{os.getpid()}"
