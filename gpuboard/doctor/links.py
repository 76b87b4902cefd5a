"""What `gpuboard doctor --nccl` has measured: bandwidths, and the links that are slow (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from gpuboard.launch.events import Measured, Reduction
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.runs.folder import RankView
from gpuboard.model.links import link
from gpuboard.model.snapshot import GpuView, Snapshot
from gpuboard.model.text import clean

SLOW = 0.6  # of the median of the other links of its kind
BETWEEN, WITHIN = "between nodes", "same node"


class MeasuredLink(msgspec.Struct, frozen=True):
    """Two neighbours in the ring of ranks; bandwidths in GB/s (10⁹ bytes), to the second and back.

    ``kind``: NV with the number of NVLinks, a PCIe level as `nvidia-smi topo -m` names it, ``same node`` where that is
    not known, or ``between nodes``.
    """

    ranks: tuple[int, int]
    gpus: tuple[str, str]  # node:index
    nodes: tuple[str, str]
    kind: str
    there: float
    back: float
    usual: float | None = None  # median of the lower bandwidths of the other links of its kind
    slow: bool = False

    @property
    def least(self) -> float:
        """The lower one of both bandwidths, which bounds a ring."""
        return min(self.there, self.back)


class AllReduce(msgspec.Struct, frozen=True):
    """An all-reduce of all ranks; bandwidths in GB/s."""

    bytes: int
    count: int
    took_s: float
    algorithm: float
    bus: float


def all_reduce(found: Reduction, world: int) -> AllReduce:
    """Return the bandwidths of an all-reduce over ``world`` ranks.

    Algorithm bandwidth: size / time. Bus bandwidth: that times 2 (n - 1) / n, which does not depend on the number of
    ranks and can be compared with the bandwidth of the links: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    algorithm = found.bytes / found.took_s / 1e9 if found.took_s > 0 else 0.0
    return AllReduce(found.bytes, found.count, found.took_s, algorithm, algorithm * 2 * (world - 1) / world)


def links(measured: Measured, ranks: Mapping[int, RankView], snapshot: Snapshot | None) -> list[MeasuredLink]:
    """Return the links with their kinds, slow ones marked; ``snapshot`` has the topology of the nodes."""
    gpus = {(node.name, gpu.index): gpu for node in (snapshot.nodes if snapshot else ()) for gpu in node.gpus}
    found = []
    for transfer in sorted(measured.transfers, key=lambda transfer: transfer.ranks):
        first, second = (ranks[rank] for rank in transfer.ranks)
        there, back = (
            transfer.bytes / took_s / 1e9 if took_s > 0 else 0.0 for took_s in (transfer.there_s, transfer.back_s)
        )
        names = tuple(f"{clean(view.node, 60)}:{view.index}" for view in (first, second))
        found.append(
            MeasuredLink(
                transfer.ranks,
                (names[0], names[1]),
                (first.node, second.node),
                _kind(first, second, gpus),
                there,
                back,
            )
        )
    return [_beside(one, found) for one in found]


def _kind(first: RankView, second: RankView, gpus: Mapping[tuple[str, int], GpuView]) -> str:
    if first.node != second.node:
        return BETWEEN
    here, there = gpus.get((first.node, first.index)), gpus.get((second.node, second.index))
    if here is None or there is None:
        return WITHIN
    word = link(here, there)
    return WITHIN if word == "?" else word


def _beside(one: MeasuredLink, found: Sequence[MeasuredLink]) -> MeasuredLink:
    others = [other.least for other in found if other.kind == one.kind and other.ranks != one.ranks]
    usual = median(others) if others else None
    return msgspec.structs.replace(one, usual=usual, slow=usual is not None and one.least < SLOW * usual)


def link_checks(found: Sequence[MeasuredLink], reductions: Sequence[AllReduce]) -> list[Check]:
    """Return one check per link, and one for the all-reduce of the largest tensor."""
    checks = []
    for one in found:
        words = f"{one.gpus[0]} ↔ {one.gpus[1]} ({one.kind}): {gbps(one.there)} there, {gbps(one.back)} back"
        if one.slow and one.usual is not None:
            cause = f"slow: the other links of this kind have {gbps(one.usual)}"
            checks.append(Check("link", None, "warn", words, cause, _remedy(one, found)))
        else:
            checks.append(Check("link", None, "ok", words))
    largest = max(reductions, key=lambda each: each.bytes, default=None)
    if largest is not None:
        checks.append(Check("all-reduce", None, "ok", all_reduce_words(largest)))
    return checks


def all_reduce_words(one: AllReduce) -> str:
    """Return ``256 MiB in 4.1 ms: bus 108 GB/s, algorithm 62 GB/s``."""
    size = f"{one.bytes / 2**20:.0f} MiB" if one.bytes >= 2**20 else f"{one.bytes / 2**10:.0f} KiB"
    digits = 2 if one.took_s < 0.01 else 0
    return f"{size} in {1000 * one.took_s:.{digits}f} ms: bus {gbps(one.bus)}, algorithm {gbps(one.algorithm)}"


def gbps(bandwidth: float) -> str:
    """Return a bandwidth as text.

    >>> gbps(228.4), gbps(11.62), gbps(0.117)
    ('228 GB/s', '11.6 GB/s', '0.12 GB/s')
    """
    digits = 0 if bandwidth >= 100 else 1 if bandwidth >= 1 else 2
    return f"{bandwidth:.{digits}f} GB/s"


def _remedy(one: MeasuredLink, found: Sequence[MeasuredLink]) -> str:
    if one.kind != BETWEEN:
        where = clean(one.nodes[0], 60)
        return f"on {where}: see nvidia-smi topo -m, nvidia-smi nvlink --status, and `gpuboard doctor` for PCIe widths"
    between = [other for other in found if other.kind == BETWEEN]
    for node in one.nodes:
        own = [other for other in between if node in other.nodes]
        if len(own) > 1 and all(other.slow for other in own) and len(own) < len(between):
            return f"all links of {clean(node, 60)} are slow: its network card, cable or switch port (ethtool, ibstat)"
    return "see which interface is used (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME), and its speed (ethtool, ibstat)"
