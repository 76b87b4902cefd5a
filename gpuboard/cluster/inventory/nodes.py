"""The inventory: settings → nodes; which of them is this machine; the scope of a command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpuboard.agent.proc import ipv4_addresses, user_name
from gpuboard.errors import UsageError
from gpuboard.model.text import quoted

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.sources import SourceEntry
    from gpuboard.config import Settings
    from gpuboard.model.schedule import Seen
    from gpuboard.model.snapshot import Snapshot

# A host name (RFC 1123) plus underscores, which ssh aliases have; nothing that a shell or ssh's options would read.
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_SOURCE = re.compile(r"(hostfile|ssh_config|slurm):.*", re.DOTALL)
_NAMES_MAX = 16_384  # in all nodesets and sources of a command together, as in one nodeset
_LOCAL = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


class Node(msgspec.Struct, frozen=True):
    """A node and how to reach it. ``host``: ssh's argument; None: this machine, without ssh."""

    name: str
    host: str | None
    simulate: dict[str, Any] | None = None  # the description of simulated GPUs (agent/simulate/gpus.py)
    claims_dir: str | None = None  # the folder of this node's claims; None: as in the settings
    job: str | None = None  # this user's Slurm job through which it is reached (srun) instead of ssh

    @property
    def address(self) -> str:
        """The name for other nodes: ``host`` without the user (``alice@gpu01``); for this machine its name."""
        return (self.host or self.name).rpartition("@")[2]


def inventory(
    settings: Settings, selected: Sequence[str] = (), schedule: Callable[[], Seen] | None = None
) -> list[Node]:
    """Return the nodes of a command: those of the settings, or the subset ``selected`` (``--nodes``).

    Without configured nodes ``selected`` may name any nodes; with neither they are Slurm's nodes with GPUs where there
    is a Slurm (``schedule`` queries it, only for this and for `slurm:`), else this machine under its short hostname.
    Raises UsageError for a nodeset or source that cannot be read, an invalid name, and a name that is not in the
    inventory; GpuboardError where the nodes are Slurm's and Slurm does not answer.
    """

    def find(source: str) -> list[SourceEntry]:
        from gpuboard.cluster.inventory.sources import look_up  # most inventories are nodesets

        return look_up(source, settings.ssh_config, schedule)

    configured = _expand(settings.nodes, find)
    names = _expand(selected, find)
    if configured and (unknown := [name for name in names if name not in configured]):
        shown = ", ".join(configured) if len(configured) <= 20 else folded(list(configured))
        raise UsageError(f"no node {unknown[0]!r} among the configured nodes: {shown}")
    names = {name: user or configured.get(name, "") for name, user in names.items()} or configured
    if not names and schedule is not None:
        names = _slurms(schedule())
    if not names:
        return [Node(name=os.uname().nodename.partition(".")[0], host=None)]
    return [Node(name=name, host=_host(name, user)) for name, user in names.items()]


def _slurms(seen: Seen) -> dict[str, str]:
    """Return Slurm's nodes with GPUs; none if this machine is used instead. Raises GpuboardError without an answer."""
    from gpuboard.cluster.inventory.sources import answered, slurm_nodes  # only where there is a Slurm

    if seen.schedule is None and own_uuids():
        return {}
    names = slurm_nodes(answered(seen))
    for name in names:
        _check_name(name, "in Slurm")
    return dict.fromkeys(names, "")


def expand_names(nodesets: Iterable[str]) -> list[str]:
    """Return the names in ``nodesets`` in order, each once. Raises UsageError."""
    return list(_expand(nodesets, None))


def named(nodeset: str, known: Iterable[Node]) -> list[Node]:
    """Return the nodes of ``nodeset``: those of ``known``, and other hosts (a login node) by ssh. Raises UsageError."""
    nodes = {node.name: node for node in known}
    return [nodes.get(name) or Node(name, _host(name, "")) for name in expand_names([nodeset])]


