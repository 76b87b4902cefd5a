"""nvidia-smi's output → facts and values of GPUs, in the form of gpuboard/agent/nvml/reader.py; pure.

``nvidia-smi -q -x`` reports everything at once, the types of processes included (gpuboard/agent/smi/xml.py). Where its
XML cannot be parsed, two CSV queries are used, which list no graphics processes. Names of processes are ignored: their
owners choose them, and nvidia-smi does not escape them. Formats: ``nvidia-smi --help-query-gpu``, and the output of
drivers 340 to 590 (tests/data/nvidia-smi).
"""

import re

from gpuboard.agent.nvml import terms
from gpuboard.agent.smi import values as value

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Set, Tuple

LIMIT = 16 * 1024 * 1024  # bytes of output; 8 GPUs with long reports write 1 MB
GPUS_LIMIT = 256

# In this order; the name is last because it may contain a comma. Fields that the driver does not know are dropped.
FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.reserved",
    "memory.used",
    "compute_mode",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "enforced.power.limit",
    "clocks_throttle_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "mig.mode.current",
    "pstate",
    "name",
)
APPS = ("gpu_uuid", "pid", "used_memory")

MIG_UNSEEN = "nvidia-smi does not report its MIG devices separately"
_NO_HANDLE = re.compile(
    r"Unable to (?:determine|detect) the device handle for GPU\s*"
    r"(?:(?P<index>\d{1,3})(?::\s+|\s*$))?"
    r"(?:(?P<pci>[0-9A-Fa-f]{3,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*:?)?\s*:?\s*(?P<words>.*)"
)
_NOT_A_FIELD = re.compile(r'Field "([^"\n]{1,80})" is not a valid field to query')
_NO_GPUS = re.compile(r"No devices were found", re.IGNORECASE)


class Bad(Exception):
    """Output that cannot be parsed or is contradictory; the message gives the reason."""


class Gpu:
    """One GPU in one output."""

    def __init__(self, facts: "Dict[str, Any]", values: "Dict[str, Any]") -> None:
        self.facts = facts  # GpuStatic of gpuboard/model/gpu.py; has "error" if the GPU was not identified
        self.values = values  # its GpuReading without the UUID
        self.index: "Optional[int]" = facts.get("index")

    @property
    def uuid(self) -> str:
        return str(self.facts.get("uuid", ""))

    @property
    def place(self) -> "Tuple[int, ...]":
        """Its address on the bus, which NVML's order follows; () when unknown."""
        return terms.pci_key(str(self.facts.get("pci_bus_id", "")))


class Listing:
    """The GPUs that one run of nvidia-smi reported."""

    def __init__(
        self, gpus: "List[Gpu]", attached: "Optional[int]", driver: "Optional[str]", cuda: "Optional[str]"
    ) -> None:
        self.gpus = gpus
        self.count = max(attached or 0, len(gpus))
        self.driver = driver
        self.cuda = cuda

    def number(self, known: "Dict[str, int]") -> "Dict[str, int]":
        """Assign every GPU its index and return the indexes by UUID; ``known``: those of an earlier listing.

        The XML has no indexes. NVML's follow the bus, and a failing GPU keeps its own.
        """
        taken: "Set[Optional[int]]" = set()
        for gpu in self.gpus:
            gpu.index = known.get(gpu.uuid, gpu.index)
            if gpu.index is not None and (gpu.index in taken or not 0 <= gpu.index < GPUS_LIMIT):
                gpu.index = None
            taken.add(gpu.index)
        free = (index for index in range(2 * GPUS_LIMIT) if index not in taken)
        for gpu in sorted([gpu for gpu in self.gpus if gpu.index is None], key=lambda gpu: gpu.place):
            gpu.index = next(free)
        for gpu in self.gpus:
            assert gpu.index is not None
            self.count = max(self.count, gpu.index + 1)
            if "error" not in gpu.facts:
                gpu.facts["index"] = gpu.index
        return {gpu.uuid: gpu.index for gpu in self.gpus if gpu.uuid and gpu.index is not None}


