"""The typed answers of agents to calls (docs/agent-protocol.md, docs/launch-protocol.md); untrusted, so checked.

:func:`decode` is the only way from bytes to these values: wrong types, values out of bounds, invalid UTF-8 and
excessive nesting raise :class:`Malformed`; text is cleaned.
"""

# No postponed annotations: msgspec would compile each of them, at every start.

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from gpuboard.model.decoding import convert, from_json
from gpuboard.model.gpu import Count, Number
from gpuboard.model.reading import Claim
from gpuboard.model.text import clean

T = TypeVar("T")
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]

TEXT_LIMIT = 4096  # characters of one text


class Malformed(Exception):
    """A node's answer has not the expected type; the message's text is cleaned."""


class Done(msgspec.Struct, frozen=True):
    """The answer to a call without a result: ``go``, ``hold``, ``stop``, ``ping``."""


class Read(msgspec.Struct, frozen=True):
    """The answer to ``read``: the sequence number of the reading sent just before."""

    seq: Count


class Ends(msgspec.Struct, frozen=True):
    """The answer to ``take`` and ``renew``: when the lease ends there, and the current time, by the node's clock."""

    until: Number
    now: Number


class ReleasedClaims(msgspec.Struct, frozen=True):
    """The answer to ``release``: the UUIDs of the claims that were removed."""

    released: list[str]


class Touched(msgspec.Struct, frozen=True):
    """The answer to ``touch``: the requested leases by the state of their claims; the UUIDs claimed by those alive.

    ``unread``: leases with a claim that cannot be read, with the reason.
    """

    alive: list[str]
    lapsed: list[str]
    missing: list[str]
    claims: dict[str, list[str]] = {}
    unread: dict[str, str] = {}


class Carrier(msgspec.Struct, frozen=True):
    """A process of this user that has a lease in its environment or runs on its GPUs."""

    pid: Count
    start: Count
    name: str
    why: str


class Carriers(msgspec.Struct, frozen=True):
    """The answer to ``carriers``."""

    processes: list[Carrier]


class Signalled(msgspec.Struct, frozen=True):
    """The answer to ``signal`` of role ``node``."""

    pid: Count


class TaskLimit(msgspec.Struct, frozen=True):
    """The limit of processes and threads that leaves the least room."""

    free: Count
    limit: Count
    source: str  # "ulimit -u", or the file of a cgroup


class LaunchFacts(msgspec.Struct, frozen=True):
    """A supervisor's answer to ``check``. None: not known; a limit of -1 or None is no limit."""

    python: str
    python_version: str | None = None
    torch: str | None = None
    torch_error: str | None = None  # torch is there, but its version cannot be read
    torch_cuda: str | None = None
    nccl: str | None = None
    cwd_exists: bool = True
    target_sha256: str | None = None
    shm_free: Count | None = None  # bytes
    memlock: Count | None = None  # bytes
    nofile: Count | None = None
    tasks: TaskLimit | None = None
    addresses: dict[str, list[str]] = {}  # interface -> addresses
    loopback: bool = True  # whether lo is up
    socket_ifname: dict[str, str] = {}  # GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the ranks, where set
    hostname: str | None = None
    resolves: dict[str, list[str]] = {}  # name -> addresses, by this node


class Listening(msgspec.Struct, frozen=True):
    """A supervisor's answer to ``listen``: the master port, bound."""

    port: Port
    address: str


class Ports(msgspec.Struct, frozen=True):
    """A supervisor's answer to ``probe-listen``."""

    ports: list[Port]


class ProbeResult(msgspec.Struct, frozen=True):
    """One attempt to reach ``node`` at ``address:port``; ``result``: ok, refused, unreachable, dropped, stranger or
    small-only (larger packets are lost)."""

    node: str
    address: str
    port: Port
    result: str
    ms: Number | None = None
    local_address: str | None = None
    interface: str | None = None


class Probed(msgspec.Struct, frozen=True):
    """A supervisor's answer to ``probe-connect``."""

    results: list[ProbeResult]


class RanksStarted(msgspec.Struct, frozen=True):
    """A supervisor's answer to ``spawn``: rank -> pid."""

    pids: dict[str, Count]


class RunState(msgspec.Struct, frozen=True):
    """A run in its folder on a node. ``state``: state.json, compressed (zlib). ``alive``: its head, None: not known.

    ``written``: when that was written, in the node's epoch seconds.
    """

    run: str
    state: bytes | None
    error: str | None = None
    alive: bool | None = None
    written: float = 0.0


class RunStates(msgspec.Struct, frozen=True):
    """An answer to ``list`` of role ``runs``. ``more``: further ones follow after the last id."""

    folder: str
    runs: list[RunState]
    more: bool = False


class OneRun(msgspec.Struct, frozen=True):
    """The answer to ``state`` of role ``runs``; None before its head has written a state."""

    folder: str
    run: RunState | None


class FileSizes(msgspec.Struct, frozen=True):
    """The answer to ``sizes`` of role ``runs``: by file that exists its bytes."""

    sizes: dict[str, Count]


class FilePieces(msgspec.Struct, frozen=True):
    """The answer to ``read`` of role ``runs``: by file the next bytes, compressed (zlib)."""

    pieces: dict[str, bytes]


class ControlReply(msgspec.Struct, frozen=True):
    """The answer to ``control`` of role ``runs``: a line of JSON, compressed (zlib)."""

    reply: bytes


class Detail(msgspec.Struct, frozen=True):
    """The details of a refused call beyond its message."""

    claims: list[Claim] = []  # ``conflict``: the conflicting claims
    holder: str | None = None  # ``port-in-use``: the process that has the port


def decode(data: msgspec.Raw | bytes, kind: type[T], clean_text: Callable[[str], str] | None = None) -> T:
    """Return ``data``, JSON from a node, as a ``kind`` with cleaned text. Raises Malformed.

    ``clean_text``: ``lines`` keeps line ends; default: text is cut and made one line.
    """
    plain = msgspec.to_builtins(parse(data, kind), builtin_types=(bytes,))
    return convert(_inert(plain, clean_text or _one_line), kind)


def parse(data: msgspec.Raw | bytes, kind: type[T]) -> T:
    """Return the same without cleaning its text. Raises Malformed."""
    try:
        return from_json(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: invalid UTF-8
        raise Malformed(clean(str(error), 200)) from None


def _one_line(text: str) -> str:
    return clean(text, TEXT_LIMIT)


def _inert(value: Any, clean_text: Callable[[str], str]) -> Any:
    """Return plain values with every string in them cleaned."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_inert(item, clean_text) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _inert(item, clean_text) for key, item in value.items()}
    return value
