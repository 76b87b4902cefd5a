"""What an exit code, a signal and a CUDA out-of-memory error mean."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from gpuboard.model.text import clean

_SENT = "another process sent it, such as Slurm or an administrator's"
_SIGNALS = {
    signal.SIGSEGV: "invalid memory access in native code (a C++ or CUDA extension, or libraries of different builds), "
    "or endless recursion",
    signal.SIGBUS: "memory that it mapped could not be provided: no space in /dev/shm, or a mapped file was truncated",
    signal.SIGABRT: "native code ended the process",
    signal.SIGILL: "an instruction that this CPU lacks: code built for another one",
    signal.SIGFPE: "an arithmetic error in native code, such as an integer division by zero",
    signal.SIGTERM: "another process sent it, such as Slurm, an administrator's or one of the script",
    signal.SIGKILL: f"no out-of-memory kill is recorded; {_SENT}",
    signal.SIGXCPU: "it reached its CPU time limit (ulimit -t)",
}
_CODES = {
    1: "no uncaught exception",
    120: "an error while Python wrote out its last output",
    126: "a shell: the command cannot be executed",
    127: "a shell: the command was not found",
}
_SIZE = r"(\d[\d.]* \w+)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"GPU (\d+) has a total capaci?ty of {_SIZE} of which {_SIZE} is free")
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_text(number: int, *, forwarded: bool, oom: bool | None) -> str:
    """Return how a rank was killed, with the meaning of the signal; ``oom`` None: whether for memory cannot be read."""
    name = signal_name(number)
    if forwarded:
        return f"was killed by {name} (forwarded by `gpuboard launch`)"
    meaning = "out of memory" if oom else {int(n): text for n, text in _SIGNALS.items()}.get(number)
    if number == signal.SIGKILL and oom is None:
        meaning = f"perhaps out of memory, since neither the kernel's log nor the memory cgroup can be read; or {_SENT}"
    return f"was killed by {name}" + (f": {meaning}" if meaning else "")


def code_text(code: int, origin: str = "", *, reports_exceptions: bool = True) -> str:
    """Return how a rank exited, with ``origin`` or the meaning of the code where there is a convention.

    ``reports_exceptions``: an uncaught exception of the rank would be known.
    """
    meaning = origin or (_CODES.get(code) if code != 1 or reports_exceptions else None)
    if not origin and 128 < code <= 128 + signal.NSIG:
        meaning = f"128 + {code - 128}: a process that it waited for was killed by {signal_name(code - 128)}"
    return f"ended with exit code {code}" + (f" ({meaning})" if meaning else "")


def without_advice(message: str) -> str:
    """Return a CUDA error of torch without the general advice that torch adds in further lines; others unchanged."""
    return message.partition("\n")[0] if message.startswith("CUDA error: ") else message


def cuda_memory_text(message: str, local_rank: int, processes: Mapping[int, str]) -> str | None:
    """Return who holds the memory of a GPU, from torch's message; None for another message.

    ``processes``: pid → user and command of the node's GPU processes, as far as they are known.
    """
    if not message.startswith("CUDA out of memory") or not (total := _TOTAL.search(message)):
        return None
    device, size, free = total.groups()
    asked = _ASKED.search(message)
    text = f"CUDA out of memory on cuda:{device}"
    if int(device) != local_rank:  # a frequent cause: every rank uses the first GPU
        text += f" (LOCAL_RANK is {local_rank})"
    text += f": asked for {asked[1]}" if asked else ""
    text += f", {free} of {size} free"
    for pid, used in _OTHER.findall(message):
        who = processes.get(int(pid))
        text += f", process {pid}{f' ({clean(who, 80)})' if who else ''} holds {used}"
    own = _OWN.search(message)
    return text + (f", this rank {own[1]}" if own else "")
