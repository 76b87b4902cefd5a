"""One field of nvidia-smi's output → a value, or None; pure. No text raises an error or makes a GPU look healthier.

A field holds a number with or without a unit, ``N/A``, ``[N/A]``, ``[Not Supported]``, ``ERR!``, ``[GPU is lost]``,
``[Unknown Error]`` or ``Requested functionality has been deprecated``. Some locales write other separators in numbers.
"""

import re

from gpuboard.agent.nvml import terms

MYPY = False
if MYPY:
    from typing import Dict, List, Optional, Tuple

    Processes = List[Tuple[int, str, Optional[int]]]

DIGITS = 15  # longer numbers are not measurements, and JSON readers stop at 19
_MARKS = "'\u2019\u00a0\u202f "  # thousands separators other than . and ,
_NUMBER = re.compile(r"\s*(?P<number>[0-9](?:[0-9.,%s]*[0-9])?)\s*(?P<unit>[A-Za-z%%/]*)\s*" % _MARKS)
_GROUPED = re.compile(r"[0-9]{1,3}(?P<mark>[.,%s])[0-9]{3}(?:(?P=mark)[0-9]{3})*" % _MARKS)
_UNITS = {
    "": 2**20,
    "mib": 2**20,
    "mb": 2**20,
    "b": 1,
    "bytes": 1,
    "kib": 2**10,
    "kb": 2**10,
    "gib": 2**30,
    "gb": 2**30,
}
_WITHHELD = re.compile(
    r"n/?a|not (supported|available|applicable|found)|insufficient permissions?|none|no data|"
    r"(requested functionality has been )?deprecated|unsupported|",
    re.IGNORECASE,
)
_LOST = re.compile(r"\b(gpu is lost|fallen off the bus)\b", re.IGNORECASE)
_MODES = {"default": 0, "exclusive_thread": 1, "prohibited": 2, "exclusive_process": 3}
_RECOVERIES = {
    "none": 0,
    "reset": 1,
    "gpu reset": 1,
    "reboot": 2,
    "node reboot": 2,
    "drain p2p": 3,
    "drain and reset": 4,
    "recover imex": 5,
    "bus reset": 6,
    "system reboot": 7,
}


def plain(text: "Optional[str]") -> str:
    """Return a field without surrounding blanks and without the brackets of ``[N/A]``."""
    text = " ".join((text or "").split())
    return text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text


def withheld(text: "Optional[str]") -> bool:
    """Return whether a field is "not available" in any form, as opposed to a failure to read it."""
    return _WITHHELD.fullmatch(plain(text)) is not None


def lost(text: str) -> bool:
    """Return whether a field or message reports a lost GPU."""
    return _LOST.search(text) is not None


def whole(text: "Optional[str]") -> "Optional[int]":
    """Return an integer, its unit dropped: ``12``, ``16x``, ``37 C``, ``1.024 MiB`` (1024)."""
    return _split(text)[0]


def size(text: "Optional[str]") -> "Optional[int]":
    """Return ``81559 MiB`` or, with nounits, ``81559`` in bytes."""
    number, unit = _split(text)
    factor = _UNITS.get(unit.lower())
    return None if number is None or factor is None else number * factor


def decimal(text: "Optional[str]") -> "Optional[float]":
    """Return a number that may have decimals: ``70.10 W``, ``70,10``, ``1.000,50``, ``1,000.50``."""
    found = _NUMBER.fullmatch(plain(text))
    if found is None:
        return None
    number = found.group("number")
    marks = [mark for mark in number if not mark.isdigit()]
    if marks:
        last = marks[-1]
        if marks.count(last) > 1 or last in _MARKS:  # thousands separators only
            number = "".join(digit for digit in number if digit.isdigit())
        else:
            before, _, after = number.rpartition(last)
            number = "".join(digit for digit in before if digit.isdigit()) + "." + after
    return float(number) if len(number) <= DIGITS else None


def yes(text: "Optional[str]") -> "Optional[bool]":
    """Return the value of a field with Yes or No, Active or Not Active, Enabled or Disabled; None for other text."""
    word = plain(text).lower()
    if word in ("yes", "active", "enabled"):
        return True
    return False if word in ("no", "not active", "disabled") else None


def unless_no(text: "Optional[str]") -> "Optional[bool]":
    """Return the value of a field where every text but No and "not available" (None) means Yes."""
    return None if withheld(text) else yes(text) is not False


def compute_mode(text: "Optional[str]") -> "Optional[int]":
    """Return NVML's number of a compute mode."""
    return _MODES.get(plain(text).lower().replace(" ", "_"))


def performance(text: "Optional[str]") -> "Optional[str]":
    """Return a performance state, ``P0`` to ``P15``."""
    return plain(text) if re.fullmatch(r"P[0-9]{1,2}", plain(text)) else None


def bitmask(text: "Optional[str]") -> "Optional[int]":
    """Return ``0x0000000000000044`` as a number."""
    found = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", plain(text))
    return int(found.group(1), 16) if found else None


def recovery(text: "Optional[str]") -> "Optional[str]":
    """Return the name of a recovery action; an unknown one as reported."""
    word = plain(text).lower()
    if word in _RECOVERIES:
        return terms.recovery(_RECOVERIES[word])
    return None if withheld(text) else word[:64]


def pci_address(text: "Optional[str]") -> str:
    """Return a PCI address as NVML writes it, ``00000000:1B:00.0``; "" for any other text."""
    found = re.fullmatch(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-9a-fA-F])", plain(text))
    if found is None:
        return ""
    return "%08X:%02X:%02X.%s" % (
        int(found.group(1) or "0", 16),
        int(found.group(2), 16),
        int(found.group(3), 16),
        found.group(4).upper(),
    )


def uuid(text: "Optional[str]") -> str:
    """Return a GPU's UUID, "" for any other text. A Jetson's has no prefix ``GPU-``."""
    word = plain(text)
    return word if re.fullmatch(r"(?:GPU-)?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", word) else ""


def processes(entries: "List[Tuple[str, str, str]]") -> "Optional[Processes]":
    """Parse ``(pid, type, memory)`` texts into the form of NVML's pass; None where one cannot be parsed.

    Types are ``C``, ``G``, ``C+G``, and ``M+C`` for clients of MPS. A pid listed twice is one process.
    """
    found: "Dict[int, Tuple[int, str, Optional[int]]]" = {}
    for pid_text, kind_text, memory_text in entries:
        pid = whole(pid_text)
        if pid is None or not 0 < pid < 2**31:
            return None
        kind = "graphics" if plain(kind_text).upper() == "G" else "compute"
        memory = size(memory_text)
        if pid in found:
            memory = max(memory or 0, found[pid][2] or 0) or None
            kind = found[pid][1] if kind == "graphics" else kind
        found[pid] = (pid, kind, memory)
    return list(found.values())


def _split(text: "Optional[str]") -> "Tuple[Optional[int], str]":
    """Return (integer, unit); None for other text and for fractions, so that 12.34 never becomes 12."""
    found = _NUMBER.fullmatch(plain(text))
    if found is None:
        return None, ""
    number = found.group("number")
    if _GROUPED.fullmatch(number):
        number = "".join(digit for digit in number if digit.isdigit())
    else:
        number = re.sub(r"[.,]0{1,2}$", "", number)
    return (int(number) if number.isdigit() and len(number) <= DIGITS else None), found.group("unit")