def _expand(texts: Iterable[str], find: Callable[[str], list[SourceEntry]] | None) -> dict[str, str]:
    """Return name → user ("": ssh's default) of nodesets and, where ``find`` looks them up, of sources."""
    names: dict[str, str] = {}
    for text in texts:
        if _PLAIN.fullmatch(text):
            _check_name(text)  # a single name needs no ClusterShell (30 ms)
            names.setdefault(text, "")
        elif _SOURCE.fullmatch(text):
            if find is None:
                raise UsageError(f"{quoted(text)} is not allowed here; write a nodeset: gpu01, gpu[01-16], @group")
            for name, user, where in find(text):
                _check_name(name, where)
                names[name] = names.get(name) or user
        else:
            if found := re.search(r"[\s,!&^](hostfile|ssh_config|slurm):", text):
                alone = f"{found[1]}: must be an entry of its own in nodes, or a --nodes of its own"
                raise UsageError(f"{quoted(text)}: {alone}")
            if not text.strip():
                raise UsageError("an empty nodeset names no node; write gpu01 or gpu[01-16]")
            from gpuboard.nodesets import expand

            for name in expand(text):
                _check_name(name)
                names.setdefault(name, "")
        if len(names) > _NAMES_MAX:
            raise UsageError(f"too many nodes are named; at most {_NAMES_MAX} are possible")
    return names


def _check_name(name: str, where: str = "") -> None:
    if not _NAME.fullmatch(name) or any(not 0 < len(label) <= 63 for label in name.split(".")):
        at = f"{where}: " if where else ""
        raise UsageError(f"{at}{quoted(name)} cannot be a node's name: letters, digits, '.', '-' and '_' only")


def check_node(node: Node, where: str) -> None:
    """Raise UsageError for an invalid node."""
    _check_name(node.name, where)
    if node.host is not None:
        user, at, host = node.host.rpartition("@")
        _check_name(host, where)
        if at:
            _check_name(user, where)
    if node.claims_dir is not None and not (node.claims_dir.startswith("/") and node.claims_dir.isprintable()):
        raise UsageError(
            f"{where}: {quoted(node.claims_dir)} cannot be a folder of claims: it must be an absolute path"
        )


def _host(name: str, user: str) -> str | None:
    """Return ssh's argument; None for this machine, unless another user logs in there."""
    if is_here(name) and (not user or user == user_name(os.getuid())):
        return None
    return f"{user}@{name}" if user else name


def folded(names: Sequence[str]) -> str:
    """Return the nodeset of ``names``."""
    if len(names) == 1:
        return names[0]
    from gpuboard.nodesets import fold  # 30 ms: only for several nodes

    return fold(names)


def is_here(name: str) -> bool:
    """Return whether ``name`` is this machine: its hostname, short or full, or one of its addresses."""
    hostname = os.uname().nodename
    if name in _LOCAL or name in {hostname, hostname.partition(".")[0]}:
        return True
    if re.fullmatch(r"[0-9.]+", name):
        return name.startswith("127.") or name in ipv4_addresses()
    if "." in name and name.partition(".")[0] == hostname.partition(".")[0]:
        import socket  # 6 ms and perhaps a DNS query: only if the short names are equal

        return socket.getfqdn() == name
    return False


def local_node(nodes: Sequence[Node]) -> Node | None:
    """Return the node that is this machine by name or address; None when none is."""
    return next((node for node in nodes if node.host is None and node.simulate is None), None)


def node_by_uuids(snapshot: Snapshot, uuids: Iterable[str]) -> str | None:
    """Return the node that has any of these GPUs; with :func:`own_uuids` it is this machine."""
    wanted = set(uuids)
    return next((node.name for node in snapshot.nodes if any(gpu.uuid in wanted for gpu in node.gpus)), None)


def own_uuids(root: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the UUIDs of this machine's GPUs as the driver's files list them, without NVML; empty without a driver."""
    found = []
    try:
        folders = sorted(os.listdir(root))
    except OSError:
        return []
    for folder in folders:
        try:
            with open(f"{root}/{folder}/information", encoding="ascii", errors="replace") as file:
                found += re.findall(r"^GPU UUID:\s*((?:GPU-)?[0-9a-f-]{36})\s*$", file.read(), re.MULTILINE)
        except OSError:
            continue  # the file of a GPU that falls off the bus disappears
    return found
