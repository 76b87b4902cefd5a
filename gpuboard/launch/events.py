"""The events of a supervisor (docs/launch-protocol.md), decoded by type: what a node sends is untrusted input."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuboard.model.gpu import Count, Number
from gpuboard.model.replies import parse


class Spawned(msgspec.Struct, frozen=True):
    """A rank's process was started."""

    rank: Count
    pid: Count


class Gate(msgspec.Struct, frozen=True):
    """A rank waits for ``go``, unless that has arrived already. ``import_s``: None if its target imports torch."""

    rank: Count
    import_s: Number | None = None


class Joined(msgspec.Struct, frozen=True):
    """A rank has connected to the store: from now on it and the other ranks depend on each other.

    ``all_ranks`` False: its process group has another number of ranks than the run, so that it may not need them all.
    """

    rank: Count
    all_ranks: bool = True


class Store(msgspec.Struct, frozen=True):
    """The store's ``state`` is ``ready`` or ``died``."""

    state: str
    port: Count | None = None
    code: Count | None = None


class Output(msgspec.Struct, frozen=True):
    """A piece of a rank's output; ``stream`` is ``out`` or ``err``. ``data``: in place of text that is not UTF-8."""

    rank: Count
    stream: str
    text: str = ""
    data: bytes = b""


class FirstRaised(msgspec.Struct, frozen=True):
    """The exception that was about to end a rank when the code that is executed nevertheless raised another one.

    ``chain``: types and messages, also of those below it.
    """

    type: str
    message: str = ""
    file: str | None = None
    line: Count | None = None
    function: str | None = None
    chain: str = ""


class Raised(msgspec.Struct, frozen=True):
    """The exception that will end the rank: the innermost cause; ``note``: what it was raised again as, or where.

    ``phase``: torch, import, init or train. ``own_connection``: a connection was lost, and not one to another rank.
    ``origin``: the rank that failed, of an exception that every rank gets. ``called``, ``calls``: see :class:`Leaving`;
    of a RuntimeError. ``chain``: types and messages of all exceptions, also those that ``from None`` suppresses.
    """

    rank: Count
    type: str
    message: str = ""
    file: str | None = None
    line: Count | None = None
    function: str | None = None
    note: str = ""
    traceback: str = ""
    phase: str = "train"
    own_connection: bool = False
    chain: str = ""
    first: FirstRaised | None = None
    origin: Count | None = None
    called: list[tuple[int, int]] = []
    calls: list[str] = []


class Leaving(msgspec.Struct, frozen=True):
    """The script of a rank has ended, at its end or by sys.exit(); its interpreter is still ending.

    With code 0: its newest collectives, as numbers and indexes into ``calls``. ``place``: of a sys.exit().
    """

    rank: Count
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    called: list[tuple[int, int]] = []
    calls: list[str] = []
    place: str = ""


class Disconnected(msgspec.Struct, frozen=True):
    """A rank runs on without its channel, as after an exec: nothing reports whether it joins, raises or leaves."""

    rank: Count


class Exited(msgspec.Struct, frozen=True):
    """A rank's process has ended, with an exit code or by a signal. ``joined``: it had connected to the store.

    ``oom``: evidence that it was killed for memory, which ``oom_readable`` False could not show; ``evidence``: other
    findings on the node.
    """

    rank: Count
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, msgspec.Meta(ge=1, le=127)] | None = None
    oom: str | None = None
    oom_readable: bool = True
    evidence: str | None = None
    ran_s: Number | None = None
    joined: bool = False


class NodeEnded(msgspec.Struct, frozen=True):
    """No process of the run is left on the node; the supervisor ends next."""

    left: Count = 0


class Stopping(msgspec.Struct, frozen=True):
    """The ranks of a node are stopped, by the supervisor's decision or, at once, because it was ``killed``."""

    reason: str
    killed: bool = False


class Quiet(msgspec.Struct, frozen=True):
    """A rank shows no activity for ``quiet_s``, or is active again (None). ``load``: tasks per CPU of the node."""

    rank: Count
    quiet_s: Number | None = None
    state: str = ""
    load: Number | None = None


class Reduction(msgspec.Struct, frozen=True):
    """An all-reduce of all ranks: size of the tensor and mean duration, that of the slowest rank."""

    bytes: Count
    count: Count
    took_s: Number


class Transfer(msgspec.Struct, frozen=True):
    """Transfers between two ranks: size of the tensor and mean duration in each direction."""

    ranks: tuple[Count, Count]
    bytes: Count
    there_s: Number
    back_s: Number


class Measured(msgspec.Struct, frozen=True):
    """What the target ``gpuboard:links`` has measured."""

    rank: Count
    reductions: list[Reduction]
    transfers: list[Transfer]


class RunNotice(msgspec.Struct, frozen=True):
    """A message for the user."""

    text: str


LaunchEvent = (
    Spawned
    | Gate
    | Joined
    | Store
    | Output
    | Raised
    | Leaving
    | Disconnected
    | Exited
    | NodeEnded
    | Stopping
    | Quiet
    | Measured
    | RunNotice
)
_TYPES: dict[str, type[LaunchEvent]] = {
    "spawned": Spawned,
    "gate": Gate,
    "joined": Joined,
    "store": Store,
    "output": Output,
    "raised": Raised,
    "leaving": Leaving,
    "disconnected": Disconnected,
    "exited": Exited,
    "ended": NodeEnded,
    "stopping": Stopping,
    "quiet": Quiet,
    "measured": Measured,
    "notice": RunNotice,
    "stderr": RunNotice,  # output of the agent's own interpreter (docs/agent-protocol.md)
}


def decode(kind: str, data: bytes | msgspec.Raw) -> LaunchEvent | None:
    """Return the event; None for a kind unknown to this version. Raises Malformed."""
    known = _TYPES.get(kind)
    return None if known is None else parse(data, known)
