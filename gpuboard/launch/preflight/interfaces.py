"""Preflight checks of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (pure), where user or site have set them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuboard.launch.plan import Device
from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.model.replies import LaunchFacts
from gpuboard.model.text import clean

_LOOPBACK = "lo"


def interface_checks(facts: Mapping[str, LaunchFacts], expected: Mapping[str, str], device: Device) -> list[Check]:
    """Return whether these variables, where set, select a usable interface of their node.

    ``expected``: node → the interface that owns or routes to the master's address. Another one is a warning only, since
    ranks may exchange data over a faster network than the master's. Ranks on GPUs use gloo at most for groups of their
    own, so its variable is a warning there.
    """
    checks = []
    for node, seen in facts.items():
        right = expected.get(node)
        if right is not None and not seen.socket_ifname:
            checks.append(Check("interface", node, "ok", clean(right)))
        for name, select in _SELECT.items():
            value = seen.socket_ifname.get(name)
            if value is None or (name == "NCCL_SOCKET_IFNAME" and device == "cpu"):
                continue
            status: CheckStatus = "warn" if name == "GLOO_SOCKET_IFNAME" and device == "cuda" else "fail"
            chosen, missing = select(value, seen.addresses)
            if missing:
                cause = f"no such interface with an address; there are {clean(', '.join(seen.addresses)) or 'none'}"
            elif right is None or right in chosen or len(facts) == 1:
                checks.append(Check("interface", node, "ok", f"{name}={clean(value)}"))
                continue
            elif chosen == [_LOOPBACK]:
                cause = "other nodes cannot be reached through loopback"
            elif shared := _shared(chosen, node, facts):
                cause = f"{clean(shared)} is an address of other nodes too, which cannot be reached through it"
            else:
                status, cause = "warn", f"the master's address belongs to {clean(right)} there, or is routed through it"
            remedy = "unset it in your environment and in that node's profile"
            remedy += f": launch then sets it to {clean(right)} on {node}" if right else ""
            checks.append(Check("interface", node, status, f"{name}={clean(value)}", cause, remedy))
    return checks


def preferred(seen: LaunchFacts | None, address: str) -> list[str]:
    """Return the address that ranks use in place of ``address``, if it is another one and its interface not chosen.

    gloo and NCCL are given the interface and take its first address: IPv4 where it has both.
    """
    if seen is None or seen.socket_ifname:
        return []
    own = {address, *seen.resolves.get(address, [])}
    others = (listed for name, listed in seen.addresses.items() if name != _LOOPBACK)  # a node's own name may be ::1
    first = next((listed[0] for listed in others if own.intersection(listed)), address)
    return [] if first in own else [first]


def _shared(chosen: Collection[str], node: str, facts: Mapping[str, LaunchFacts]) -> str:
    """Return an address of the chosen interfaces if other nodes have all of theirs too, such as docker0's; else ""."""
    others = {a for name, seen in facts.items() if name != node for listed in seen.addresses.values() for a in listed}
    own = [a for name in chosen for a in facts[node].addresses.get(name, []) if not a.lower().startswith("fe80:")]
    return own[0] if own and others.issuperset(own) else ""


def _gloo(value: str, known: Collection[str]) -> tuple[list[str], bool]:
    """Return the interfaces of a list for gloo, and whether one is missing: torch then fails in init_process_group."""
    chosen = value.split(",")
    return chosen, any(name not in known for name in chosen)


def _nccl(value: str, known: Collection[str]) -> tuple[list[str], bool]:
    """Return the interfaces that NCCL would choose from, and whether there is none.

    The value lists prefixes; ``^`` excludes them, ``=`` takes them as whole names (NCCL's documentation of
    NCCL_SOCKET_IFNAME).
    """
    exclude, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    words = [word.partition(":")[0] for word in rest.split(",") if word]

    def listed(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    chosen = [name for name in known if listed(name) is not exclude and not (exclude and name == _LOOPBACK)]
    return chosen, not chosen


_SELECT = {"GLOO_SOCKET_IFNAME": _gloo, "NCCL_SOCKET_IFNAME": _nccl}
