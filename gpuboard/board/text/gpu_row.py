"""Rows about single GPUs, for the table and for the view of one node: MIG devices, owners, states (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuboard.board.arrange import Row, key_of, users_of
from gpuboard.board.scene import Place, Scene
from gpuboard.board.text.format import UNKNOWN, flag_mark
from gpuboard.board.text.picture import MIG, letter_of, units
from gpuboard.board.text.rows import Cell, Runs
from gpuboard.model.snapshot import GpuView, MigView

RED_HOT = 85  # °C from which most data-centre GPUs throttle


class Device(NamedTuple):
    """A MIG device with its parent GPU."""

    place: Place
    mig: MigView


Shown = Row | Device


def with_devices(items: Sequence[Row]) -> Sequence[Shown]:
    """Return the rows with those of MIG devices below their GPUs."""
    if not any(isinstance(item, Place) and item.gpu.mig for item in items):
        return items
    found: list[Shown] = []
    for item in items:
        found.append(item)
        if isinstance(item, Place):
            found += (Device(item, device) for device in item.gpu.mig)
    return found


def row_key(item: Shown) -> str:
    """Return the key of a row: the UUID of a GPU or a MIG device, or that of ``key_of``."""
    return item.mig.uuid if isinstance(item, Device) else key_of(item)


def owner_cell(gpu: GpuView, scene: Scene) -> Cell:
    """Return the users of a GPU."""
    if users := users_of(gpu, scene):
        mine = any(scene.is_mine(lease) for lease in scene.leases_on(gpu.uuid))
        return Cell(", ".join(users), "mine" if mine else "")
    if gpu.processes is None or gpu.state == "occupied":
        return Cell(UNKNOWN, "unknown")
    return Cell("hidden", "unknown") if gpu.processes else Cell("-", "dim")


def device_owner(mig: MigView, scene: Scene) -> Cell:
    """Return the owners of a MIG device's leases."""
    owners = ", ".join(dict.fromkeys(lease.owner for lease in scene.leases_on(mig.uuid)))
    return Cell(owners or "-", "" if owners else "dim")


def known(words: str, style: str = "") -> Cell:
    """Return a cell in the style of unknown values if ``words`` has none."""
    return Cell(words, "unknown" if UNKNOWN in words else style)


def state_runs(gpu: GpuView) -> Runs:
    """Return the state's letter, as in the picture, and name; in MIG mode the number of free devices."""
    letter, style = letter_of(gpu)
    word: str = gpu.state
    if letter == MIG:
        free, total = units(gpu)
        word = f"{free}/{total} free" if gpu.mig else "no device"
    mark = flag_mark(gpu.flags)
    return ((letter, style), (mark, "bad"), (f" {word}", style))
