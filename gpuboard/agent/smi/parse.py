"""nvidia-smi's output → the facts and values of GPUs that gpuboard/agent/nvml/reader.py's passes have too; pure.

``nvidia-smi -q -x`` says everything at once, the types of processes too (gpuboard/agent/smi/xml.py). Where its XML
cannot be read, the two queries here say less: they know of no graphics processes. Both leave out processes' names: a
name is whatever its owner likes, and nvidia-smi does not escape it. Forms of the output:
``nvidia-smi --help-query-gpu``, and what drivers from 340 to 590 write (tests/data/nvidia-smi).
"""

import re

from gpuboard.agent.nvml import terms
from gpuboard.agent.smi import values as value

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Set, Tuple

LIMIT = 16 * 1024 * 1024  # bytes of output; 8 GPUs of the talkative kind write 1 MB
GPUS_LIMIT = 256

# In this order; the name is last, should it have a comma. A driver that lacks one says so, and it is left out.
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

MIG_UNSEEN = "nvidia-smi does not show its MIG devices one by one"
_NO_HANDLE = re.compile(
    r"Unable to (?:determine|detect) the device handle for GPU\s*"
    r"(?:(?P<index>\d{1,3})(?::\s+|\s*$))?"
    r"(?:(?P<pci>[0-9A-Fa-f]{3,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*:?)?\s*:?\s*(?P<words>.*)"
)
_NOT_A_FIELD = re.compile(r'Field "([^"\n]{1,80})" is not a valid field to query')
_NO_GPUS = re.compile(r"No devices were found", re.IGNORECASE)


class Bad(Exception):
    """Output that cannot be read, or not be believed; its words say why."""


class Gpu:
    """One GPU in one output."""

    def __init__(self, facts: "Dict[str, Any]", values: "Dict[str, Any]") -> None:
        self.facts = facts  # GpuStatic of gpuboard/model/gpu.py; "error" where it could not be identified
        self.values = values  # its GpuReading, but for the UUID
        self.index: "Optional[int]" = facts.get("index")

    @property
    def uuid(self) -> str:
        return str(self.facts.get("uuid", ""))

    @property
    def place(self) -> "Tuple[int, ...]":
        """Where it stands on the bus, which NVML's order follows; () when that is not known."""
        return terms.pci_key(str(self.facts.get("pci_bus_id", "")))


class Listing:
    """What one run of nvidia-smi said: ``facts`` and ``values`` by NVML's index."""

    def __init__(
        self, gpus: "List[Gpu]", attached: "Optional[int]", driver: "Optional[str]", cuda: "Optional[str]"
    ) -> None:
        self.gpus = gpus
        self.count = max(attached or 0, len(gpus))
        self.driver = driver
        self.cuda = cuda

    def number(self, known: "Dict[str, int]") -> "Dict[str, int]":
        """Give every GPU its index and return them by UUID; ``known``: those of an earlier listing.

        The XML has no indexes. They follow the bus, and a GPU that fails keeps its own.
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
    said_uuid: str,
    needed: "Dict[str, Tuple[Any, str]]",
    texts: "List[str]",
) -> Gpu:
    """Return a GPU of what was read of it; ``said_uuid``: what stands where its UUID is due.

    ``needed``: values that a decision needs, and those that only a failing GPU lacks, by name and each with its text;
    one that is None though its text is not "there is no such value" makes the whole GPU fail, as in NVML. ``texts``:
    everywhere that a lost GPU is told of.
    """
    telling = [text for text in texts if value.lost(text) or "requires reset" in text.lower()]
    if not facts["uuid"]:
        words = value.plain((telling + [said_uuid])[0])
        words = words if words and not value.withheld(words) else "nvidia-smi gives it no UUID"
        failed = {"error": words[:200], "lost": any(value.lost(text) for text in telling)}
        return Gpu(dict(failed, index=facts.get("index"), pci_bus_id=facts["pci_bus_id"]), failed)
    if terms.shares_memory(facts["name"]):
        facts["memory_shared"] = True
        for table, name in ((facts, "memory_total"), (facts, "memory_reserved"), (values, "memory_used")):
            table[name] = None  # the host's, whatever is said here
        if values["compute_mode"] is None and value.withheld(needed["compute mode"][1]):
            values["compute_mode"] = 0  # a Jetson has no modes
    error = None
    if telling:
        error = telling[0]
    else:
        for name, (found, text) in needed.items():
            if found is None and not value.withheld(text):
                error = "%s: %s" % (name, value.plain(text))
                break
    if error is None and facts.get("mig") is not None:
        error = MIG_UNSEEN
    if error is not None:
        values["error"] = value.plain(error)[:200]
        values["lost"] = any(value.lost(text) for text in telling)
    kept = {name: item for name, item in values.items() if item is not None and (item or name != "throttle")}
    return Gpu({name: item for name, item in facts.items() if item is not None}, kept)


def without_handle(said: str) -> "List[Gpu]":
    """Return the GPUs that nvidia-smi names in its messages because it cannot get hold of them."""
    found = []
    for line in said.splitlines()[:GPUS_LIMIT]:
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


def with_failed(gpus: "List[Gpu]", said: str) -> "List[Gpu]":
    """Return ``gpus`` and those that ``said`` tells of; one that was listed all the same is not told twice."""
    listed = {gpu.place for gpu in gpus if gpu.place}
    numbered: "Set[Optional[int]]" = {gpu.index for gpu in gpus}
    found = list(gpus)
    for gpu in without_handle(said):
        if gpu.place not in listed and (gpu.index is None or gpu.index not in numbered):
            found.append(gpu)
            listed.add(gpu.place or (-len(found),))
            numbered.add(gpu.index)
    return found


def nothing(said: str) -> "Optional[Listing]":
    """Return the listing where nvidia-smi says that it works and finds no GPU, but for those that it cannot get."""
    return Listing(with_failed([], said), 0, None, None) if _NO_GPUS.search(said) else None


def complaint(said: str) -> str:
    """Return why there is no listing, out of what nvidia-smi said instead."""
    lines = [" ".join(line.split()) for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith("<")]
    return lines[0][:300] if lines else "it said nothing"


def not_a_field(said: str) -> "Optional[str]":
    """Return the field that this driver's nvidia-smi does not know."""
    match = _NOT_A_FIELD.search(said)
    return match.group(1) if match else None


