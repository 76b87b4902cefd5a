"""Links between GPUs in the words of nvidia-smi topo."""

from __future__ import annotations

from gpuboard.board.text.detail.topology import legend, matrix, neighbours
from gpuboard.model.links import link
from gpuboard.model.snapshot import GpuView, NodeView
from tests.board.made import gpu, node

LEVELS = {(0, 1): 60, (0, 2): 50, (0, 3): 40, (1, 2): 30, (1, 3): 20, (2, 3): 10}


def linked() -> NodeView:
    """Return a node with four GPUs: two pairs joined by NVLink, every PCIe level once, and a GPU without link data."""
    gpus: list[GpuView] = []
    for k in range(4):
        pci = {f"GPU-n-{a if b == k else b}": level for (a, b), level in LEVELS.items() if k in (a, b)}
        gpus.append(gpu("n", k, links={"GPU-n-1": 12} if k == 0 else {}, pci=pci))
    return node("n", [*gpus, gpu("n", 4)])


def test_the_matrix_has_the_words_of_nvidia_smi() -> None:
    assert matrix(linked()) == (
        (0, 1, 2, 3, 4),
        (
            ("X", "NV12", "PIX", "PXB", "?"),
            ("NV12", "X", "PHB", "NODE", "?"),
            ("PIX", "PHB", "X", "SYS", "?"),
            ("PXB", "NODE", "SYS", "X", "?"),
            ("?", "?", "?", "?", "X"),
        ),
    )


def test_neighbours_stand_best_first() -> None:
    one = linked()
    assert neighbours(one.gpus[0], one) == [("NV12", [1]), ("PIX", [2]), ("PXB", [3]), ("?", [4])]
    assert neighbours(one.gpus[4], one) == [("?", [0, 1, 2, 3])]


def test_only_words_that_occur_are_explained() -> None:
    assert [word for word, _ in legend(linked())] == ["NV#", "PIX", "PXB", "PHB", "NODE", "SYS"]
    assert legend(node("n", [gpu("n", 0)])) == []


def test_a_level_of_a_newer_agent_is_unknown() -> None:
    assert link(gpu("n", 0, pci={"GPU-n-1": 55}), gpu("n", 1)) == "?"
