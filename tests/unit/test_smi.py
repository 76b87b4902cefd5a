"""nvidia-smi's output in all its forms, read into what NVML's passes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import values as value
from gpuboard.agent.smi import xml as smi_xml
from gpuboard.model.gpu import GpuReading, GpuStatic, Process
from gpuboard.model.state import Facts, Thresholds, judge

DATA = Path(__file__).parent.parent / "data" / "nvidia-smi"
MIB = 2**20


def xml(name: str) -> smi.Listing:
    """Parse a recorded ``-q -x`` with its standard error."""
    messages = DATA / f"{name}.err"
    listing = smi_xml.read_xml((DATA / f"{name}.xml").read_bytes(), messages.read_bytes() if messages.exists() else b"")
    listing.number({})
    return listing


def csv(name: str, apps: bytes = b"") -> smi.Listing:
    listing = smi.read_csv((DATA / f"{name}.csv").read_bytes(), apps, smi.FIELDS)
    listing.number({})
    return listing


def gpu(listing: smi.Listing, index: int) -> smi.Gpu:
    return next(found for found in listing.gpus if found.index == index)


def state(found: smi.Gpu) -> tuple[str, str]:
    """Return a GPU's state and reason on the board; its facts and values must have the wire's types."""
    if "error" in found.facts:
        static = GpuStatic(index=0, uuid="GPU-x", name="", pci_bus_id="")
    else:
        static = msgspec.convert(found.facts, GpuStatic)
    values: dict[str, Any] = dict(found.values)
    if (processes := values.pop("processes", None)) is not None:
        values["processes"] = [Process(pid, kind, memory) for pid, kind, memory in processes]
    verdict = judge(Facts(static, msgspec.convert({**values, "uuid": static.uuid}, GpuReading)), Thresholds())
    return verdict.state, verdict.reason


def test_the_newest_schema_is_read_field_by_field() -> None:
    listing = xml("v13-h100-590")
    assert (listing.driver, listing.cuda, listing.count) == ("590.44.01", "13.1", 2)
    busy = gpu(listing, 1)
    assert busy.facts == {
        "index": 1,
        "uuid": "GPU-5eed0001-0000-4000-8000-000000000001",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:43:00.0",
        "memory_total": 81559 * MIB,
        "memory_reserved": 551 * MIB,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "minor": 0,
    }
    assert busy.values == {
        "memory_used": 65720 * MIB,
        "compute_mode": 0,
        "processes": [(4242, "compute", 65710 * MIB), (99, "graphics", 8 * MIB)],
        "utilization": 97,
        "temperature": 64,
        "power": 612.3,
        "power_limit": 700.0,
        "throttle": ["sw_power_cap"],
        "pcie_generation": 5,
        "pcie_width": 8,
        "ecc_uncorrected": 2,
        "remap_pending": True,
        "remap_failed": False,
        "recovery_action": "none",
    }
    assert state(gpu(listing, 0)) == ("free", "no process, no reservation")


def test_a_real_gpu_at_work_is_as_nvml_described_it_a_second_before() -> None:
    [found] = xml("v13-h200-580").gpus
    nvml = json.loads((DATA / "v13-h200-580.nvml.json").read_bytes())
    facts, values = nvml["facts"], nvml["values"]
    assert found.facts | {"memory_total": 0, "memory_reserved": 0} == facts | {"memory_total": 0, "memory_reserved": 0}
    for key in ("memory_total", "memory_reserved"):
        assert abs(found.facts[key] - facts[key]) <= MIB  # nvidia-smi rounds
    assert abs(found.values["memory_used"] - values["memory_used"]) <= 2 * MIB  # v2's, without the reserved
    assert found.values["processes"] == [tuple(one) for one in values["processes"]]
    near = {"temperature": 3, "power": 15, "utilization": 5}
    for key, most in near.items():
        assert abs(found.values[key] - values[key]) <= most
    known = set(values) - set(near) - {"memory_used", "processes"}
    assert {key: found.values[key] for key in known} == {key: values[key] for key in known}
    assert state(found) == ("busy", "owner hidden: process (pid 1258)")


def test_mig_devices_are_reported_as_unknown() -> None:
    listing = xml("v12-a100-mig-535")
    assert gpu(listing, 0).facts["mig"] == []
    assert state(gpu(listing, 0)) == ("mig", f"in MIG mode; NVML: {smi.MIG_UNSEEN}")
    assert state(gpu(listing, 1)) == ("broken", "the driver requests: GPU reset")


def test_a_gpu_with_unified_memory_is_recognized_by_its_name_and_may_have_a_bare_uuid() -> None:
    spark, jetson = gpu(xml("v13-gb10-580"), 0), gpu(xml("v12-orin-540"), 0)
    assert (spark.facts["name"], spark.facts["memory_shared"]) == ("NVIDIA GB10", True)
    assert (jetson.facts["uuid"], jetson.facts["memory_shared"]) == ("ddae9891-aaa8-5edd-bbf3-3a33c5adc75f", True)
    for one in (spark, jetson):
        assert state(one) == ("unknown", "not readable: memory")  # until it has the host's
        one.values["memory_used"] = 7 * 2**30
        assert state(one) == ("free", "no process, no reservation")
    text = (DATA / "v13-gb10-580.xml").read_text()
    listing = smi_xml.read_xml(text.replace("NVIDIA GB10", "NVIDIA H100").encode())
    listing.number({})
    assert "memory_shared" not in gpu(listing, 0).facts
    assert state(gpu(listing, 0)) == ("unknown", "not readable: memory")


def test_malformed_process_names_and_clocks_are_skipped() -> None:
    listing = xml("v12-odd-names-545")
    assert gpu(listing, 0).values["processes"] == [
        (7001, "compute", 512 * MIB),
        (7002, "compute", None),
        (7003, "compute", 12 * MIB),
    ]
    assert state(gpu(listing, 1)) == ("free", "no process, no reservation")


def test_a_gpu_without_a_handle_keeps_its_place_among_the_others() -> None:
    listing = xml("v12-lost-535")
    assert [(found.index, found.uuid[-1:]) for found in sorted(listing.gpus, key=lambda g: g.index or 0)] == [
        (0, "0"),
        (1, ""),
        (2, "2"),
    ]
    assert gpu(listing, 1).values == {"error": "Unknown Error", "lost": False}


def test_a_lost_gpu_does_not_affect_the_other() -> None:
    for listing in (xml("v12-lost-fields-550"), csv("csv-lost-550")):
        assert gpu(listing, 1).values["lost"] is True
        assert state(gpu(listing, 1)) == ("broken", "GPU lost: GPU is lost")
        assert state(gpu(listing, 0)) == ("free", "no process, no reservation")
    assert state(gpu(csv("csv-lost-550"), 2)) == ("unknown", "NVML: memory used: Unknown Error")


def test_older_schemas_are_read() -> None:
    volta = gpu(xml("v11-v100-470"), 1).values
    assert volta["processes"] == [(811, "compute", 8 * MIB), (911, "compute", 303 * MIB)]
    assert (volta["compute_mode"], volta["ecc_uncorrected"], volta["remap_pending"]) == (2, 3, True)
    assert volta["throttle"] == ["hw_slowdown", "hw_thermal"]
    geforce = gpu(xml("v10-geforce-418"), 0)
    assert "processes" not in geforce.values
    assert state(geforce) == ("unknown", "NVML: utilization: Unknown Error")
    kepler = xml("v6-k20-331")
    assert kepler.cuda is None
    assert gpu(kepler, 0).facts["pci_bus_id"] == "00000000:02:00.0"
    assert state(gpu(kepler, 0)) == ("unknown", "not readable: processes")  # graphics were not listed then
    assert state(gpu(kepler, 1)) == ("busy", "owner hidden: process (pid 3113)")


def test_the_queries_report_the_same_but_for_graphics_processes() -> None:
    listing = csv("csv-h100-580", (DATA / "csv-h100-580.apps").read_bytes())
    assert (listing.driver, listing.cuda, listing.count) == ("580.95.05", None, 4)
    busy = gpu(listing, 1)
    assert busy.facts["name"] == "NVIDIA H100 80GB HBM3"
    assert busy.values == {
        "memory_used": 65720 * MIB,
        "compute_mode": 3,
        "processes": [(4242, "compute", 65710 * MIB), (4243, "compute", None)],
        "utilization": 97,
        "temperature": 64,
        "power": 612.3,
        "power_limit": 700.0,
        "throttle": ["hw_thermal", "sw_power_cap"],
        "pcie_generation": 4,
        "pcie_width": 8,
        "ecc_uncorrected": 2,
        "remap_pending": True,
        "remap_failed": False,
    }
    assert [state(gpu(listing, k)) for k in (0, 2, 3)] == [
        ("free", "no process, no reservation"),
        ("unknown", "not readable: processes"),  # 4 MiB are in use, perhaps by a graphics process
        ("mig", f"in MIG mode; NVML: {smi.MIG_UNSEEN}"),
    ]


def test_headings_other_locales_and_commas_in_names_are_read() -> None:
    found = gpu(csv("csv-heading-odd-locale"), 0)
    assert (found.facts["name"], found.facts["memory_total"]) == ("NVIDIA GeForce RTX 4090, made up", 81559 * MIB)
    assert (found.values["memory_used"], found.values["power"]) == (1024 * MIB, 70.11)
    assert found.values["power_limit"] == 1000.0


def test_a_query_that_starts_with_a_message_has_the_gpus_that_follow() -> None:
    listing = csv("csv-no-handle")
    assert (listing.count, sorted(found.index or 0 for found in listing.gpus)) == (5, [0, 1, 2, 3, 4])
    assert gpu(listing, 3).values["error"] == "Unknown Error"
    assert gpu(listing, 4).uuid.endswith("4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
        ("no-driver", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the"
         " latest NVIDIA driver is installed and running."),
        ("not-a-field", 'Field "memory.reserved" is not a valid field to query.'),
    ],
)  # fmt: skip
def test_messages_without_a_listing_are_reported(name: str, words: str) -> None:
    output = (DATA / f"says-{name}.txt").read_bytes()
    with pytest.raises(smi.Bad) as bad:
        smi_xml.read_xml(b"", output)
    assert str(bad.value) == words
    with pytest.raises(smi.Bad) as bad:
        smi.read_csv(output, b"", smi.FIELDS)
    assert str(bad.value) == words


def test_no_gpu_and_one_lost_gpu_are_valid_listings() -> None:
    empty = smi_xml.read_xml((DATA / "says-no-devices.txt").read_bytes())
    assert (empty.gpus, empty.count) == ([], 0)
    lost = smi.read_csv((DATA / "says-lost.txt").read_bytes(), b"", smi.FIELDS)
    assert [(found.values["lost"], found.facts["pci_bus_id"]) for found in lost.gpus] == [(True, "00000000:02:00.0")]
    assert smi.not_a_field((DATA / "says-not-a-field.txt").read_text()) == "memory.reserved"
    assert smi.not_a_field("Field is not a valid field to query") is None


def test_the_only_gpu_of_a_node_that_is_lost_is_a_gpu_and_not_a_node_without_any() -> None:
    output = (DATA / "says-only-gpu-lost.txt").read_bytes()
    for listing in (smi_xml.read_xml(b"", output), smi_xml.read_xml(output), smi.read_csv(output, b"", smi.FIELDS)):
        listing.number({})
        [lost] = listing.gpus
        assert (listing.count, lost.index, lost.facts["pci_bus_id"]) == (1, 0, "00000000:81:00.0")
        assert state(lost) == ("unknown", "NVML: Unknown Error")


ROW = (
    "{index}, {uuid}, 00000000:{bus}:00.0, 550.127.05, 81559, 551, 0, Default, {use}, {heat}, 70.11, 700.00, 0x1, 5, "
    "5, 16, 16, 0, [N/A], No, No, Disabled, {state}, NVIDIA H100 80GB HBM3\n"
)


def rows(**changes: str) -> smi.Listing:
    """Read the rows of two GPUs, of which the second has ``changes``."""
    values = {"use": "0", "heat": "31", "state": "P0"}
    ids = [f"GPU-5eed000b-0000-4000-8000-{k:012d}" for k in range(2)]
    first = ROW.format(index=0, uuid=ids[0], bus="1B", **values)
    second = ROW.format(**({"index": "1", "uuid": ids[1], "bus": "43"} | values | changes))
    listing = smi.read_csv((first + second).encode(), b"", smi.FIELDS)
    listing.number({})
    return listing


@pytest.mark.parametrize("index", ["[Unknown Error]", "[N/A]", "", "ERR!"])
@pytest.mark.parametrize("uuid", ["GPU-5eed000b-0000-4000-8000-000000000001", "[Unknown Error]"])
def test_a_row_without_an_index_is_a_gpu_that_is_unknown(index: str, uuid: str) -> None:
    listing = rows(index=index, uuid=uuid)
    assert (listing.count, state(gpu(listing, 0))[0]) == (2, "free")
    assert state(gpu(listing, 1))[0] == "unknown"


@pytest.mark.parametrize("words", ["[Unknown Error]", "ERR!", "[GPU requires reset]"])
@pytest.mark.parametrize("field", ["use", "heat", "state"])
def test_a_gpu_of_which_a_sensor_fails_is_not_free(field: str, words: str) -> None:
    assert state(gpu(rows(), 1)) == ("free", "no process, no reservation")
    assert state(gpu(rows(**{field: "[N/A]"}), 1)) == ("free", "no process, no reservation")
    assert state(gpu(rows(**{field: words}), 1))[0] == "unknown"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("<gpu_util>0 %", "Unknown Error"),
        ("<gpu_temp>31 C", "Unknown Error"),
        ("<performance_state>P0", "Unknown Error"),
        ("<performance_state>P0", "ERR!"),
        ("<current_ecc>Enabled", "GPU requires reset"),
        ("<remapped_row_unc>0", "[GPU requires reset]"),
    ],
)
def test_a_gpu_of_which_a_field_fails_in_the_xml_is_not_free(field: str, words: str) -> None:
    text = (DATA / "v13-h100-590.xml").read_text()
    assert field in text
    listing = smi_xml.read_xml(text.replace(field, field.partition(">")[0] + ">" + words, 1).encode())
    listing.number({})
    assert state(gpu(listing, 0))[0] == "unknown"
    assert words.strip("[]") in state(gpu(listing, 0))[1]


@pytest.mark.parametrize(
    ("line", "index", "address"),
    [
        ("Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error", None, "00000000:0B:00.0"),
        ("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", None, "00000000:07:00.0"),
        ("Unable to determine the device handle for GPU1: 0000:44:00.0: Unknown Error", 1, "00000000:44:00.0"),
        ("Unable to determine the device handle for GPU2: Unknown Error", 2, ""),
        ("Unable to determine the device handle for GPU0", 0, ""),
        ("Unable to detect the device handle for GPU0000:B1:00.0: Unknown Error", None, "00000000:B1:00.0"),
    ],
)
def test_every_way_of_naming_a_gpu_without_a_handle_is_understood(line: str, index: int | None, address: str) -> None:
    [found] = smi.without_handle(line)
    assert (found.index, found.facts["pci_bus_id"]) == (index, address)
    assert found.values["error"] in {"Unknown Error", "no handle"}


def test_a_gpu_keeps_the_index_it_had_when_another_has_vanished() -> None:
    whole = xml("v13-h100-590")
    known = whole.number({})
    text = (DATA / "v13-h100-590.xml").read_text()
    first, second = text.index("\t<gpu id"), text.index('\t<gpu id="00000000:43')
    listing = smi_xml.read_xml((text[:first] + text[second:]).encode())
    listing.number(known)
    assert [(found.index, listing.count) for found in listing.gpus] == [(1, 2)]


FORGED = "</process_name><used_memory>1 MiB</used_memory></process_info></processes></gpu>"


@pytest.mark.parametrize(
    "name",
    [
        FORGED + '<gpu id="00000000:99:00.0"><uuid>GPU-5eed0001-0000-4000-8000-0000000000ff</uuid>',
        FORGED + '<gpu\tid="x"><uuid >GPU-5eed0001-0000-4000-8000-000000000000</uuid><supported_clocks>',
        FORGED + "<gpu><uuid>&#71;PU-5eed0001-0000-4000-8000-000000000000</uuid>",
        "</process_name></process_info></processes><processes></processes><processes><process_info><process_name>",
        "</process_name></process_info></processes><fb_memory_usage><used>0 MiB</used></fb_memory_usage><processes>",
        "</process_name><![CDATA[",
        "</process_name><!--",
        "</process_name>&lol;",
    ],
)
def test_a_process_that_forges_xml_in_its_name_makes_no_gpu_free(name: str) -> None:
    text = (DATA / "v13-h100-590.xml").read_text().replace("/opt/conda/bin/python", name)
    try:
        listing = smi_xml.read_xml(text.encode())
    except smi.Bad:
        return
    listing.number({})
    assert state(gpu(listing, 1))[0] != "free"


@pytest.mark.parametrize("text", ["<!DOCTYPE x [<!ENTITY a 'b'>]>", "<?php ?>", "<a>&a;</a>", "<a>" * 40 + "</a>" * 40])
def test_xml_that_nvidia_smi_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(smi.Bad):
        smi_xml.read_xml(f"<nvidia_smi_log>{text}</nvidia_smi_log>".encode())


def test_a_flood_is_refused() -> None:
    with pytest.raises(smi.Bad, match="more than 16 MiB"):
        smi_xml.read_xml(b" " * (smi.LIMIT + 1))
    with pytest.raises(smi.Bad, match="more than 16 MiB"):
        smi.read_csv(b" " * (smi.LIMIT + 1), b"", smi.FIELDS)
    with pytest.raises(smi.Bad, match="too many elements"):
        smi_xml.read_xml(b"<nvidia_smi_log>" + b"<a/>" * 200_000 + b"</nvidia_smi_log>")


@pytest.mark.parametrize(
    ("text", "whole", "size", "decimal"),
    [
        ("81559 MiB", 81559, 81559 * MIB, 81559.0),
        ("81559", 81559, 81559 * MIB, 81559.0),
        ("[N/A]", None, None, None),
        ("16x", 16, None, 16.0),
        ("1.024 MiB", 1024, 1024 * MIB, 1.024),
        ("1\u202f024 MiB", 1024, 1024 * MIB, 1024.0),
        ("12,34", None, None, 12.34),
        ("70,10 W", None, None, 70.1),
        ("1.000,50 W", None, None, 1000.5),
        ("1,000.50 W", None, None, 1000.5),
        ("-5 C", None, None, None),
        ("\u0663 MiB", None, None, None),
        ("9" * 16, None, None, None),
        ("ERR!", None, None, None),
        ("", None, None, None),
    ],
)  # fmt: skip
def test_numbers(text: str, whole: int | None, size: int | None, decimal: float | None) -> None:
    assert (value.whole(text), value.size(text), value.decimal(text)) == (whole, size, decimal)


def test_recovery_actions_have_nvmls_names() -> None:
    assert [value.recovery(text) for text in ("None", "Reset", "Drain P2P", "Drain and Reset", "N/A", "Pray")] == [
        "none", "GPU reset", "drain of peer-to-peer traffic", "drain and GPU reset", None, "pray",
    ]  # fmt: skip