def read_csv(rows: bytes, apps: bytes, fields: "Tuple[str, ...]") -> Listing:
    """Return what ``--query-gpu=<fields>`` and ``--query-compute-apps=<APPS>`` said, both as csv,noheader,nounits.

    Graphics processes are in neither: a GPU without compute processes has a list only where no memory is in use at
    all. A row without an index is a GPU of which nothing is sure. Raises Bad when there is no GPU in it, and when one
    is in it twice.
    """
    said = _text(rows)
    gpus = []
    driver = None
    by_uuid = _apps(_text(apps))
    for line in said.splitlines()[: 4 * GPUS_LIMIT]:
        cells = [cell.strip() for cell in line.split(", ")]
        if len(cells) < len(fields) or cells[0] == fields[0]:
            continue  # a heading, a warning, a message
        cells[len(fields) - 1 :] = [", ".join(cells[len(fields) - 1 :])]
        row = {field: cells[place] for place, field in enumerate(fields)}
        driver = driver or (None if value.withheld(row.get("driver_version")) else row["driver_version"][:32])
        gpus.append(_row(row, by_uuid))
    if len({gpu.uuid for gpu in gpus if gpu.uuid}) != len([gpu for gpu in gpus if gpu.uuid]):
        raise Bad("it lists a GPU twice")
    gpus = with_failed(gpus, said)
    if not gpus:
        empty = nothing(said)
        if empty is None:
            raise Bad(complaint(said))
        return empty
    return Listing(gpus[:GPUS_LIMIT], None, driver, None)


def _row(row: "Dict[str, str]", by_uuid: "Optional[Dict[str, Any]]") -> Gpu:
    uuid = value.uuid(row.get("uuid"))
    used = value.size(row.get("memory.used"))
    processes = None if by_uuid is None else by_uuid.get(uuid, [])
    if processes == [] and used != 0:
        processes = None  # perhaps a graphics process has that memory
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
        gpu.values.setdefault("error", "nvidia-smi gives it no index")
    return gpu


def _apps(said: str) -> "Optional[Dict[str, Any]]":
    """Return processes by UUID; None where a line of it cannot be told from a process that is hidden."""
    entries: "Dict[str, List[Tuple[str, str, str]]]" = {}
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split(", ")]
        uuid = value.uuid(cells[0])
        if len(cells) == len(APPS) and uuid:
            entries.setdefault(uuid, []).append((cells[1], "C", cells[2]))
        elif line.strip() and cells[0] != APPS[0]:
            return None
    return {uuid: value.processes(found) for uuid, found in entries.items()}


def _text(data: bytes) -> str:
    if len(data) > LIMIT:
        raise Bad("it says more than %d MiB" % (LIMIT // 2**20))
    return data.decode("utf-8", "replace")
