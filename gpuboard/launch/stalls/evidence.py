"""What an inspection finds about ranks (docs/launch-protocol.md, call ``inspect``), and how a stack is read (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from gpuboard.agent.launch.rank.traceback_text import is_library, remoteness
from gpuboard.model.gpu import Count, Number
from gpuboard.model.text import clean

# Functions of torch.distributed that wait for other ranks before there is a collective
_INIT = frozenset({"init_process_group", "rendezvous", "_create_c10d_store", "_store_based_barrier", "new_group"})
_DATA = re.compile(r"torch/utils/data/dataloader\.py$")
_WORKER_LOOP = re.compile(r"torch/utils/data/_utils/worker\.py$")
_DISTRIBUTED = re.compile(r"torch/distributed/(?!elastic/)|torch/nn/parallel/distributed\.py$")
_BACKWARD = "_engine_run_backward"
_EXCHANGES = re.compile(r"torch/distributed/(?!elastic/|checkpoint/)")  # a checkpoint is written to a disk
_STORE = re.compile(r"\bTCPStore\(")
_CONNECT = re.compile(r"\.connect\(|\bcreate_connection\(")
_TRANSFERS = frozenset({"recv", "send"})
# Of Work, torch's handle of an operation, which is native code: other objects with such a method are Python code
_WAIT = re.compile(r"(?<!\bos)\.wait\(")


class StackFrame(msgspec.Struct, frozen=True):
    """One frame of a Python stack."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """``train.py:41 in load_batch``; without the function at the level of the module."""
        where = f"{clean(self.file.rpartition('/')[2], 80)}:{self.line}"
        return where if self.function in {"<module>", ""} else f"{where} in {clean(self.function, 80)}"


class Collective(msgspec.Struct, frozen=True):
    """One collective in the flight recorder. ``sizes`` are the shapes of its first input tensors."""

    seq: int
    op: str
    sizes: list[list[int]] = []
    dtypes: list[str] = []

    def words(self) -> str:
        """``all_reduce of float 4x5``."""
        shapes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.sizes)
        dtypes = "/".join(dict.fromkeys(dtype.lower() for dtype in self.dtypes))
        what = " ".join(part for part in (dtypes, shapes) if part)
        return f"{clean(self.op, 60)} of {clean(what, 120)}" if what else clean(self.op, 60)


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group as one rank sees it: sequence numbers of its newest and its last completed collective."""

    name: str
    enqueued: int
    completed: int
    recent: list[Collective] = []  # the newest last

    def at(self, seq: int) -> Collective | None:
        """Return the collective with this sequence number, if it is recent."""
        return next((entry for entry in self.recent if entry.seq == seq), None)


class ChildProcess(msgspec.Struct, frozen=True):
    """A process below a rank, for example a DataLoader worker. ``source``, ``gil`` as in :class:`RankEvidence`."""

    pid: Count
    name: str = ""
    state: str = ""
    stack: list[StackFrame] = []
    source: str = ""
    gil: bool | None = None


class Thread(msgspec.Struct, frozen=True):
    """A thread of a rank besides its main thread, in which the user's own code runs."""

    name: str
    stack: list[StackFrame]


class FileLock(msgspec.Struct, frozen=True):
    """A lock of a process on a file, "" if its path is unknown. ``pid`` 0: unknown; ``name`` "": it has ended.

    ``waits``: the rank waits for it in the kernel; else it has the file open, too.
    """

    file: str
    pid: Count
    name: str = ""
    waits: bool = True


class RankEvidence(msgspec.Struct, frozen=True):
    """One rank: its process, the stack of its main thread (innermost frame first) and its process groups.

    ``state`` is the letter of proc(5), None after its end. ``cpu`` is its share of one core over the last second,
    ``moved_bytes`` its input and output in that time. ``collectives`` None: no flight recorder could be read.
    ``peer`` is the rank that it receives from or sends to, or the root of its broadcast in the process group;
    ``joins_as`` the rank and the world size that it passes to init_process_group;
    ``source`` the line of the user's own code at which it waits, "" if that has called other Python code;
    ``lock`` a file lock that may keep it; ``threads`` those besides the main one; ``clause`` the one of the user's code
    that may follow an exception: ``finally of train.py:23``.
    """

    rank: Count
    pid: Count
    state: str | None = None
    wchan: str | None = None
    cpu: Number | None = None
    moved_bytes: int = 0
    stack: list[StackFrame] = []
    stack_error: str | None = None
    active: bool | None = None
    gil: bool | None = None
    children: list[ChildProcess] = []
    collectives: list[ProcessGroup] | None = None
    name: str = ""  # of its program
    variables: Count = 0  # checksum of local variables
    script: Count = 0  # of lines and local variables of the user's own code
    peer: Count | None = None
    joins_as: tuple[Count, Count] | None = None
    source: str = ""
    lock: FileLock | None = None
    threads: list[Thread] = []
    clause: str = ""


