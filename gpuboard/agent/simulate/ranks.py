"""Real processes on simulated GPUs: ranks of the user's runs, shown on the GPUs of their lease."""

from gpuboard.agent import proc, processes

MYPY = False
if MYPY:
    from typing import Any, Dict, List

_MEMORY = 11 * 2**30  # bytes shown for a rank


def ranks(ours: "List[Dict[str, Any]]", root: str = "/proc") -> "Dict[str, Dict[str, Any]]":
    """Return, by GPU UUID, the rank that would compute on each GPU of the user's claims ``ours``."""
    by_lease: "Dict[str, List[Dict[str, Any]]]" = {}
    for one in ours:
        by_lease.setdefault(one["lease"], []).append(one)
    found: "Dict[str, Dict[str, Any]]" = {}
    reader = processes.Processes(root)
    for pid in sorted(proc.pids(root)):
        values = _variables(pid, root)
        on_node = by_lease.get(values.get("GPUBOARD_LEASE", ""), [])
        local_rank = values.get("LOCAL_RANK", "")
        if not on_node or not local_rank.isdigit() or int(local_rank) >= len(on_node):
            continue
        if values.get("LOCAL_WORLD_SIZE") != str(len(on_node)) or not _is_here(on_node, values.get("GROUP_RANK", "")):
            continue
        uuid = sorted(on_node, key=lambda one: _index(one["uuid"]))[int(local_rank)]["uuid"]
        if uuid not in found:  # the first one: its children have its variables too
            found[uuid] = reader.describe(pid, "compute", _MEMORY)
    return found


def _is_here(on_node: "List[Dict[str, Any]]", group_rank: str) -> bool:
    """Return whether the ``group_rank``-th node of a run is the one that these claims of its lease lie on."""
    nodes = sorted(on_node[0]["nodes"])
    name = on_node[0]["uuid"]
    for k, node in enumerate(nodes):
        if "-%s-" % node in name and on_node[0]["gpus"] == len(on_node) * len(nodes):
            return str(k) == group_rank
    return True  # nodes with different numbers of GPUs: the local world size distinguishes them


def _index(uuid: str) -> int:
    digits = uuid.rsplit("-", 1)[-1]
    return int(digits) if digits.isdigit() else 0


def _variables(pid: int, root: str) -> "Dict[str, str]":
    environ = proc.read_environ(pid, root) or ()
    if not any(entry.startswith(b"GPUBOARD_LEASE=") for entry in environ):
        return {}
    pairs = [entry.decode("utf-8", "replace").partition("=") for entry in environ]
    return {name: value for name, _, value in pairs}
