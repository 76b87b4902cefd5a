"""Preflight checks (pure): replies of the nodes → results with cause and remedy.

The calls are in docs/launch-protocol.md; ``collect`` makes them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpuboard.cluster.inventory.nodes import folded
from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.launch.preflight.gpus import gpu_checks
from gpuboard.launch.preflight.interfaces import interface_checks
from gpuboard.launch.preflight.limits import MORE_FILES, limit_checks
from gpuboard.launch.preflight.pairs import pairs_text
from gpuboard.model.rankmap import RankMap
from gpuboard.model.replies import LaunchFacts, ProbeResult
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.text import clean

# Without these no rank can run, whatever the user prefers.
REQUIRED = ("start", "master port")
SKIPPABLE = (
    "torch",
    "python",
    "torch version",
    "CUDA of torch",
    "NCCL",
    "driver",
    "script",
    "/dev/shm",
    "open files",
    "processes",
    "locked memory",
    "loopback",
    "master address",
    "connect",
    "interface",
    "GPU",
)


class Failure(msgspec.Struct, frozen=True):
    """A call that a node refused, or a lost connection."""

    kind: str
    message: str
    holder: str = ""  # of port-in-use: the process that listens there


class Answers(msgspec.Struct, frozen=True):
    """All replies, by node name in the order of the node ranks."""

    facts: dict[str, LaunchFacts]
    failures: dict[str, Failure]  # of check, spawn or the connection itself
    listen: Failure | None  # None: the master port is bound
    probes: dict[str, list[ProbeResult]]
    snapshot: Snapshot | None  # None: not needed (--device cpu)


def preflight(
    rank_map: RankMap,
    master_addr: str,
    device: Device,
    answers: Answers,
    *,
    python: bool = True,
    planned: bool = False,
) -> list[Check]:
    """Return all checks, in the order in which problems are best fixed; names: ``REQUIRED`` and ``SKIPPABLE``.

    ``python``: the ranks need Python and torch. ``planned``: the GPUs are not reserved, as a launch would do that.
    """
    checks = [_started(node.name, answers.failures.get(node.name)) for node in rank_map.nodes]
    if python:
        checks += _torch(answers.facts, device)
        checks += _agree_on_torch(answers.facts)
    checks += _agree(answers)
    checks += limit_checks(rank_map, answers.facts, device)
    checks += _loopbacks(answers.facts)
    checks += _master(rank_map, master_addr, answers)
    checks += _connections(rank_map, master_addr, answers)
    first = next(node.name for node in rank_map.nodes if node.node_rank == 0)
    checks += interface_checks(answers.facts, interfaces(master_addr, first, answers), device)
    if device == "cuda":
        checks += gpu_checks(rank_map, answers.snapshot, planned=planned)
    return checks


def failed(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that keep the gate closed."""
    return [check for check in checks if check.status == "fail"]


def skipped(checks: Sequence[Check], names: Collection[str]) -> list[Check]:
    """Return ``checks`` with those of ``names`` marked as skipped, and what they would have reported."""
    return [
        msgspec.structs.replace(
            check,
            status="skipped",
            evidence=check.evidence if check.status == "ok" else f"would {check.status}: {check.evidence}",
        )
        if check.name in names and check.status != "skipped"
        else check
        for check in checks
    ]


def _started(node: str, failure: Failure | None) -> Check:
    if failure is None:
        return Check("start", node, "ok", "supervisor started")
    remedy = {
        "python": "activate the training environment before launch, or pass --python PATH (a path on the nodes)",
        "wrap": "--wrap begins with a program of the nodes, which must pass on arguments, environment and descriptors",
        "cwd": "launch from a folder that every node has (a shared home), or copy it to the node",
        "target": "copy the file to the node, or launch from a folder that every node has",
        "connection": "`gpuboard status` shows the state of the node",
        "open-files": MORE_FILES,
    }.get(failure.kind, "")
    return Check("start", node, "fail", clean(failure.message, 400), "", remedy)


def _torch(facts: Mapping[str, LaunchFacts], device: Device) -> list[Check]:
    checks = []
    for node, seen in facts.items():
        if seen.torch_error is not None:
            words, cause = f"the torch of {clean(seen.python)} is damaged", clean(seen.torch_error, 400)
            checks.append(Check("torch", node, "fail", words, cause, "install torch again into that environment"))
        elif seen.torch is None:
            remedy = "install torch into that environment, or pass --python PATH of one that has torch"
            checks.append(Check("torch", node, "fail", f"{clean(seen.python)} has no torch", "", remedy))
        elif device == "cuda" and seen.torch_cuda is None and "+cpu" in seen.torch:
            remedy = "install a CUDA build of torch there, or launch with --device cpu"
            checks.append(Check("torch", node, "fail", f"torch {clean(seen.torch)}", "a build without CUDA", remedy))
        else:
            checks.append(Check("torch", node, "ok", f"torch {clean(seen.torch)}"))
    return checks