def make_gpu(
    facts: "Dict[str, Any]",
    values: "Dict[str, Any]",
    uuid_text: str,
    needed: "Dict[str, Tuple[Any, str]]",
    texts: "List[str]",
) -> Gpu:
    """Return a GPU from its fields; ``uuid_text``: the raw text of its UUID.

    ``needed``: name → (value, raw text) of values that decide a GPU's state, and of those that only a failing GPU
    lacks. If one is None and its text is not a form of "not available", the whole GPU counts as failed, as with NVML.
    ``texts``: every text that may report a lost GPU.
    """
    reports = [text for text in texts if value.lost(text) or "requires reset" in text.lower()]
    if not facts["uuid"]:
        words = value.plain((reports + [uuid_text])[0])
        words = words if words and not value.withheld(words) else "nvidia-smi reports no UUID for it"
        failed = {"error": words[:200], "lost": any(value.lost(text) for text in reports)}
        return Gpu(dict(failed, index=facts.get("index"), pci_bus_id=facts["pci_bus_id"]), failed)
    if terms.shares_memory(facts["name"]):
        facts["memory_shared"] = True
        for table, name in ((facts, "memory_total"), (facts, "memory_reserved"), (values, "memory_used")):
            table[name] = None  # its memory is the host's, whatever is reported
        if values["compute_mode"] is None and value.withheld(needed["compute mode"][1]):
            values["compute_mode"] = 0  # a Jetson has no modes
    error = None
    if reports:
        error = reports[0]
    else:
        for name, (found, text) in needed.items():
            if found is None and not value.withheld(text):
                error = "%s: %s" % (name, value.plain(text))
                break
    if error is None and facts.get("mig") is not None:
        error = MIG_UNSEEN
    if error is not None:
        values["error"] = value.plain(error)[:200]
        values["lost"] = any(value.lost(text) for text in reports)
    kept = {name: item for name, item in values.items() if item is not None and (item or name != "throttle")}
    return Gpu({name: item for name, item in facts.items() if item is not None}, kept)


def without_handle(output: str) -> "List[Gpu]":
    """Return the GPUs for which nvidia-smi reports that it cannot open them."""
    found = []
    for line in output.splitlines()[:GPUS_LIMIT]:
        match = _NO_HANDLE.search(line)
        if match is not None:
            words = " ".join(match.group("words").split())[:200] or "no handle"
            failed = {"error": words, "lost": value.lost(words)}
            index = match.group("index")
            facts = dict(failed, pci_bus_id=value.pci_address(match.group("pci")))
            if index is not None:
                facts["index"] = int(index)
            found.append(Gpu(facts, failed))
    return found


def with_failed(gpus: "List[Gpu]", output: str) -> "List[Gpu]":
    """Return ``gpus`` and those that ``output`` reports as failed, without duplicates."""
    listed = {gpu.place for gpu in gpus if gpu.place}
    numbered: "Set[Optional[int]]" = {gpu.index for gpu in gpus}
    found = list(gpus)
    for gpu in without_handle(output):
        if gpu.place not in listed and (gpu.index is None or gpu.index not in numbered):
            found.append(gpu)
            listed.add(gpu.place or (-len(found),))
            numbered.add(gpu.index)
    return found


def no_gpus(output: str) -> "Optional[Listing]":
    """Return the listing where nvidia-smi works and reports no GPU or only failed ones; None for other output."""
    return Listing(with_failed([], output), 0, None, None) if _NO_GPUS.search(output) else None


def complaint(output: str) -> str:
    """Return nvidia-smi's error message from output without a listing."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith("<")]
    return lines[0][:300] if lines else "no output"


def not_a_field(output: str) -> "Optional[str]":
    """Return the field that this driver's nvidia-smi does not know; None where it knows all."""
    match = _NOT_A_FIELD.search(output)
    return match.group(1) if match else None


