"""Chosen GPUs → the rank map: node, address and GPU of each rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpuboard.model.gpu import is_mig
from gpuboard.model.rankmap import Rank, RankMap, RankNode
from gpuboard.model.request import ChosenGpu

LOOPBACK = "127.0.0.1"


def rank_map(
    lease: str | None, gpus: Sequence[ChosenGpu], addresses: Mapping[str, str], job: str | None = None
) -> RankMap:
    """Return the map for ``gpus``, which are in rank order, nodes one after the other.

    ``addresses``: of each node for the other nodes; a single node gets the loopback address. ``job``: the Slurm job
    through which all nodes are reached.
    """
    names = list(dict.fromkeys(gpu.node for gpu in gpus))
    ranks: list[Rank] = []
    nodes: list[RankNode] = []
    for node_rank, name in enumerate(names):
        here = [gpu for gpu in gpus if gpu.node == name]
        devices = [gpu.uuid if is_mig(gpu.uuid) else str(gpu.index) for gpu in here]
        address = LOOPBACK if len(names) == 1 else addresses.get(name, name)
        nodes.append(RankNode(name, address, node_rank, len(here), ",".join(devices)))
        ranks += [
            Rank(len(ranks) + local_rank, name, local_rank, gpu.index, gpu.uuid, gpu.memory_fraction)
            for local_rank, gpu in enumerate(here)
        ]
    return RankMap(1, lease, nodes[0].address, 0, len(ranks), nodes, ranks, job)


def reachable_addresses(own: Mapping[str, Sequence[str]], asked: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each node that the others can most likely reach.

    ``own``: the addresses each node reports; ``asked``: the address the client connects to, used if the node reports it
    or reports none. An address that two nodes have (a container bridge) is excluded: neither reaches the other by it.
    Of the rest, the one with the longest common prefix with the other nodes' addresses wins: the common network.
    """
    counts = Counter(address for addresses in own.values() for address in set(addresses))
    usable = {
        name: [a for a in addresses if counts[a] == 1 and _bits(a) and not a.startswith(("127.", "169.254."))]
        for name, addresses in own.items()
    }
    # A node shares as many bits with an address as that address has prefixes that are prefixes of one of the node's.
    sharing = Counter(prefix for mine in usable.values() for prefix in {p for a in mine for p in _prefixes(a)})
    found: dict[str, str] = {}
    for name in own:
        mine = usable[name]
        if asked.get(name) in mine or not mine:
            found[name] = asked.get(name, name)
            continue
        shared = {a: sum(sharing[prefix] for prefix in _prefixes(a)) for a in mine}
        found[name] = max(mine, key=lambda a: (shared[a], -mine.index(a)))
    return found


def _bits(address: str) -> str:
    """Return an IPv4 address as 32 binary digits, "" for anything else."""
    parts = address.split(".")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and int(part) < 256 for part in parts):
        return ""
    return "".join(f"{int(part):08b}" for part in parts)


def _prefixes(address: str) -> list[str]:
    bits = _bits(address)
    return [bits[:length] for length in range(1, len(bits) + 1)]
