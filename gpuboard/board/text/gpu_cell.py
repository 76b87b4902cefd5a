"""A GPU's cell in the picture: a letter, or, where there is room, several lines with meters and a curve (pure)."""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.board.arrange import users_of
from gpuboard.board.history import History
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import fit, fit_names, fit_runs
from gpuboard.board.text.format import UNKNOWN, flag_mark, gib, percent, reason_of
from gpuboard.board.text.gpu_row import degrees, letter_of, owner, units, watts
from gpuboard.board.text.lines import wrapped
from gpuboard.board.text.plots import curve, meter, metered, part_of, per_cell
from gpuboard.board.theme.styles import Look, plot_role
from gpuboard.model.snapshot import GpuView

TALLEST = 8  # lines: utilization, user, memory, power and temperature, three of a curve, a blank one
_POWER_FROM, _BLANK_FROM = 6, 5  # lines of a cell from which it has these
_CURVE_FROM, _MEMORY_FROM = 4, 3
_METER_LEAST = 4  # beside a value; a shorter one stands alone
_TOTAL_FROM = 20  # cells from which memory stands beside its total
_VALUE, _DEGREES = 4, 6  # widths of values: 100%, 85°C with a gap

Parts = list[tuple[str, str]]  # texts with their roles


class CellSize(NamedTuple):
    """The size of a GPU's cell: by default a letter and the mark of a flag."""

    width: int = 2
    lines: int = 1
    each: int | None = None  # cells per row: a node with more GPUs takes several rows; None: all in one

    @property
    def wide(self) -> bool:
        """Whether it has meters."""
        return self.lines > 1


class Ink(NamedTuple):
    """What the drawing of a cell depends on besides its GPU."""

    scene: Scene
    history: History
    look: Look
    size: CellSize


def has_readings(gpu: GpuView) -> bool:
    """Return whether there is anything for meters: a GPU that only the scheduler reports has no readings."""
    return gpu.utilization is not None or gpu.memory_used is not None


def first_line(gpu: GpuView, ink: Ink, *, marked: bool) -> Parts:
    """Return the letter with the mark, and the utilization after a gap; a wide cell ends with the gap after it.

    In MIG mode a single letter has the number of its free devices in place of the mark, unless that is needed.
    """
    letter, state = letter_of(gpu)
    mark, role = flag_mark(gpu.flags)
    sign = [(letter, state), (ink.look.glyphs.marked, "warn") if marked and mark == " " else (mark, role)]
    free, total = units(gpu)
    if not ink.size.wide:
        return [sign[0], (str(min(free, 9)), state)] if gpu.mig and sign[1][0] == " " else sign
    sign.append((" ", ""))
    room = ink.size.width - 4
    if gpu.mig:
        words = f"{free}/{total} free"
        return [*sign, (fit(words if len(words) <= room else f"{free}/{total}", room), state), (" ", "")]
    if not has_readings(gpu):
        return [*sign, (" " * room, ""), (" ", "")]
    used = _meter(part_of(gpu.utilization, 100), percent(gpu.utilization), room, plot_role(state), ink.look)
    return [*sign, *used, (" ", "")]


def line_words(size: CellSize) -> str:
    """Return what the lines of a cell show; "" for one of two lines, a meter and a name."""
    if size.lines < _MEMORY_FROM:
        return ""
    power, curve = ["power"] * (size.lines >= _POWER_FROM), ["5 min"] * (size.lines >= _CURVE_FROM)
    return "cell: " + ", ".join(["utilization", "user", "memory", *power, *curve])


def further_lines(gpu: GpuView, ink: Ink) -> list[Parts]:
    """Return the other lines of a wide cell, each with the gap after it as the last part."""
    size, look, room = ink.size, ink.look, ink.size.width - 1
    _, state = letter_of(gpu)
    users, role = owner(gpu, ink.scene)
    readable = has_readings(gpu)
    names = dict.fromkeys(user for device in gpu.mig for user in users_of(device, ink.scene))
    names = names or ({} if users == UNKNOWN and not readable else dict.fromkeys(users.split(", ")))
    lines = [fit_runs([(fit_names(list(names), room).rstrip(), role)], room, "")]
    if not readable and gpu.state in {"broken", "unknown"}:
        lines = lines if names else []
        most = max(1, size.lines - 1 - len(lines))
        lines += [fit_runs([(text, state)], room, "") for text in wrapped(reason_of(gpu), room, most=most)]
    if readable:
        power = [_power(gpu, room, look)] if size.lines >= _POWER_FROM else []
        lines += [_memory(gpu, room, plot_role(state), look), *power]
    height = size.lines - 4 - (size.lines >= _BLANK_FROM) - (size.lines >= _POWER_FROM) + 1
    if readable and size.lines >= _CURVE_FROM:
        values = ink.history.means((gpu.uuid,), room * per_cell(look.glyphs))
        role = "dim" if gpu.state == "free" else plot_role(state)
        lines += [[(text, role)] for text in curve(values, height, look.glyphs, 0.0, 100.0)]
    lines = lines[: size.lines - 1]
    return [
        *([*line, (" ", "")] for line in lines),
        *([(" " * size.width, "")] for _ in range(size.lines - 1 - len(lines))),
    ]


def _memory(gpu: GpuView, room: int, state: str, look: Look) -> Parts:
    part = part_of(gpu.memory_used, gpu.memory_total)
    words = f"{gib(gpu.memory_used)}/{gib(gpu.memory_total)}G" if room >= _TOTAL_FROM else f"{gib(gpu.memory_used)}G"
    return _meter(part, words, room, state, look)


def _power(gpu: GpuView, room: int, look: Look) -> Parts:
    """Return power with a meter to its limit, and the temperature."""
    words, warm = str(watts(gpu).text), degrees(gpu)
    part, left = part_of(gpu.power, gpu.power_limit), room - _DEGREES
    drawn: Parts = [(fit(words if len(words) <= left else "", left), "dim")]
    if part is not None and left - len(words) > _METER_LEAST:
        drawn = list(metered(part, f"{words:>{_VALUE}}", left, "dim", look.glyphs))
    return [*drawn, (f"{warm.text:>{_DEGREES}}", str(warm.style) or "dim")]


def _meter(part: float | None, words: str, room: int, role: str, look: Look) -> Parts:
    """Return a meter with its value where both fit into ``room``, else the meter alone."""
    if part is None:
        return [(UNKNOWN.rjust(room), "unknown")]
    words = f"{words:>{_VALUE}}"
    if room - len(words) - 1 >= _METER_LEAST:
        return list(metered(part, words, room, role, look.glyphs))
    full, rest = meter(part, room, look.glyphs)
    return [(full, role), (rest, "dim")]
