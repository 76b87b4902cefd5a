"""The collectives that a rank has called, from a trace of torch's flight recorder.

This source is executed in the node's training interpreter (Python 3.8 or later), without other modules of gpuboard, and
``EQUAL`` is used by the head too.
"""

import json

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Set

KEPT = 256  # newest collectives that are reported
_DEFAULT_GROUP = "0"  # torch's name of the group that init_process_group makes
# Collectives whose ranks must pass tensors of equal shape and type
EQUAL = frozenset(
    ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "barrier", "reduce_scatter",
     "_reduce_scatter_base", "allreduce_coalesced")
)  # fmt: skip


def collectives(trace: "Dict[str, Any]") -> "List[List[Dict[str, Any]]]":
    """Return the collectives in a trace (format version 2, torch 2.5 and later), oldest first, a list for each group.

    NCCL records each operation of a coalesced one, and at its end an entry for all, which alone has their state.
    """
    groups: "Dict[str, List[Dict[str, Any]]]" = {}
    for entry in trace.get("entries", []):
        if not entry["is_p2p"]:
            found = groups.setdefault(str(entry["process_group"][0]), [])
            if found and found[-1]["pg_id"] != entry["pg_id"]:
                found.clear()  # of a group that was destroyed and made again
            elif found and found[-1]["collective_seq_id"] == entry["collective_seq_id"]:
                found.pop()
            found.append(entry)
    return sorted(groups.values(), key=lambda entries: str(entries[0]["pg_id"]))


def miscounted(trace: "Dict[str, Any]") -> "Set[str]":
    """Return the groups in which ranks may number the same collective differently.

    NCCL counts each batch of sends and receives as a collective, and ranks have different numbers of them.
    """
    return {str(entry["process_group"][0]) for entry in trace.get("entries", []) if entry["is_p2p"]}


def distinct(gloo: "Dict[str, Any]", nccl: "Dict[str, Any]") -> "List[Dict[str, Any]]":
    """Return the traces with another name for those of gloo's groups that use NCCL too: each numbers its own calls."""
    both = set(nccl.get("pg_config", ())) | {entry["process_group"][0] for entry in nccl.get("entries", ())}
    for entry in gloo.get("entries", ()):
        name, about = entry["process_group"]
        entry["process_group"] = [name + " (gloo)" if name in both else name, about]
    return [trace for trace in (gloo, nccl) if trace]


def called(trace: "Dict[str, Any]") -> "Dict[str, Any]":
    """Return the newest collectives of the default group: ``called``, a list of [number, index into ``calls``], and
    ``calls``, the different calls as texts that are equal where ranks agree.
    """
    calls: "List[str]" = []
    found = []
    try:
        default = [one for one in collectives(trace) if str(one[0]["process_group"][0]) == _DEFAULT_GROUP]
        for entry in default[0][-KEPT:] if default and _DEFAULT_GROUP not in miscounted(trace) else []:
            call = _words(entry)
            if call not in calls:
                calls.append(call)
            found.append([int(entry["collective_seq_id"]), calls.index(call)])
    except (KeyError, TypeError, ValueError):
        found = []  # another format of another torch
    return {"called": found, "calls": calls}


def own() -> "Dict[str, Any]":
    """Return ``called`` for this process; {} without torch.distributed or a flight recorder."""
    try:
        from torch._C import _distributed_c10d as c10d

        gloo = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        nccl = json.loads(c10d._dump_nccl_trace_json()) if hasattr(c10d, "_dump_nccl_trace_json") else {}
        return next((found for found in map(called, distinct(gloo, nccl)) if found["called"]), {})
    except Exception:  # diagnostics must not harm a rank that has succeeded
        return {}


def _words(entry: "Dict[str, Any]") -> str:
    op = str(entry["profiling_name"]).rpartition(":")[2]
    if op not in EQUAL and op.strip("_") not in EQUAL:
        return op
    shapes = ", ".join("x".join(map(str, size)) or "scalar" for size in entry["input_sizes"][:4])
    dtypes = "/".join(sorted({str(dtype).lower() for dtype in entry["input_dtypes"][:4]}))
    what = " ".join(part for part in (dtypes, shapes) if part)
    return "%s of %s" % (op, what) if what else op
