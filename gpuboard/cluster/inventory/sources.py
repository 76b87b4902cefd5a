"""Sources of nodes: `hostfile:PATH`, `ssh_config:PATTERN` and `slurm:PARTITION` in place of a nodeset."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpuboard import files
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.schedule import Schedule, Seen
from gpuboard.model.text import clean, like, shown
from gpuboard.model.units import is_whole

_LINES_MAX = 65_536  # of a hostfile
_DEPTH_MAX = 16  # of Include, as in OpenSSH (READCONF_MAX_DEPTH)
_FILES_MAX = 4096  # in all: files that include each other twice would be read 2^16 times
_COMPARED_MAX = 1_000_000  # comparisons of names with patterns

# Open MPI's orte/util/hostfile/hostfile_lex.l; `ifname`, `binding` and `user` are those of MPICH's Hydra.
_COUNTS = {"slots", "cpu", "count", "boards", "sockets", "sockets_per_board", "cores", "cores_per_socket"} | {
    name for what in ("slots", "cpu", "count") for name in (f"max_{what}", f"{what}_max")
}
_USERS = {"username", "user_name", "user"}
_WORDS = {"cpu_set", "ifname", "binding"}
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class SourceEntry(NamedTuple):
    """A node's name, the user to log in as ("": ssh's default), and the place of the entry for messages."""

    name: str
    user: str = ""
    where: str = ""


def look_up(text: str, ssh_config: str, scheduler: Callable[[], Seen] | None) -> list[SourceEntry]:
    """Return the entries of a source in its order, possibly with duplicates.

    ``scheduler`` queries Slurm, only for `slurm:`; None: there is no Slurm here. Raises UsageError for a file or a line
    that cannot be read and for a source without nodes, GpuboardError if Slurm does not answer.
    """
    kind, _, rest = text.partition(":")
    if kind == "hostfile":
        return _hostfile(rest)
    if kind == "ssh_config":
        return [SourceEntry(name, where=f"in {ssh_config}") for name in _aliases(rest, ssh_config)]
    if scheduler is None:
        raise UsageError(
            f"{text!r}: no Slurm found on this host; check that `sinfo` works and that `scheduler` is not set to none"
        )
    schedule = answered(scheduler())
    known = sorted({name for node in schedule.nodes.values() for name in node.partitions})
    partitions = [name.strip() for name in rest.split(",")] if rest else []
    for name in partitions:
        if name not in known:
            shown = clean(", ".join(known), 400) or "none"
            raise UsageError(f"{text!r}: no partition {name!r} has nodes; Slurm's partitions: {shown}")
    found = slurm_nodes(schedule, partitions)
    if not found:
        raise UsageError(f"{text!r}: Slurm has no such node with GPUs; see `sinfo -o '%P %G %N'`")
    return [SourceEntry(name, where="in Slurm") for name in found]


def answered(seen: Seen) -> Schedule:
    """Return Slurm's newest answer. Raises GpuboardError if there is none."""
    if seen.schedule is None:
        why = seen.error or "it has not answered yet"
        raise GpuboardError(f"could not get the nodes from Slurm: {why}; list nodes with --nodes, or in the config")
    return seen.schedule


def slurm_nodes(schedule: Schedule, partitions: Sequence[str] = ()) -> list[str]:
    """Return the nodes with GPUs, in Slurm's order; with ``partitions`` those in one of them."""
    return [
        node.name
        for node in schedule.nodes.values()
        if (node.gpus or node.shards) and (not partitions or set(partitions) & set(node.partitions))
    ]


def _hostfile(path: str) -> list[SourceEntry]:
    """Return the hosts of a hostfile: Open MPI's, DeepSpeed's, or a machinefile (`host:4`). Raises UsageError."""
    if not path:
        raise UsageError("hostfile: names no file; write hostfile:PATH")
    found = []
    users: dict[str, str] = {}
    for number, line in enumerate(_read(path), 1):
        words = re.sub(r"(?<!\s)\s*+=\s*", "=", re.sub(r"(#|//).*", "", line)).split()
        if not words:
            continue
        where = f"{shown(path)}:{number}"
        entry = _host(words[0], where)
        for word in words[1:]:
            key, equals, value = word.partition("=")
            key = key.replace("-", "_").lower()
            if not equals or key not in _COUNTS | _USERS | _WORDS or (key in _COUNTS and not is_whole(value)):
                raise UsageError(f"{where}: {clean(word, 60)!r} cannot be read; a line is: gpu01 slots=4 max_slots=8")
            if key in _USERS:
                entry = entry._replace(user=value)
        if not _USER.fullmatch(entry.user or "none"):
            raise UsageError(f"{where}: {clean(entry.user, 60)!r} cannot be a user's name")
        if users.setdefault(entry.name, entry.user) != entry.user:
            named = " and ".join(user or "without a user" for user in (users[entry.name], entry.user))
            raise UsageError(f"{where}: {entry.name} is named for different users: {named}")
        found.append(entry)
    if not found:
        raise UsageError(f"{path}: no host in this hostfile; a line is: gpu01 slots=4")
    return found


