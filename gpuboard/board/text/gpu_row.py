"""Rows about single GPUs, for the table and for the view of one node: MIG devices, owners, states (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from gpuboard.board.arrange import STATE_ORDER, Row, is_user_unknown, key_of, users_of
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.format import UNKNOWN, flag_mark
from gpuboard.board.text.rows import Cell, Runs
from gpuboard.board.theme.styles import LETTERS
from gpuboard.model.request import slot
from gpuboard.model.snapshot import GpuView, MigView, mig_number

MIG = LETTERS["mig"]
INDEX_LEAST = 3  # cells of the column of indexes: ``2:1`` fits
RED_HOT = 85  # °C from which most data-centre GPUs throttle


class Device(NamedTuple):
    """A MIG device with its parent GPU."""

    place: Place
    mig: MigView


Shown = Row | Device


def with_devices(items: Sequence[Row]) -> Sequence[Shown]:
    """Return the rows with those of MIG devices below their GPUs, without the hidden ones; each GPU once."""
    if not any(isinstance(item, Place) and item.gpu.mig for item in items):
        return items
    found: list[Shown] = []
    for item in items:
        if isinstance(item, Place) and item.gpu.mig:
            found += [msgspec.structs.replace(item, gpu=item.part)] * item.leads
            found += (Device(item, device) for device in item.gpu.mig if device.uuid not in item.hidden)
        else:
            found.append(item)
    return found


def row_key(item: Shown) -> str:
    """Return the key of a row: the UUID of a GPU or a MIG device, or that of ``key_of``."""
    return item.mig.uuid if isinstance(item, Device) else key_of(item)


def device_slot(gpu: GpuView, mig: MigView) -> str:
    """Return a MIG device of a GPU as ``status`` prints it: ``2:1``."""
    return slot(gpu.index, mig_number(gpu, mig.uuid))


def index_width(gpus: Iterable[GpuView]) -> int:
    """Return the cells for the indexes of GPUs and their MIG devices: ``10:3`` is wider than usual.

    It does not depend on measured values, so that columns do not jump.
    """
    return max([INDEX_LEAST, *(len(slot(gpu.index, len(gpu.mig) - 1)) for gpu in gpus if gpu.mig)])


def owner(of: GpuView | MigView, scene: Scene) -> tuple[str, str]:
    """Return the users of a GPU or a MIG device, and their role."""
    if users := users_of(of, scene):
        mine = any(lease.mine for lease in scene.leases_on(of.uuid))
        return ", ".join(users), "mine" if mine else ""
    if not is_user_unknown(of):
        return "-", "dim"
    return "hidden" if of.processes and of.state != "occupied" else UNKNOWN, "unknown"


def known(words: str, style: str = "") -> Cell:
    """Return a cell in the style of unknown values if ``words`` has none."""
    return Cell(words, "unknown" if UNKNOWN in words else style)


def degrees(gpu: GpuView) -> Cell:
    hot = gpu.temperature is not None and gpu.temperature >= RED_HOT
    return known(UNKNOWN if gpu.temperature is None else f"{gpu.temperature}°C", "warn" if hot else "")


def watts(gpu: GpuView) -> Cell:
    """Return the power of a GPU."""
    return known(UNKNOWN if gpu.power is None else f"{gpu.power:.0f}W")


def device_state(mig: MigView) -> Cell:
    """Return the letter and the name of a MIG device's state."""
    return Cell(f"{LETTERS.get(mig.state, UNKNOWN)}  {mig.state}", mig.state)


def state_runs(gpu: GpuView) -> Runs:
    """Return the state's letter, as in the picture, and name; in MIG mode the number of free devices."""
    letter, style = letter_of(gpu)
    word: str = gpu.state
    if letter == MIG:
        free, total = units(gpu)
        word = f"{free}/{total} free" if gpu.mig else "no device"
    return ((letter, style), flag_mark(gpu.flags), (f" {word}", style))


def letter_of(gpu: GpuView) -> tuple[str, str]:
    """Return a GPU's letter and the state that gives its colour; in MIG mode those of its best device."""
    if not gpu.mig or gpu.state == "broken":
        return LETTERS.get(gpu.state, UNKNOWN), gpu.state
    states = {device.state for device in gpu.mig}
    return MIG, next((state for state in STATE_ORDER if state in states), "unknown")


def units(gpu: GpuView) -> tuple[int, int]:
    """Return the free and all allocatable units of a GPU: the GPU itself, or its MIG devices."""
    if gpu.mig:
        return sum(device.state == "free" for device in gpu.mig), len(gpu.mig)
    return int(gpu.state == "free"), 1