def _agree_on_torch(facts: Mapping[str, LaunchFacts]) -> list[Check]:
    if len(facts) < 2:
        return []
    different = "use the same environment on every node: ranks of different versions hang or compute wrong results"
    return [
        same("python", {n: _minor(f.python_version) for n, f in facts.items()}, "fail", different),
        same("torch version", {n: f.torch for n, f in facts.items()}, "fail", different),
        same("CUDA of torch", {n: f.torch_cuda for n, f in facts.items()}, "fail", different),
        same("NCCL", {n: f.nccl for n, f in facts.items()}, "fail", different),
    ]


def _agree(answers: Answers) -> list[Check]:
    facts = answers.facts
    if len(facts) < 2:
        return []
    drivers: dict[str, str | None] = {}
    if answers.snapshot is not None:
        drivers = {view.name: view.driver for view in answers.snapshot.nodes if view.name in facts}
    return [
        same_driver(drivers),
        same(
            "script",
            {n: f.target_sha256[:12] if f.target_sha256 else None for n, f in facts.items()},
            "fail",
            "copy the newest version to every node: they would run different code",
        ),
    ]


def _minor(version: str | None) -> str | None:
    return ".".join(version.split(".")[:2]) if version else None


def same_driver(drivers: Mapping[str, str | None]) -> Check:
    """Return whether all nodes have one driver; ``drivers`` by node, None: not known there."""
    return same("driver", drivers, "warn", "update the older driver: NCCL may choose different paths on the nodes")


def same(name: str, values: Mapping[str, str | None], status: CheckStatus, remedy: str) -> Check:
    """Return whether all nodes have one value; ``values`` by node, None: not known there."""
    known = {node: value for node, value in values.items() if value is not None}
    counts = Counter(known.values())
    if len(counts) > 1:
        words = "; ".join(f"{clean(v)} on {folded([n for n in known if known[n] == v])}" for v in counts)
        return Check(name, None, status, words, "the nodes differ", remedy)
    if not counts:
        return Check(name, None, "skipped", "not known on any node")
    return Check(name, None, "ok", f"{clean(next(iter(counts)))} on every node")


def _master(rank_map: RankMap, master_addr: str, answers: Answers) -> list[Check]:
    first = next(node.name for node in rank_map.nodes if node.node_rank == 0)
    checks = []
    if answers.listen is not None:
        named = not answers.listen.holder or answers.listen.holder in answers.listen.message
        holder = "" if named else f"held by {clean(answers.listen.holder)}"
        remedy = {
            "port-in-use": "end that process, or set master_port to 0: launch then chooses a free port",
            "root-port": "set master_port to 0: launch then chooses a free port (those below 1024 are root's)",
            "address": f"set master_addr in the rank map to one of {first}: {_addresses(answers.facts.get(first))}",
        }.get(answers.listen.kind, "")
        words = clean(answers.listen.message, 400)
        checks.append(Check("master port", first, "fail", words, holder, remedy))
    elif first in answers.facts:
        checks.append(Check("master port", first, "ok", "bound"))
    for name in sorted({name for seen in answers.facts.values() for name in seen.resolves}):
        by_node = {
            node: frozenset(seen.resolves[name]) for node, seen in answers.facts.items() if name in seen.resolves
        }
        loops = [node for node, found in by_node.items() if any(_loopback(address) for address in found)]
        if len(answers.facts) > 1 and name == master_addr and (loops or len(set(by_node.values())) > 1):
            words = "; ".join(f"{', '.join(sorted(found)) or 'nothing'} on {node}" for node, found in by_node.items())
            cause = f"{clean(name)} resolves differently on the nodes, or to loopback"
            remedy = f"set master_addr in the rank map to an IP address: {_addresses(answers.facts.get(first))}"
            checks.append(Check("master address", None, "warn", words, cause, remedy))
    return checks


def _loopbacks(facts: Mapping[str, LaunchFacts]) -> list[Check]:
    cause = "ranks cannot connect to other ranks on the same node"
    return [
        Check("loopback", node, "ok", "lo is up")
        if seen.loopback
        else Check("loopback", node, "fail", "lo is down", cause, "on that node, as root: ip link set lo up")
        for node, seen in facts.items()
    ]


def _addresses(facts: LaunchFacts | None) -> str:
    """Return the addresses of a node that others may reach, as text."""
    listed = [a for found in (facts.addresses.values() if facts else []) for a in found]
    found = [a for a in listed if not _loopback(a) and not a.lower().startswith("fe80:")]  # nor link-local ones
    return ", ".join(clean(address) for address in found) or "unknown"


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


_PROBE_CAUSE = {
    "refused": "refused at once: a firewall rejects it",
    "dropped": "no reply: a firewall drops it",
    "unreachable": "no route to that address",
    "small-only": "small packets arrive, packets of full size are lost: an interface's MTU is above that of the path",
    "stranger": "another program replies there: the address may belong to another machine",
}

# Their remedy changes the network, whatever the address is for; that of the others is another address.
_REPAIRED = {"refused", "dropped", "small-only"}


