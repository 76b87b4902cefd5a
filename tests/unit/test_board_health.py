"""Health checks as text; what could not be read is never good."""

from __future__ import annotations

from typing import Any

import pytest

from gpuboard.board.text.detail.health import Evidence, evidence
from gpuboard.model.gpu import xid_words
from gpuboard.model.snapshot import XidView
from tests.board.made import gpu

WELL: dict[str, Any] = {
    "ecc_uncorrected": 0, "remap_pending": False, "remap_failed": False, "recovery_action": "none", "xids": [],
    "pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16,
}  # fmt: skip
AT = "2026-01-31T12:00:00.000Z"


def said(**changes: Any) -> list[Evidence]:
    """Return what differs from a well GPU's evidence."""
    return [item for item in evidence(gpu("n", 0, **(WELL | changes))) if item not in evidence(gpu("n", 0, **WELL))]


def test_a_well_gpu() -> None:
    assert evidence(gpu("n", 0, **WELL)) == [
        ("ECC", "0 uncorrected since the driver loaded", "good"),
        ("Row remap", "none pending, none failed", "good"),
        ("Recovery", "none", "good"),
        ("Clocks", "not slowed down", "good"),
        ("PCIe", "generation 5, x16 now; at most 5, x16", "good"),
        ("XID", "none while gpuboard was connected", "good"),
    ]


def test_nothing_read_is_nothing_known() -> None:
    one = gpu("n", 0, utilization=None, temperature=None, power=None)
    assert [(item.name, item.role) for item in evidence(one)] == [
        ("ECC", "unknown"), ("Row remap", "unknown"), ("Recovery", "unknown"), ("Clocks", "unknown"),
        ("PCIe", "unknown"), ("XID", "unknown"),
    ]  # fmt: skip
    assert all(item.words.startswith("not readable") for item in evidence(one))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ecc_uncorrected": 1}, ("ECC", "1 uncorrected since the driver loaded", "bad")),
        ({"remap_pending": True}, ("Row remap", "pending: takes effect with the next reset of the GPU", "warn")),
        ({"remap_failed": True}, ("Row remap", "failed: the GPU needs replacement", "bad")),
        ({"remap_failed": None}, ("Row remap", "none pending", "good")),
        ({"recovery_action": "GPU reset"}, ("Recovery", "requested by the driver: GPU reset", "bad")),
        ({"throttle": ["sw_power_cap"]}, ("Clocks", "at its power limit", "dim")),
        ({"throttle": ["hw_thermal", "sw_power_cap"]},
         ("Clocks", "too hot, slowed down by the hardware; at its power limit", "warn")),
        ({"throttle": ["novel"]}, ("Clocks", "novel", "dim")),
        ({"pcie_width": 8}, ("PCIe", "generation 5, x8 now; at most 5, x16", "dim")),
        ({"pcie_width": 8, "sick": ["PCIe x8 of x16: narrower than before"]},
         ("PCIe", "generation 5, x8 now; at most 5, x16; narrower than before", "warn")),
        ({"pcie_generation": 1}, ("PCIe", "generation 1, x16 now; at most 5, x16 (it rises under load)", "good")),
        ({"pcie_generation_max": None, "pcie_width_max": None},
         ("PCIe", "generation 5, x16 now; at most ?, x?", "good")),
        ({"xids": [XidView(79, AT, 65.0), XidView(31, AT, 3700.0)]},
         ("XID", "79, 1m ago: fallen off the bus; 31, 1h01m ago: memory page fault, mostly caused by a program",
          "warn")),
    ],
)  # fmt: skip
def test_each_piece_of_evidence(changes: dict[str, Any], expected: tuple[str, str, str]) -> None:
    assert said(**changes) == [expected]


def test_a_failing_gpu_shows_nvmls_error_first() -> None:
    one = gpu("n", 0, "broken", error="GPU is lost", **WELL)
    assert evidence(one)[0] == ("NVML", "GPU is lost", "bad")
    assert ("Clocks", "not readable", "unknown") in evidence(one)


def test_an_unknown_xid() -> None:
    assert xid_words(4711) == "XID 4711: see the list of XID errors in NVIDIA’s documentation"
