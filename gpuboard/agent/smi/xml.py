"""``nvidia-smi -q -x`` → a listing of GPUs (smi/parse.py); pure. Tags: ``nvidia-smi --dtd``, versions 6 to 13.

The output is not always well-formed: names of processes are not escaped, and some drivers close an element of the
supported clocks twice. Both are cut out before parsing. A forged name then leaves an extra GPU, element or UUID, and
such a listing is rejected as a whole.
"""

import re

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import values as value

MYPY = False
if MYPY:
    from typing import Any, Dict, Iterator, List, Optional, Tuple

_DEPTH, _ELEMENTS = 32, 100000  # 16 GPUs have 6,000
_START, _END = "<nvidia_smi_log", "</nvidia_smi_log>"
_CUT = (
    re.compile(r"(<process_name>).*?(</process_name>)", re.DOTALL),
    re.compile(r"(<supported_clocks>).*?(</supported_clocks>)", re.DOTALL),
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
_GPU = re.compile(r"<gpu[\s/>]")
_PROCESSES = ("processes", "compute_processes")  # the second: drivers before 340, without graphics


class _Element:
    def __init__(self, tag: str, attributes: "Dict[str, str]") -> None:
        self.tag = tag
        self.attributes = attributes
        self.words: "List[str]" = []  # its text, in pieces
        self.children: "List[_Element]" = []

    def all(self, tag: str) -> "List[_Element]":
        return [child for child in self.children if child.tag == tag]

    def find(self, path: str) -> "Optional[_Element]":
        """Return the element at ``a/b/c``, None if absent. Raises Bad if there are several."""
        here = self
        for tag in path.split("/"):
            found = here.all(tag)
            if len(found) > 1:
                raise smi.Bad("its XML has more than one <%s> where one is expected" % tag)
            if not found:
                return None
            here = found[0]
        return here

    def texts(self) -> "Iterator[str]":
        """Yield the text of this element and of all below."""
        yield " ".join("".join(self.words).split())
        for child in self.children:
            for words in child.texts():
                yield words

    def text(self, *paths: str) -> str:
        """Return the text at the first of ``paths`` that exists, else ""."""
        for path in paths:
            element = self.find(path)
            if element is not None:
                return " ".join("".join(element.words).split())
        return ""


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
    listed = root.all("gpu")
    attached = value.whole(root.text("attached_gpus"))
    if len(_GPU.findall(raw)) > (len(listed) if attached is None else attached) or len(listed) > smi.GPUS_LIMIT:
        raise smi.Bad("its XML has more GPUs than are attached")
    gpus = [_gpu(element) for element in listed]
    if any(raw.lower().count(gpu.uuid.lower()) > 1 for gpu in gpus if gpu.uuid):
        raise smi.Bad("its XML has a GPU's UUID twice")
    gpus = smi.with_failed([_gpu(element) for element in listed], around)
    return smi.Listing(
        gpus, min(attached or 0, smi.GPUS_LIMIT), _text(root, "driver_version"), _text(root, "cuda_version")
    )


def _text(root: _Element, tag: str) -> "Optional[str]":
    text = root.text(tag)
    return None if value.withheld(text) else text[:32]


def _parse(text: str) -> _Element:
    """Return the root element. Raises Bad for malformed XML; read_xml has rejected entities."""
    try:
        from xml.parsers import expat  # late: only where nvidia-smi is used; some builds of Python lack it
    except ImportError as error:
        raise smi.Bad("this Python cannot parse XML: %s" % error)
    top = _Element("", {})
    stack = [top]
    left = [_ELEMENTS]

    def begin(tag: str, attributes: "Dict[str, str]") -> None:
        left[0] -= 1
        if len(stack) > _DEPTH or left[0] < 0:
            raise smi.Bad("its XML is nested too deeply or has too many elements")
        element = _Element(tag, attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def characters(words: str) -> None:
        stack[-1].words.append(words)

    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = begin
    parser.EndElementHandler = lambda tag: stack.pop()
    parser.CharacterDataHandler = characters
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise smi.Bad("its XML is malformed: %s" % error)
    return top.children[0]


def _gpu(gpu: _Element) -> smi.Gpu:
    power = gpu.find("gpu_power_readings") or gpu.find("power_readings") or _Element("", {})
    text = {
        "uuid": gpu.text("uuid"),
        "memory_used": gpu.text("fb_memory_usage/used"),
        "compute_mode": gpu.text("compute_mode"),
        "utilization": gpu.text("utilization/gpu_util"),
        "temperature": gpu.text("temperature/gpu_temp"),
        "power": power.text("power_draw", "average_power_draw", "instant_power_draw"),
        "power_limit": power.text("enforced_power_limit", "current_power_limit", "power_limit"),
        "pcie_generation": gpu.text("pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        "pcie_width": gpu.text("pci/pci_gpu_link_info/link_widths/current_link_width"),
        "name": gpu.text("product_name"),
    }
    facts: "Dict[str, Any]" = {
        "uuid": value.uuid(text["uuid"]),
        "name": text["name"][:96],
        "pci_bus_id": value.pci_address(gpu.text("pci/pci_bus_id")) or value.pci_address(gpu.attributes.get("id")),
        "memory_total": value.size(gpu.text("fb_memory_usage/total")),
        "memory_reserved": value.size(gpu.text("fb_memory_usage/reserved")),
        "pcie_generation_max": value.whole(gpu.text("pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        "pcie_width_max": value.whole(gpu.text("pci/pci_gpu_link_info/link_widths/max_link_width")),
        "minor": value.whole(gpu.text("minor_number")),
        "mig": [] if value.unless_no(gpu.text("mig_mode/current_mig")) else None,
    }
    processes, hidden = _processes(gpu)
    pending = value.yes(gpu.text("remapped_rows/remapped_row_pending"))
    if pending is None:
        pending = value.yes(gpu.text("retired_pages/pending_retirement", "retired_pages/pending_blacklist"))
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
        "remap_failed": value.unless_no(gpu.text("remapped_rows/remapped_row_failure")),
        "recovery_action": _recovery(gpu),
    }
    performance = gpu.text("performance_state")
    needed = {
        "memory used": (values["memory_used"], text["memory_used"]),
        "compute mode": (values["compute_mode"], text["compute_mode"]),
        "processes": (processes, hidden),
        "utilization": (values["utilization"], text["utilization"]),
        "temperature": (values["temperature"], text["temperature"]),
        "performance state": (value.performance(performance), performance),
    }
    return smi.make_gpu(facts, values, text["uuid"], needed, list(gpu.texts()))


def _processes(gpu: _Element) -> "Tuple[Optional[value.Processes], str]":
    """Return (processes, the text in place of a missing list)."""
    found = [element for element in (gpu.find(tag) for tag in _PROCESSES) if element is not None]
    if len(found) != 1:
        return None, ""
    text = " ".join("".join(found[0].words).split())
    if text:
        return None, text
    if [child for child in found[0].children if child.tag != "process_info"]:
        return None, ""
    entries = [(one.text("pid"), one.text("type") or "C", one.text("used_memory")) for one in found[0].children]
    listed = value.processes(entries)
    if listed == [] and found[0].tag != _PROCESSES[0] and value.size(gpu.text("fb_memory_usage/used")) != 0:
        return None, ""  # a graphics process may use that memory
    return listed, ""


def _throttle(gpu: _Element) -> "List[str]":
    found = []
    for word in ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "sw_power_cap"):
        tail = word + "_slowdown" if word in ("hw_thermal", "hw_power_brake", "sw_thermal") else word
        active = gpu.text(
            "clocks_event_reasons/clocks_event_reason_" + tail, "clocks_throttle_reasons/clocks_throttle_reason_" + tail
        )
        if value.yes(active):
            found.append(word)
    return found


def _uncorrected(gpu: _Element) -> "Optional[int]":
    """Return the volatile uncorrected errors: the total (before Ampere), else the sum of all counters."""
    counted = gpu.find("ecc_errors/volatile")
    if counted is None:
        return None
    total = value.whole(counted.text("double_bit/total"))
    if total is not None:
        return total
    parts = [value.whole(counted.text(part.tag)) for part in counted.children if "uncorrectable" in part.tag]
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _recovery(gpu: _Element) -> "Optional[str]":
    reported = value.recovery(gpu.text("gpu_recovery_action"))
    if reported is not None:
        return reported
    for tag, action in (("drain_and_reset_recommended", "drain and reset"), ("reset_required", "reset")):
        if value.unless_no(gpu.text("gpu_reset_status/" + tag)):
            return value.recovery(action)
    return None
