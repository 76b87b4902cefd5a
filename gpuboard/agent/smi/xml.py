"""``nvidia-smi -q -x`` → a listing of GPUs (smi/parse.py); pure. Tags: ``nvidia-smi --dtd``, versions 6 to 13.

The output is not always well-formed: names of processes are not escaped, and some drivers close an element of the
supported clocks twice. Both are cut out before parsing. A forged name then leaves an extra GPU, element or UUID, and
such a listing is rejected as a whole.
"""

import io
import re

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import values as value

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple
    from xml.etree.ElementTree import Element

_DEPTH, _ELEMENTS = 32, 100000  # 16 GPUs have 6,000
_START, _END = "<nvidia_smi_log", "</nvidia_smi_log>"
_CUT = (
    re.compile(r"(<process_name>).*?(</process_name>)", re.DOTALL),
    re.compile(r"(<supported_clocks>).*?(</supported_clocks>)", re.DOTALL),
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
_GPU = re.compile(r"<gpu[\s/>]")
_PROCESSES = ("processes", "compute_processes")  # the second: drivers before 340, without graphics


def read_xml(data: bytes, messages: bytes = b"") -> smi.Listing:
    """Parse nvidia-smi's standard output; ``messages``: its standard error. Raises Bad for an incomplete listing."""
    if len(data) > smi.LIMIT:
        raise smi.Bad("its output is more than %d MiB" % (smi.LIMIT // 2**20))
    raw = data.decode("utf-8", "replace")
    start, end = raw.find(_START), raw.rfind(_END)
    if start < 0 or end < start:
        output = messages.decode("utf-8", "replace") + "\n" + raw
        empty = smi.no_gpus(output)
        if empty is None:
            raise smi.Bad(smi.complaint(output))
        return empty
    around = "\n".join([messages.decode("utf-8", "replace"), raw[:start], raw[end + len(_END) :]])
    raw = raw[start : end + len(_END)]
    text = _CONTROL.sub("", raw)
    for pattern in _CUT:
        text = pattern.sub(r"\1\2", text)
    if "&" in text or "<!" in text or "<?" in text:
        raise smi.Bad("its XML has entities or declarations, which nvidia-smi never writes")
    root = _parse(text)
    listed = root.findall("gpu")
    attached = value.whole(_text(root, "attached_gpus"))
    if len(_GPU.findall(raw)) > (len(listed) if attached is None else attached) or len(listed) > smi.GPUS_LIMIT:
        raise smi.Bad("its XML has more GPUs than are attached")
    gpus = [_gpu(element) for element in listed]
    if any(raw.lower().count(gpu.uuid.lower()) > 1 for gpu in gpus if gpu.uuid):
        raise smi.Bad("its XML has a GPU's UUID twice")
    gpus = smi.with_failed([_gpu(element) for element in listed], around)
    return smi.Listing(
        gpus, min(attached or 0, smi.GPUS_LIMIT), _version(root, "driver_version"), _version(root, "cuda_version")
    )


def _parse(text: str) -> "Element":
    """Return the root element. Raises Bad for malformed XML; read_xml has rejected entities."""
    root: "Element"
    depth = count = 0
    try:
        from xml.etree import ElementTree  # late: only where nvidia-smi is used; not every Python has it

        parsed = ElementTree.iterparse(io.BytesIO(text.encode("utf-8", "replace")), ("start", "end"))
        for event, root in parsed:  # noqa: B007  the last element to end is the root
            count += event == "start"
            depth += 1 if event == "start" else -1
            if depth > _DEPTH or count > _ELEMENTS:
                raise smi.Bad("its XML is nested too deeply or has too many elements")
    except ImportError as error:  # some builds of Python lack expat
        raise smi.Bad("this Python cannot parse XML: %s" % error)
    except ElementTree.ParseError as error:
        raise smi.Bad("its XML is malformed: %s" % error)
    return root


def _find(element: "Element", *paths: str) -> "Optional[Element]":
    """Return the element at the first of ``paths`` (``a/b/c``) that exists. Raises Bad if there are several."""
    for path in paths:
        found = [element]
        for tag in path.split("/"):
            found = found[0].findall(tag)
            if len(found) > 1:
                raise smi.Bad("its XML has more than one <%s> where one is expected" % tag)
            if not found:
                break
        else:
            return found[0]
    return None


def _text(element: "Element", *paths: str) -> str:
    found = _find(element, *paths)
    return "" if found is None else _own_text(found)


def _own_text(element: "Element") -> str:
    return " ".join("".join([element.text or ""] + [child.tail or "" for child in element]).split())


def _version(root: "Element", tag: str) -> "Optional[str]":
    text = _text(root, tag)
    return None if value.withheld(text) else text[:32]


def _gpu(gpu: "Element") -> smi.Gpu:
    power = _find(gpu, "gpu_power_readings", "power_readings")
    if power is None:
        power = gpu
    text = {
        "uuid": _text(gpu, "uuid"),
        "memory_used": _text(gpu, "fb_memory_usage/used"),
        "compute_mode": _text(gpu, "compute_mode"),
        "utilization": _text(gpu, "utilization/gpu_util"),
        "temperature": _text(gpu, "temperature/gpu_temp"),
        "power": _text(power, "power_draw", "average_power_draw", "instant_power_draw"),
        "power_limit": _text(power, "enforced_power_limit", "current_power_limit", "power_limit"),
        "pcie_generation": _text(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        "pcie_width": _text(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        "name": _text(gpu, "product_name"),
    }
    facts: "Dict[str, Any]" = {
        "uuid": value.uuid(text["uuid"]),
        "name": text["name"][:96],
        "pci_bus_id": value.pci_address(_text(gpu, "pci/pci_bus_id")) or value.pci_address(gpu.get("id")),
        "memory_total": value.size(_text(gpu, "fb_memory_usage/total")),
        "memory_reserved": value.size(_text(gpu, "fb_memory_usage/reserved")),
        "pcie_generation_max": value.whole(_text(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        "pcie_width_max": value.whole(_text(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        "minor": value.whole(_text(gpu, "minor_number")),
        "mig": [] if value.unless_no(_text(gpu, "mig_mode/current_mig")) else None,
    }
    processes, hidden = _processes(gpu)
    pending = value.yes(_text(gpu, "remapped_rows/remapped_row_pending"))
    if pending is None:
        pending = value.yes(_text(gpu, "retired_pages/pending_retirement", "retired_pages/pending_blacklist"))
    values = {
        "memory_used": value.size(text["memory_used"]),
        "compute_mode": value.compute_mode(text["compute_mode"]),
        "processes": processes,
        "utilization": value.whole(text["utilization"]),
        "temperature": value.whole(text["temperature"]),
        "power": value.decimal(text["power"]),
        "power_limit": value.decimal(text["power_limit"]),
        "throttle": _throttle(gpu),
        "pcie_generation": value.whole(text["pcie_generation"]),
        "pcie_width": value.whole(text["pcie_width"]),
        "ecc_uncorrected": _uncorrected(gpu),
        "remap_pending": pending,
        "remap_failed": value.unless_no(_text(gpu, "remapped_rows/remapped_row_failure")),
        "recovery_action": _recovery(gpu),
    }
    performance = _text(gpu, "performance_state")
    needed = {
        "memory used": (values["memory_used"], text["memory_used"]),
        "compute mode": (values["compute_mode"], text["compute_mode"]),
        "processes": (processes, hidden),
        "utilization": (values["utilization"], text["utilization"]),
        "temperature": (values["temperature"], text["temperature"]),
        "performance state": (value.performance(performance), performance),
    }
    return smi.make_gpu(facts, values, text["uuid"], needed, [_own_text(element) for element in gpu.iter()])


def _processes(gpu: "Element") -> "Tuple[Optional[value.Processes], str]":
    """Return (processes, the text in place of a missing list)."""
    found = [element for element in (_find(gpu, tag) for tag in _PROCESSES) if element is not None]
    if len(found) != 1:
        return None, ""
    text = _own_text(found[0])
    if text:
        return None, text
    if [child for child in found[0] if child.tag != "process_info"]:
        return None, ""
    entries = [(_text(one, "pid"), _text(one, "type") or "C", _text(one, "used_memory")) for one in found[0]]
    listed = value.processes(entries)
    if listed == [] and found[0].tag != _PROCESSES[0] and value.size(_text(gpu, "fb_memory_usage/used")) != 0:
        return None, ""  # a graphics process may use that memory
    return listed, ""


def _throttle(gpu: "Element") -> "List[str]":
    found = []
    for word in ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "sw_power_cap"):
        tail = word + "_slowdown" if word in ("hw_thermal", "hw_power_brake", "sw_thermal") else word
        names = ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_")
        active = _text(gpu, *(name + tail for name in names))
        if value.yes(active):
            found.append(word)
    return found


def _uncorrected(gpu: "Element") -> "Optional[int]":
    """Return the volatile uncorrected errors: the total (before Ampere), else the sum of all counters."""
    counted = _find(gpu, "ecc_errors/volatile")
    if counted is None:
        return None
    total = value.whole(_text(counted, "double_bit/total"))
    if total is not None:
        return total
    parts = [value.whole(_text(counted, part.tag)) for part in counted if "uncorrectable" in part.tag]
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _recovery(gpu: "Element") -> "Optional[str]":
    reported = value.recovery(_text(gpu, "gpu_recovery_action"))
    if reported is not None:
        return reported
    for tag, action in (("drain_and_reset_recommended", "drain and reset"), ("reset_required", "reset")):
        if value.unless_no(_text(gpu, "gpu_reset_status/" + tag)):
            return value.recovery(action)
    return None