def _connections(rank_map: RankMap, master_addr: str, answers: Answers) -> list[Check]:
    checks = []
    addresses = {node.name: node.address for node in rank_map.nodes}
    if tried := {(source, result.node) for source, results in answers.probes.items() for result in results}:
        checks.append(Check("connect", None, "ok", pairs_text(len(rank_map.nodes), len(tried))))
    for source, results in answers.probes.items():
        for target in dict.fromkeys(r.node for r in results):
            of_pair = [r for r in results if r.node == target]
            bad = [r for r in of_pair if r.result != "ok"]
            if not bad:
                slowest = max((r.ms or 0.0 for r in of_pair), default=0.0)
                checks.append(Check("connect", source, "ok", f"reaches {target} in {slowest:.1f} ms"))
                continue
            # One address: the other one that was tried may fail for another reason, which its ports would not show.
            ports = ", ".join(str(r.port) for r in bad if r.address == bad[0].address)
            words = f"{source} cannot reach {target} at {clean(bad[0].address)}, port {ports}"
            cause = _PROBE_CAUSE.get(bad[0].result, clean(bad[0].result))
            remedy = _rule(bad[0], source, answers.facts)
            if bad[0].address not in {addresses.get(target), master_addr}:
                used, other = _chosen_by_ranks(bad[0], source, answers.facts)
                cause = f"{cause}; {used}"
                remedy = f"{remedy}; {other}" if bad[0].result in _REPAIRED else f"repair that network; {other}"
            elif name := _wrong_name(bad[0], source, answers.facts):
                cause, remedy = name
            checks.append(Check("connect", source, "fail", words, cause, remedy))
    return checks


def _chosen_by_ranks(bad: ProbeResult, source: str, facts: Mapping[str, LaunchFacts]) -> tuple[str, str]:
    """Return why an address that is not in the rank map is needed, and how ranks are given another one."""
    seen = facts.get(bad.node)
    names = [name for name, listed in seen.addresses.items() if bad.address in listed] if seen else []
    interface = clean(names[0]) if names else "the interface"
    return (
        f"ranks (gloo) use that address, the first of {interface} on {bad.node}, not the rank map's",
        f"or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface whose first address on {bad.node} "
        f"{source} can reach",
    )


def _wrong_name(bad: ProbeResult, source: str, facts: Mapping[str, LaunchFacts]) -> tuple[str, str] | None:
    """Return cause and remedy if the name is loopback on the target (Debian's 127.0.1.1) or on the source, or if the
    source resolves it to no address of the target."""
    better = f"set master_addr in the rank map to an IP address: {_addresses(facts.get(bad.node))}"
    for node in (bad.node, source):
        seen = facts.get(node)
        loops = [address for address in (seen.resolves.get(bad.address, []) if seen else []) if _loopback(address)]
        if loops:
            cause = f"on {node} that name resolves to {clean(loops[0])}, which only {node} itself can reach"
            return cause, f"{better}; or remove the name from that line of /etc/hosts on {node}"
    found = facts[source].resolves.get(bad.address) if source in facts else None
    known = {a for listed in facts[bad.node].addresses.values() for a in listed} if bad.node in facts else set()
    if found is not None and bad.address not in found and known and not known.intersection(found):
        where = ", ".join(clean(address) for address in found)
        return f"on {source} that name resolves to {where or 'nothing'}, not to an address of {bad.node}", better
    return None


def _rule(bad: ProbeResult, source: str, facts: Mapping[str, LaunchFacts]) -> str:
    """Return the remedy for a failed connection: a firewall rule, or another address."""
    if bad.result == "small-only":
        return (
            f"compare `ip link` on {source} and {bad.node}: set one MTU on both and on the switches between them "
            "(9000 or 1500; less in a tunnel), and let ICMP 'fragmentation needed' through"
        )
    if bad.result not in _REPAIRED:
        return (
            f"set an address of {bad.node} in the rank map that {source} can reach: {_addresses(facts.get(bad.node))}"
        )
    known = _addresses(facts.get(source)).split(", ")
    same_family = (address for address in known if (":" in address) is (":" in bad.address))
    sender = clean(bad.local_address) if bad.local_address else next(same_family, known[0])
    program = "ip6tables" if ":" in sender else "iptables"
    return (
        f"on {bad.node}, as root: {program} -I INPUT -p tcp -s {sender} --dport 1024:65535 -j ACCEPT "
        "(ranks connect on the master port and on random high ports)"
    )


def interfaces(master_addr: str, first: str, answers: Answers) -> dict[str, str]:
    """Return node → the interface that owns the master address (node 0) or routes to it (the others), if known."""
    found: dict[str, str] = {}
    if (facts := answers.facts.get(first)) is not None:
        addresses = {master_addr, *facts.resolves.get(master_addr, [])}
        owners = [name for name, listed in facts.addresses.items() if addresses.intersection(listed)]
        if not owners and _loopback(master_addr):
            owners = ["lo"]
        if owners:
            found[first] = owners[0]
    for node, results in answers.probes.items():
        routes = [r.interface for r in results if r.result == "ok" and r.node == first and r.interface]
        if node != first and routes:
            found[node] = routes[0]
    return found
