"""A scripted libnvidia-ml.so.1: builds the C source beside this file and writes its scripts.

    folder = library()                                   # put it on LD_LIBRARY_PATH
    write_script(path, [Gpu(), Gpu(utilization=80)])     # FAKE_NVML=path, else /run/fake-nvml/script
    write_script(path, [Gpu(), Gpu(trouble=("hang *",))])   # at any time: the library re-reads it

The position in the list gives a GPU its index and default UUID and PCI address. GPUs whose device file
(/dev/nvidia<minor>) is denied by a device cgroup are hidden from the processes in it, as by a driver.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

GIB = 2**30
SOURCE = Path(__file__).with_name("fake_nvml.c")

# NVML's return codes for scripts
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = (
    3,
    4,
    10,
    13,
    15,
    16,
    18,
    999,
)


class Mig(msgspec.Struct, frozen=True):
    """A MIG device; its processes are those of its GPU with its uuid."""

    uuid: str
    profile: str = "3g.40gb"
    gi: int = 1
    ci: int = 0
    total: int = 40 * GIB
    used: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of a script. Memory in bytes, power in mW as in NVML; -1 means "not supported"."""

    uuid: str = ""  # default: GPU-<8 digits of the seed>-0000-0000-0000-<index>
    name: str = "NVIDIA H100 80GB HBM3"
    pci: str = ""  # default: 00000000:<10 + index>:00.0
    minor: int | None = None  # the number of its device file; default: its position in the list
    total: int = 80 * GIB
    used: int = 0
    reserved: int = 512 * 2**20
    utilization: int = 0
    temperature: int = 31
    power: int = 70100
    power_limit: int = 700000
    compute_mode: int = 0
    processes: tuple[
        tuple[str, int, int] | tuple[str, int, int, str], ...
    ] = ()  # compute|graphics|mps, pid, bytes, MIG
    samples: tuple[tuple[int, int, float], ...] = ()  # of processes: pid, SM percent, age in seconds at each call
    throttle: int = 0
    pcie: tuple[int, int, int, int] = (5, 16, 5, 16)  # generation, width, maximum of both
    ecc: int = 0
    remap: tuple[int, int] | None = (0, 0)  # pending, failed; None: an older GPU with page retirement
    retired_pending: int = 0
    recovery: int = 0
    numa: int = -1
    cpus: str = ""
    links: tuple[str, ...] = ()  # a peer's index, "switch", "hidden-switch" or "down", one entry per link
    levels: tuple[tuple[int, int], ...] = ()  # (peer's index, NVML topology level 0 to 50)
    mig: tuple[Mig, ...] | None = None  # None: MIG not supported; (): enabled, no devices
    gpm: Mapping[int, float] | None = None  # GPM's metrics by number; None: not supported
    throughput: tuple[int, int] = (0, 0)  # of PCIe in KB/s, sent and received
    link_rates: tuple[int, int, int] = (0, 0, 0)  # of each active link: speed in MB/s, KiB/s sent and received
    xids: tuple[int, ...] = ()  # errors so far; a reader gets those that occur after it has registered for events
    trouble: tuple[str, ...] = ()  # "fault F CODE", "hang F", "slow F MS", "crash F"; F: a function or *


def write_script(
    path: Path,
    gpus: Sequence[Gpu],
    *,
    driver: str = "580.159.04",
    cuda: int = 13000,
    record: int = 24,
    trouble: Sequence[str] = (),
    seed: str = "node",
) -> list[Gpu]:
    """Write a script (atomically, for running readers) and return its GPUs with all defaults filled in.

    ``record=32`` is the size of process records in drivers 535.43 to 535.86; ``trouble`` is for calls without a GPU,
    for "freezer FOLDER": a process whose call hangs enters that control group first, and for "then PATTERN FILE": FILE
    replaces this script as soon as a file of that pattern exists.
    """
    unique = hashlib.sha256(seed.encode()).hexdigest()[:8]
    full = [
        msgspec.structs.replace(
            gpu,
            uuid=gpu.uuid or f"GPU-{unique}-0000-0000-0000-{index:012d}",
            pci=gpu.pci or f"00000000:{16 + index:02X}:00.0",
        )
        for index, gpu in enumerate(gpus)
    ]
    lines = [f"driver {driver}", f"cuda {cuda}", f"record {record}", *trouble]
    for gpu in full:
        lines += _lines(gpu, full)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.chmod(0o644)
    temporary.replace(path)
    return full


def _lines(gpu: Gpu, gpus: Sequence[Gpu]) -> list[str]:
    lines = [
        "gpu",
        f"uuid {gpu.uuid}",
        f"name {gpu.name}",
        f"pci {gpu.pci}",
        f"memory {gpu.total} {gpu.used} {gpu.reserved}",
        f"utilization {gpu.utilization}",
        f"temperature {gpu.temperature}",
        f"power {gpu.power} {gpu.power_limit}",
        f"compute_mode {gpu.compute_mode}",
        f"throttle {gpu.throttle}",
        "pcie {} {} {} {}".format(*gpu.pcie),
        f"ecc {gpu.ecc}",
        f"retired_pending {gpu.retired_pending}",
        f"recovery {gpu.recovery}",
        f"numa {gpu.numa}",
        f"mig_mode {-1 if gpu.mig is None else 1}",
        *("process " + " ".join(str(word) for word in process) for process in gpu.processes),
        *(f"sample {pid} {sm} {age_s * 1e6:.0f}" for pid, sm, age_s in gpu.samples),
        *(f"xid {code}" for code in gpu.xids),
        *([] if gpu.gpm is None else ["gpm", *(f"metric {number} {value}" for number, value in gpu.gpm.items())]),
        "throughput {} {}".format(*gpu.throughput),
        "link_rates {} {} {}".format(*gpu.link_rates),
        *(f"level {peer} {level}" for peer, level in gpu.levels),
        *gpu.trouble,
    ]
    if gpu.minor is not None:
        lines.append(f"minor {gpu.minor}")
    if gpu.cpus:
        lines.append(f"cpus {gpu.cpus}")
    if gpu.remap is not None:
        lines.append(f"remap {gpu.remap[0]} {gpu.remap[1]}")
    for link in gpu.links:
        if link == "switch":
            lines.append("link 00000000:F1:00.0 2")
        elif link == "hidden-switch":  # reported by some systems for a switch
            lines.append("link FFFFFFFF:FF:FF.0 255")
        elif link == "down":
            lines.append("link down 255")
        else:
            lines.append(f"link {gpus[int(link)].pci} 0")
    lines += [f"mig {m.uuid} {m.gi} {m.ci} {m.total} {m.used} {gpu.name} MIG {m.profile}" for m in gpu.mig or ()]
    return lines


def library(*, old: bool = False) -> Path:
    """Return the folder that holds the compiled libnvidia-ml.so.1, readable by every user; built once per source.

    ``old`` omits the functions that old drivers lack. Raises FileNotFoundError when there is no C compiler and
    CalledProcessError when the source does not compile.
    """
    flags = ["-DOLD_DRIVER"] if old else []
    tag = hashlib.sha256(SOURCE.read_bytes() + str(flags).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"fake-nvml-{os.getuid()}-{tag}"
    target = folder / "libnvidia-ml.so.1"
    if not target.exists():
        folder.mkdir(mode=0o755, exist_ok=True)
        built = folder / f"new-{os.getpid()}"
        subprocess.run(
            ["cc", "-O2", "-Wall", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *flags, "-o", built, SOURCE],
            check=True,
        )
        built.replace(target)
    return folder
