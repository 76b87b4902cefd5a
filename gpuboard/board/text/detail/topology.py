"""Links between the GPUs of a node, in the words of ``nvidia-smi topo -m`` (pure)."""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.model.links import LEVELS, SELF, UNKNOWN, link
from gpuboard.model.snapshot import GpuView, NodeView

_MEANINGS = {
    "NV": "NVLinks",
    "PSB": "on one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "one NUMA node",
    "SYS": "between NUMA nodes",
}


class Matrix(NamedTuple):
    """``words[i][j]`` is how GPU ``indexes[i]`` reaches GPU ``indexes[j]``."""

    indexes: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]


def matrix(node: NodeView) -> Matrix:
    """Return the links between all GPUs of a node."""
    gpus = node.gpus
    return Matrix(tuple(gpu.index for gpu in gpus), tuple(tuple(link(gpu, other) for other in gpus) for gpu in gpus))


def neighbours(gpu: GpuView, node: NodeView) -> list[tuple[str, list[int]]]:
    """Return a GPU's links by kind, the best first: ``[("NV18", [1, 2, 3]), ("SYS", [4, 5])]``."""
    found: dict[str, list[int]] = {}
    for other in node.gpus:
        if other.uuid != gpu.uuid:
            found.setdefault(link(gpu, other), []).append(other.index)
    return sorted(found.items(), key=lambda item: -_rank(item[0]))


def legend(node: NodeView) -> list[tuple[str, str]]:
    """Return the meanings of the link kinds on a node, the best first."""
    words = {word for row in matrix(node).words for word in row} - {SELF, UNKNOWN}
    shown = {"NV" if word.startswith("NV") else word for word in words}
    return [("NV#" if word == "NV" else word, meaning) for word, meaning in _MEANINGS.items() if word in shown]


def _rank(word: str) -> int:
    if word.startswith("NV"):
        return 1000 + int(word[2:])
    return next((level for level, known in LEVELS.items() if known == word), 0)
