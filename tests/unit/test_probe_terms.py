"""NVML's numbers in our words."""

from __future__ import annotations

import pytest

from gpuboard.agent.nvml import terms


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, None),
        ([0, 0], None),
        ([1], "0"),
        ([0xFFFF], "0-15"),
        ([0x0000FFFF0000FFFF], "0-15,32-47"),
        ([1 << 63, 1], "63-64"),
        ([0b10101, 0, 1 << 5], "0,2,4,133"),
    ],
)
def test_cpu_lists(mask: list[int] | None, expected: str | None) -> None:
    assert terms.cpu_list(mask) == expected


@pytest.mark.parametrize(("mask", "expected"), [(None, None), ([0], None), ([0b1100], 2), ([0, 1], 64)])
def test_lowest_bit(mask: list[int] | None, expected: int | None) -> None:
    assert terms.lowest(mask) == expected


def test_all_forms_of_an_address_have_one_key() -> None:
    assert terms.pci_key("00000000:1B:00.0") == terms.pci_key("0000:1b:00.0") == (0, 0x1B, 0)
    assert terms.pci_key("FFFFFFFF:FF:FF.0") == (0xFFFFFFFF, 0xFF, 0xFF)
    assert terms.pci_key("[N/A]") == terms.pci_key("") == ()


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("NVIDIA GB10", True), ("NVIDIA-GB10", True), ("GB10", True), ("Orin (nvgpu)", True), ("NVIDIA Thor", True),
        ("NVIDIA Tegra Orin (nvgpu)", True), ("Xavier", True), ("Orin(nvgpu)", True),
        ("NVIDIA GH200 480GB", False), ("NVIDIA GB200", False), ("NVIDIA GB100", False), ("NVIDIA GB300", False),
        ("NVIDIA H100 80GB HBM3", False), ("NVIDIA GeForce RTX 4090", False), ("", False),
    ],
)  # fmt: skip
def test_gpus_that_share_the_hosts_memory(name: str, shared: bool) -> None:
    assert terms.shares_memory(name) is shared


def test_unknown_codes_are_reported_as_numbers() -> None:
    assert [terms.recovery(n) for n in (0, 1, 99)] == ["none", "GPU reset", "action 99"]
    assert terms.words(4711, "Something New") == "Something New"
    assert terms.throttle(1 << 40) == []
    assert terms.throttle(0xEC) == ["hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "sw_power_cap"]
