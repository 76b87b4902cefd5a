"""The collectives that a rank has called, from a trace of torch's flight recorder.

This source is executed in the node's training interpreter (Python 3.8 or later), without other modules of gpuboard, and
``EQUAL`` is used by the head too.
"""

import json

MYPY = False
if MYPY:
    from typing import Any, Dict, List

KEPT = 256  # newest collectives that are reported
_DEFAULT_GROUP = "0"  # torch's name of the group that init_process_group makes
# Collectives whose ranks must pass tensors of equal shape and type
EQUAL = frozenset(
    ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "barrier", "reduce_scatter",
     "_reduce_scatter_base", "allreduce_coalesced")
)  # fmt: skip


def called(trace: "Dict[str, Any]") -> "Dict[str, Any]":
    """Return the newest collectives of the default group: ``called``, a list of [number, index into ``calls``], and
    ``calls``, the different calls as texts that are equal where ranks agree.
    """
    calls: "List[str]" = []
    found = []
    try:
        own = [e for e in trace["entries"] if not e["is_p2p"] and str(e["process_group"][0]) == _DEFAULT_GROUP]
        for entry in own[-KEPT:]:
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

        # Not NCCL's, which asks its communicators
        return called(json.loads(c10d._dump_fr_trace_json()))  # type: ignore[attr-defined]
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