class StoreProcess(msgspec.Struct, frozen=True):
    """The process that hosts the store of a run. ``state`` is the letter of proc(5)."""

    node: str
    pid: Count
    state: str


class Inspection(msgspec.Struct, frozen=True):
    """The reply of one node. ``load``: tasks per CPU; ``store``: of the first node."""

    ranks: list[RankEvidence]
    load: Number | None = None
    error: str | None = None
    pyspy: bool = False  # whether the node has py-spy
    store: StoreProcess | None = None


def store_of(found: Sequence[Inspection]) -> StoreProcess | None:
    """Return the run's store, None if its node gave no reply."""
    return next((one.store for one in found if one.store is not None), None)


def own_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost one of the frames that are nearest to the user's own code; None for an empty stack."""
    return min(stack, key=lambda frame: remoteness(frame.file), default=None)


def dataset_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """Return the user's own code that a DataLoader worker executes; None if it is idle, or for another process.

    A forked worker has the frames of its parent below those of its loop.
    """
    loop = next((at for at, frame in enumerate(stack) if _WORKER_LOOP.search(frame.file)), 0)
    return _innermost_own(stack[:loop])


def _innermost_own(stack: Sequence[StackFrame]) -> StackFrame | None:
    return next((frame for frame in stack if not is_library(frame.file)), None)


def waits_in_init(stack: Sequence[StackFrame], source: str = "") -> bool:
    """Whether a process is inside init_process_group or new_group, or connects to a store itself."""
    called = any(frame.function in _INIT and "torch/distributed/" in frame.file for frame in stack)
    return called or bool(_STORE.search(source))


def connects_to_store(stack: Sequence[StackFrame], source: str) -> bool:
    """Whether a process is inside the call that connects to a store of TCP, its own included."""
    inside = any(frame.function == "_create_c10d_store" and "torch/distributed/" in frame.file for frame in stack)
    return inside or bool(_STORE.search(source))


def connects(stack: Sequence[StackFrame], source: str) -> bool:
    """Whether a process is inside the call that opens a connection."""
    inside = bool(stack) and stack[0].function == "create_connection" and stack[0].file.endswith("/socket.py")
    return inside or bool(_CONNECT.search(source))


def waiting_children(evidence: RankEvidence) -> tuple[list[ChildProcess], list[ChildProcess]]:
    """Return the Python processes below a rank that wait for others in torch.distributed, and those that do not.

    DataLoader workers are left out, and multiprocessing's own helpers.
    """
    found = [
        child
        for child in evidence.children
        if _innermost_own(child.stack) is not None and not any(_WORKER_LOOP.search(f.file) for f in child.stack)
    ]
    waiting = [child for child in found if waits_in_init(child.stack, child.source) or waits_in_collective(child.stack)]
    return waiting, [child for child in found if child not in waiting]


def waits_in_collective(stack: Sequence[StackFrame]) -> str | None:
    """Return the function of torch.distributed or DDP that the user's code has called, ``backward`` for a backward
    pass; None outside of them."""
    calls = [frame for frame in stack if _DISTRIBUTED.search(frame.file) and frame.function != "wrapper"]
    if calls:
        last = calls[-1]
        return f"DDP {last.function}" if last.file.endswith("nn/parallel/distributed.py") else last.function
    return "backward" if stack and stack[0].function == _BACKWARD else None


def transfers(stack: Sequence[StackFrame]) -> bool:
    """Whether the rank is inside ``send`` or ``recv``, which gloo's flight recorder does not have."""
    return bool(stack) and stack[0].function in _TRANSFERS and bool(_DISTRIBUTED.search(stack[0].file))


def waits_for_work(evidence: RankEvidence) -> bool:
    """Whether an idle rank waits inside torch.distributed, or for a handle of one of its operations."""
    inside = bool(evidence.stack) and bool(_EXCHANGES.search(evidence.stack[0].file))
    return inside or bool(_WAIT.search(evidence.source))


def waits_for_data(stack: Sequence[StackFrame]) -> bool:
    """Whether the rank waits for its DataLoader workers."""
    return any(_DATA.search(frame.file) for frame in stack)
