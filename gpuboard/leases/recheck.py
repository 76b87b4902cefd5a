"""The re-check: whether a GPU came into use between its choice and its claim. Pure."""

from __future__ import annotations

from gpuboard.leases.claims.client import Taken
from gpuboard.model.snapshot import GpuView, MigView, Snapshot


def conflict_since(before: Snapshot, after: Snapshot, taken: Taken, occupied: int) -> str:
    """Return why a GPU of ``taken`` came into use between the two snapshots, "" if none did.

    ``occupied``: bytes of used memory above which a GPU counts as in use even without a visible process.
    """
    old, new = _views(before), _views(after)
    for node, uuids in taken.gpus.items():
        for uuid in uuids:
            if (node, uuid) not in new or (node, uuid) not in old:
                return f"{node}: {uuid} is no longer listed"
            gpu, now = new[node, uuid]
            _, was = old[node, uuid]
            name = f"{node}:{gpu.index}"
            if now.state != "reserved":
                return f"{name} became {now.state}: {now.reason}"
            if now.leases != [taken.lease] or "disputed" in gpu.flags:
                return f"{name} is also claimed by others: {now.reason}"
            known = {process.pid for process in was.processes or []}
            for process in now.processes or []:
                if process.pid not in known:
                    return f"{name}: pid {process.pid} of {process.user or 'an unknown user'} started on it"
            if gpu.memory_shared:
                continue  # the host's memory has other uses too
            if now.memory_used is None or now.memory_used > max(occupied, was.memory_used or 0):
                return f"{name}: its memory came into use"
    return ""


def _views(snapshot: Snapshot) -> dict[tuple[str, str], tuple[GpuView, GpuView | MigView]]:
    """Return by node and UUID every GPU, as itself twice, and every MIG device with its parent."""
    found: dict[tuple[str, str], tuple[GpuView, GpuView | MigView]] = {}
    for node in snapshot.nodes:
        for gpu in node.gpus:
            found[node.name, gpu.uuid] = (gpu, gpu)
            found.update({(node.name, mig.uuid): (gpu, mig) for mig in gpu.mig})
    return found