def _host(word: str, where: str) -> SourceEntry:
    """Return the host that a line of a hostfile begins with: ``host``, ``user@host``, ``host:4``."""
    if word.startswith("+"):
        raise UsageError(f"{where}: {clean(word, 60)!r} is relative to mpirun's list of hosts; write the host's name")
    if word.startswith("^"):
        raise UsageError(f"{where}: {clean(word, 60)!r} excludes a host for mpirun only; remove that host's lines")
    user, at, rest = word.rpartition("@")
    if at and not user:
        raise UsageError(f"{where}: {clean(word, 60)!r} has no user before its @")
    return SourceEntry(re.sub(r"^([^:]+):[0-9]+$", r"\1", rest), user, where)


def _aliases(patterns: str, ssh_config: str) -> list[str]:
    """Return the host aliases that match ``patterns`` (ssh's: ``gpu*,!gpu9?``). Raises UsageError."""
    if not patterns:
        raise UsageError("ssh_config: names no hosts; write ssh_config:gpu* for those of your ssh config")
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    found = _SshConfig(ssh_config).names(wanted)
    if not found:
        raise UsageError(f"ssh_config:{shown(patterns)}: no matching Host alias in {shown(ssh_config)} or its Includes")
    return found


class _SshConfig:
    """The names in the `Host` lines of a file and of its Includes, read within bounds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = 0
        self._bytes = 0
        self._compared = 0

    def names(self, wanted: Sequence[str]) -> list[str]:
        """Return the names that match ``wanted``. Raises UsageError."""
        return [name for name in self._hosts(self._path, (), 0) if self._matches(name, wanted)]

    def _hosts(self, path: str, within: tuple[Sequence[str], ...], depth: int) -> Iterator[str]:
        """Yield the names of one file. ``within``: the patterns of the Host lines around the Include."""
        if depth > _DEPTH_MAX:
            raise UsageError(f"{shown(path)}: Include is nested deeper than {_DEPTH_MAX} files; is there a cycle?")
        lines = _read(path)
        self._files += 1
        self._bytes += sum(map(len, lines))
        if self._files > _FILES_MAX or self._bytes > files.SSH_CONFIG_MAX:
            raise UsageError(
                f"{shown(path)}: with all that is included, {shown(self._path)} has more than {_FILES_MAX} files or "
                f"{files.SSH_CONFIG_MAX >> 20} MiB"
            )
        around = within
        for number, line in enumerate(lines, 1):
            parts = re.fullmatch(r"\s*(host|match|include)(?:\s*=\s*|\s+)(.*)", line, re.IGNORECASE)
            if parts is None:
                continue
            try:
                words = shlex.split(parts[2], comments=True)
            except ValueError:
                raise UsageError(f"{shown(path)}:{number}: a quote is not closed") from None
            if parts[1].lower() == "match":
                around = within  # ssh evaluates its conditions (exec, user, …); a Host below it still names a host
            elif parts[1].lower() == "host":
                around = (*within, words)
                for name in words:
                    if not re.search(r"[*?!]", name) and all(self._matches(name, patterns) for patterns in around):
                        yield name
            else:
                for word in words:
                    # relative paths are below ~/.ssh, also in files elsewhere (ssh_config(5), Include)
                    for file in files.included(word, "~/.ssh"):
                        yield from self._hosts(file, around, depth + 1)

    def _matches(self, name: str, patterns: Sequence[str]) -> bool:
        self._compared += len(patterns)
        if self._compared > _COMPARED_MAX:
            raise UsageError(f"{shown(self._path)}: its names and patterns need more than {_COMPARED_MAX} comparisons")
        return like(name, patterns)


def _read(path: str) -> list[str]:
    try:
        text = files.read(os.path.expanduser(path), files.SSH_CONFIG_MAX).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown(path)}: cannot be read: it is not UTF-8") from None
    if text.count("\n") > _LINES_MAX:
        raise UsageError(f"{shown(path)}: a list of hosts may have at most {_LINES_MAX} lines")
    return text.splitlines()