def read_csv(rows: bytes, apps: bytes, fields: "Tuple[str, ...]") -> Listing:
    """Parse ``--query-gpu=<fields>`` and ``--query-compute-apps=<APPS>``, both as csv,noheader,nounits.

    Neither lists graphics processes, so an empty list of processes counts only if no memory is in use at all. A row
    without an index is a failed GPU. Raises Bad when there is no GPU, or one twice.
    """
    output = _text(rows)
    gpus = []
    driver = None
    by_uuid = _apps(_text(apps))
    for line in output.splitlines()[: 4 * GPUS_LIMIT]:
        cells = [cell.strip() for cell in line.split(", ")]
        if len(cells) < len(fields) or cells[0] == fields[0]:
            continue  # a heading, a warning, a message
        cells[len(fields) - 1 :] = [", ".join(cells[len(fields) - 1 :])]
        row = {field: cells[place] for place, field in enumerate(fields)}
        driver = driver or (None if value.withheld(row.get("driver_version")) else row["driver_version"][:32])
        gpus.append(_row(row, by_uuid))
    if len({gpu.uuid for gpu in gpus if gpu.uuid}) != len([gpu for gpu in gpus if gpu.uuid]):
        raise Bad("its output lists a GPU twice")
    gpus = with_failed(gpus, output)
    if not gpus:
        empty = no_gpus(output)
        if empty is None:
            raise Bad(complaint(output))
        return empty
    return Listing(gpus[:GPUS_LIMIT], None, driver, None)


def _row(row: "Dict[str, str]", by_uuid: "Optional[Dict[str, Any]]") -> Gpu:
    uuid = value.uuid(row.get("uuid"))
    used = value.size(row.get("memory.used"))
    processes = None if by_uuid is None else by_uuid.get(uuid, [])
    if processes == [] and used != 0:
        processes = None  # a graphics process may use that memory
    pending, retired = value.yes(row.get("remapped_rows.pending")), value.yes(row.get("retired_pages.pending"))
    index = value.whole(row["index"])
    facts: "Dict[str, Any]" = {
        "index": index,
        "uuid": uuid,
        "name": row.get("name", "")[:96],
        "pci_bus_id": value.pci_address(row.get("pci.bus_id")),
        "memory_total": value.size(row.get("memory.total")),
        "memory_reserved": value.size(row.get("memory.reserved")),
        "pcie_generation_max": value.whole(row.get("pcie.link.gen.max")),
        "pcie_width_max": value.whole(row.get("pcie.link.width.max")),
        "mig": [] if value.unless_no(row.get("mig.mode.current")) else None,
    }
    values = {
        "memory_used": used,
        "compute_mode": value.compute_mode(row.get("compute_mode")),
        "processes": processes,
        "utilization": value.whole(row.get("utilization.gpu")),
        "temperature": value.whole(row.get("temperature.gpu")),
        "power": value.decimal(row.get("power.draw")),
        "power_limit": value.decimal(row.get("enforced.power.limit")),
        "throttle": terms.throttle(value.bitmask(row.get("clocks_throttle_reasons.active")) or 0),
        "pcie_generation": value.whole(row.get("pcie.link.gen.current")),
        "pcie_width": value.whole(row.get("pcie.link.width.current")),
        "ecc_uncorrected": value.whole(row.get("ecc.errors.uncorrected.volatile.total")),
        "remap_pending": retired if pending is None else pending,
        "remap_failed": value.unless_no(row.get("remapped_rows.failure")),
    }
    columns = {
        "memory used": (used, "memory.used"),
        "compute mode": (values["compute_mode"], "compute_mode"),
        "utilization": (values["utilization"], "utilization.gpu"),
        "temperature": (values["temperature"], "temperature.gpu"),
        "performance state": (value.performance(row.get("pstate")), "pstate"),
    }
    needed = {name: (found, row.get(column, "")) for name, (found, column) in columns.items()}
    gpu = make_gpu(facts, values, row.get("uuid", ""), needed, list(row.values()))
    if index is None:
        gpu.values.setdefault("error", "nvidia-smi reports no index for it")
    return gpu


def _apps(output: str) -> "Optional[Dict[str, Any]]":
    """Return processes by UUID; None where a line may be a process that could not be parsed."""
    entries: "Dict[str, List[Tuple[str, str, str]]]" = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(", ")]
        uuid = value.uuid(cells[0])
        if len(cells) == len(APPS) and uuid:
            entries.setdefault(uuid, []).append((cells[1], "C", cells[2]))
        elif line.strip() and cells[0] != APPS[0]:
            return None
    return {uuid: value.processes(found) for uuid, found in entries.items()}


def _text(data: bytes) -> str:
    if len(data) > LIMIT:
        raise Bad("its output is more than %d MiB" % (LIMIT // 2**20))
    return data.decode("utf-8", "replace")
