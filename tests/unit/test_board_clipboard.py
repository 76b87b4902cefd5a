"""Lines to copy: quoted, for one node, and refused with a reason where they would mean something else."""

from __future__ import annotations

import shlex

import pytest

from gpuboard.board.clipboard import export_line, ssh_line, uuids_line
from gpuboard.board.dialogs.reserve import lines
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import GpuboardError
from tests.board import made

SCENE = made.scene(
    made.node("gpu01", [made.gpu("gpu01", index) for index in range(4)]),
    made.node("gpu02", [made.gpu("gpu02", 0), made.mig("gpu02", 1, "free", "free")]),
    made.node("gpu03", [made.gpu("gpu03", 0, uuid="GPU-$(touch x)'`")]),
)


def test_by_index_in_pci_order() -> None:
    line = export_line(SCENE, ["GPU-gpu01-3", "GPU-gpu01-0"], by_uuid=False)
    assert line == "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3"


def test_by_uuid() -> None:
    assert uuids_line(SCENE, ["GPU-gpu02-0", "GPU-gpu01-1", "GPU-gone-0"]) == "GPU-gpu01-1,GPU-gpu02-0"
    line = export_line(SCENE, ["GPU-gpu01-1", "GPU-gpu01-0"], by_uuid=True)
    assert line == "export CUDA_VISIBLE_DEVICES=GPU-gpu01-0,GPU-gpu01-1"


def test_a_hostile_uuid_is_quoted() -> None:
    line = export_line(SCENE, ["GPU-$(touch x)'`"], by_uuid=True)
    assert shlex.split(line) == ["export", "CUDA_VISIBLE_DEVICES=GPU-$(touch x)'`"]


def test_lines_of_a_lease_are_quoted() -> None:
    assert lines("k3f9", ["gpu01", "gpu01", "gpu02"]) == [
        'eval "$(gpuboard env k3f9 --node gpu01)"',
        'eval "$(gpuboard env k3f9 --node gpu02)"',
    ]
    (line,) = lines("$(touch x)", ['a";b'])
    assert line == """eval "$(gpuboard env '$(touch x)' --node 'a";b')\""""


@pytest.mark.parametrize("by_uuid", [False, True])
def test_gpus_of_several_nodes_are_refused(by_uuid: bool) -> None:
    with pytest.raises(GpuboardError, match="these GPUs are on 2: gpu01, gpu02"):
        export_line(SCENE, ["GPU-gpu01-1", "GPU-gpu02-0"], by_uuid=by_uuid)


def test_a_gpu_in_mig_mode_is_not_visible_to_cuda() -> None:
    with pytest.raises(GpuboardError, match="gpu02:1 is in MIG mode"):
        export_line(SCENE, ["GPU-gpu02-1"], by_uuid=True)
    with pytest.raises(GpuboardError, match="gpu02:1 is in MIG mode"):
        export_line(SCENE, ["MIG-gpu02-1-0"], by_uuid=False)
    line = export_line(SCENE, ["MIG-gpu02-1-0"], by_uuid=True)
    assert line == "export CUDA_VISIBLE_DEVICES=MIG-gpu02-1-0"


def test_ssh() -> None:
    assert ssh_line(Node("gpu01", "gpu01.lab")) == "ssh gpu01.lab"
    with pytest.raises(GpuboardError, match="gpu01 is this machine"):
        ssh_line(Node("gpu01", None))
