"""The events of a supervisor, typed (docs/launch-protocol.md): what a node sends is untrusted input."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuboard.model.gpu import Count, Number
from gpuboard.model.replies import parse


class Spawned(msgspec.Struct, frozen=True):
    """A rank's process exists."""

    rank: Count
    pid: Count


class Gate(msgspec.Struct, frozen=True):
    """A rank has imported torch and waits for go (or passes at once when go has come)."""

    rank: Count
    import_s: Number | None = None


class Joined(msgspec.Struct, frozen=True):
    """A rank has reached the store: from now on others depend on it, and it on them."""

    rank: Count


class Store(msgspec.Struct, frozen=True):
    """The store is ``ready`` or has ``died``."""

    state: str
    port: Count | None = None
    code: Count | None = None


class Output(msgspec.Struct, frozen=True):
    """A piece of a rank's output; ``stream`` is ``out`` or ``err``."""

    rank: Count
    stream: str
    text: str


class Raised(msgspec.Struct, frozen=True):
    """An exception that will end the rank. ``phase``: import, init or train."""

    rank: Count
    type: str
    message: str = ""
    file: str | None = None
    line: Count | None = None
    function: str | None = None
    traceback: str = ""
    phase: str = "train"


class Exited(msgspec.Struct, frozen=True):
    """A rank's process has ended, with a code or by a signal. ``joined``: it had reached the store."""

    rank: Count
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, msgspec.Meta(ge=1, le=127)] | None = None
    oom: str | None = None
    ran_s: Number | None = None
    joined: bool = False


class NodeEnded(msgspec.Struct, frozen=True):
    """No process of the run is left on the node; the supervisor ends next."""

    left: Count = 0


class Stopping(msgspec.Struct, frozen=True):
    """The supervisor ends its node's ranks, of its own accord."""

    reason: str


class RunNotice(msgspec.Struct, frozen=True):
    """Something a person should know."""

    text: str


LaunchEvent = Spawned | Gate | Joined | Store | Output | Raised | Exited | NodeEnded | Stopping | RunNotice
_TYPES: dict[str, type[LaunchEvent]] = {
    "spawned": Spawned,
    "gate": Gate,
    "joined": Joined,
    "store": Store,
    "output": Output,
    "raised": Raised,
    "exited": Exited,
    "ended": NodeEnded,
    "stopping": Stopping,
    "notice": RunNotice,
    "stderr": RunNotice,  # what the agent's own interpreter said (docs/agent-protocol.md)
}


def decode(kind: str, data: bytes | msgspec.Raw) -> LaunchEvent | None:
    """Return the event; None for a kind that this version does not know. Raises Malformed."""
    known = _TYPES.get(kind)
    return None if known is None else parse(data, known)
