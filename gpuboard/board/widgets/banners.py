"""What is wrong with the cluster as a whole, in words: shown as a banner above everything (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuboard.model.snapshot import NodeView, Snapshot, scheduler_words

_FIRST_S = 10.0  # so long nodes that were never heard of count as being connected to


def banners(snapshot: Snapshot, *, running_s: float) -> tuple[str, ...]:
    """Return what to say, the worst first; ``running_s``: how long we have been looking."""
    nodes = snapshot.nodes
    found: list[str] = []
    if not nodes:
        return ("no node to look at: name some with --nodes, or as `nodes` in the config",)
    silence = scheduler_words(snapshot.scheduler)
    if silence and all(node.source == "slurm" for node in nodes):
        return (silence,)
    if all(node.state == "unreachable" for node in nodes):
        failed = [node.error for node in nodes if not node.connecting]
        if not failed and running_s < _FIRST_S:
            return ()
        yet = " yet" if len(failed) < len(nodes) else ""
        found.append(f"no node answers{yet}{_reason(nodes, failed)}")
    elif all(node.state != "up" for node in nodes):
        found.append(f"no node answers any more{_reason(nodes, [node.error for node in nodes])}")
    elif not any(node.gpus for node in nodes) and all(node.state == "up" for node in nodes):
        where = "here" if len(nodes) == 1 else "on these nodes"
        found.append(f"no GPU {where}: name other nodes with --nodes, or as `nodes` in the config")
    if silence:
        found.append(silence)
    without = [node for node in nodes if node.claims_error is not None and node.state == "up"]
    if without:
        reason = _reason(without, [node.claims_error for node in without])
        what = "this node" if len(nodes) == 1 else f"{len(without)} of {len(nodes)} nodes"
        found.append(f"{what} cannot hold reservations{reason}; nothing there is called free")
    return tuple(found)


def _reason(nodes: Sequence[NodeView], reasons: Sequence[str | None]) -> str:
    """Return the reason that most nodes give, and how many have others."""
    counts = Counter(reason for reason in reasons if reason)
    if not counts:
        return ""
    first, number = counts.most_common(1)[0]
    of = f" ({number} of {len(nodes)})" if number < len(nodes) else ""
    return f": {first}{of}"
