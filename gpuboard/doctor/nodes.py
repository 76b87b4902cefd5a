"""The checks of each node (pure): connection, agent, NVML, GPUs, reservations, clock; and whether nodes agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from gpuboard.cluster.inventory.nodes import Node, folded
from gpuboard.cluster.snapshot.views import NodeFacts
from gpuboard.doctor.machine import split_remedy
from gpuboard.launch.preflight.check import Check, grouped
from gpuboard.launch.preflight.checks import same_driver
from gpuboard.launch.preflight.limits import shm_check
from gpuboard.model.snapshot import NodeView
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration
from gpuboard.transport.base import TransportError

CLOCK_S = 5.0  # difference of two clocks that is worth a warning
_AGENT_KINDS = {"no-python", "exited", "limits"}  # errors after the login
_NVML_REMEDIES = {
    "no NVIDIA driver": "install it; for a host without GPUs, list the GPU nodes in `nodes` or with --nodes",
    "driver is not loaded": "on that node, as root: nvidia-smi, or modprobe nvidia; see dmesg",
}


class NodeSeen(msgspec.Struct, frozen=True):
    """What is known of one node."""

    node: Node
    facts: NodeFacts
    view: NodeView
    failure: TransportError | None = None  # why there is no connection
    offset_s: float | None = None  # how far its clock is ahead of this machine's, at least; None: not read


def clock_offset(at: float, sent: float, arrived: float) -> float:
    """Return how far a node's clock is ahead (negative: behind), at least, in seconds.

    ``at``: the time of a reading by the node's clock; ``sent``, ``arrived``: when it was requested and when it arrived,
    by this machine's.

    >>> clock_offset(10, 9, 11), clock_offset(19, 9, 11), clock_offset(4, 9, 11)
    (0.0, 8, -5)
    """
    return max(at - arrived, 0.0) or min(at - sent, 0.0)


def node_checks(seen: Sequence[NodeSeen]) -> list[Check]:
    """Return the checks of all nodes."""
    drivers = {s.node.name: s.view.driver for s in seen if s.view.driver is not None and s.facts.reading is not None}
    agree = [same_driver(drivers)] if len(drivers) > 1 else []
    return [check for one in seen for check in _node(one)] + agree + _same_names(seen)


def none_reached(seen: Sequence[NodeSeen]) -> bool:
    """Return whether there are nodes to reach and none of them delivered a reading."""
    tried = [one for one in seen if not one.facts.closed]
    return bool(tried) and all(one.facts.reading is None for one in tried)


def _node(seen: NodeSeen) -> list[Check]:
    name, reading, view = seen.node.name, seen.facts.reading, seen.view
    checks = _connection(seen)
    if view.scheduler_reason:
        words = clean(f"{view.scheduler_state}: {view.scheduler_reason}")
        checks.append(Check("slurm", name, "warn", words, "Slurm starts no job there", "ask who set that state"))
    if reading is None:
        return checks
    checks += _nvml(seen)
    if view.scheduler_state is None:
        checks.append(_reservations(name, reading.claims_error))
    return [*checks, *_hello(seen), _clock(name, seen.offset_s)]


def _hello(seen: NodeSeen) -> list[Check]:
    """Return what the agent's first message shows that launches need."""
    name, hello, checks = seen.node.name, seen.facts.hello, []
    if hello is not None and hello.shm_free is not None:
        checks.append(shm_check(name, hello.shm_free, len(seen.view.gpus), "cuda" if seen.view.gpus else "cpu"))
    if hello is not None and hello.ptrace_scope > 1:
        words, cause = f"kernel.yama.ptrace_scope is {hello.ptrace_scope}", "stalled ranks are reported without stacks"
        remedy = "on that node, as root: sysctl kernel.yama.ptrace_scope=1"
        remedy += " (3 lasts until the next boot)" if hello.ptrace_scope > 2 else ""
        checks.append(Check("ptrace", name, "warn", words, cause, remedy))
    return checks


def _same_names(seen: Sequence[NodeSeen]) -> list[Check]:
    """Return which machines have one hostname, and which nodes are one machine."""
    called: dict[str, dict[str, str]] = {}  # hostname → node → boot id
    having: dict[str, list[str]] = {}  # UUID → nodes
    for one in seen:
        if one.facts.hello is not None:
            called.setdefault(one.facts.hello.hostname, {})[one.node.name] = one.facts.hello.boot_id
        for uuid in {gpu.uuid for gpu in one.view.gpus} - {""}:
            having.setdefault(uuid, []).append(one.node.name)
    checks = []
    for nodes in dict.fromkeys(tuple(names) for names in having.values() if len(names) > 1):
        words, cause = f"{folded(nodes)} have the same GPUs", "one machine under several names"
        checks.append(Check("GPU", None, "warn", words, cause, "keep one of the names: each GPU counts once per name"))
    for hostname, boots in called.items():
        if len(set(boots.values())) > 1:
            words = f"{folded(list(boots))} have the same hostname, {clean(hostname, 64)}"
            cause = "logs, caches and locks that programs name by host are mixed up in a shared home"
            remedy = "on all but one of them, as root: hostnamectl set-hostname NAME"
            checks.append(Check("hostname", None, "warn", words, cause, remedy))
    return checks


def _connection(seen: NodeSeen) -> list[Check]:
    """Return the checks of the connection and of the agent."""
    name, facts, failure = seen.node.name, seen.facts, seen.failure
    way = "local" if seen.node.host is None else "ssh" if seen.node.job is None else "srun"
    if facts.closed:
        words, remedy = "not permitted: you have no job running there", 'start a job there, or set ssh = "all"'
        return [Check(way, name, "skipped", words, "Slurm shows its GPUs", remedy)]
    if failure is None and facts.reading is None:
        return [Check(way, name, "fail", "no answer yet", "", f"try `ssh {name}`" if way == "ssh" else "")]
    if failure is not None and failure.kind not in _AGENT_KINDS:
        return [Check(way, name, "fail", clean(failure.words), "", clean(failure.remedy))]
    user = f"connected as {clean(facts.hello.user, 64)}" if facts.hello is not None else "connected"
    checks = [Check(way, name, "ok", user)] if way != "local" else []
    if failure is not None:
        return [*checks, Check("agent", name, "fail", clean(failure.words), "", clean(failure.remedy))]
    if facts.hello is None or facts.hello.python:
        python = clean(facts.hello.python, 32) if facts.hello is not None else "?"
        return [*checks, Check("agent", name, "ok", f"runs under Python {python}")]
    cause = "it is read through nvidia-smi, and its GPUs cannot be reserved"
    remedy = "install python3 (3.6 or later) there, or set `python` in the config"
    return [*checks, Check("agent", name, "warn", "python3 cannot be started", cause, remedy)]


def _nvml(seen: NodeSeen) -> list[Check]:
    name, view, reading = seen.node.name, seen.view, seen.facts.reading
    if reading is not None and reading.nvml_error:
        words, remedy = split_remedy(clean(reading.nvml_error))
        for text, better in _NVML_REMEDIES.items():
            remedy = better if text in words else remedy
        return [Check("NVML", name, "fail", words, "", remedy or "see `nvidia-smi` and dmesg on that node")]
    if not view.gpus:
        return [Check("NVML", name, "warn", "no GPU found", "", "take the node out of `nodes` if it has none")]
    models = sorted(Counter(clean(gpu.name, 64) for gpu in view.gpus).items())
    cuda = f", CUDA {view.cuda}" if view.cuda else ""
    words = " + ".join(f"{count} x {model}" for model, count in models) + f", driver {view.driver or '?'}{cuda}"
    if view.source == "nvidia-smi":
        cause, remedy = "NVML cannot be loaded there: readings are slower", "install libnvidia-ml.so.1 there"
        checks = [Check("NVML", name, "warn", f"{words}, through nvidia-smi", cause, remedy)]
    else:
        checks = [Check("NVML", name, "ok", words)]
    found = []
    for gpu in view.gpus:
        words = f"GPU {gpu.index}"
        if gpu.state == "broken":
            found.append(Check("GPU", name, "fail", words, f"broken: {clean(gpu.reason)}", "drain the node; see dmesg"))
        elif gpu.sick:
            found.append(Check("GPU", name, "warn", words, f"sick: {clean('; '.join(gpu.sick))}", ""))
        elif gpu.state == "unknown" and reading is not None and reading.claims_error is None:
            found.append(Check("GPU", name, "warn", words, f"unknown: {clean(gpu.reason)}", ""))
        if "disputed" in gpu.flags:
            cause, remedy = f"disputed: {clean(gpu.reason)}", "agree with the other owner; one of you releases it"
            found.append(Check("GPU", name, "warn", words, cause, remedy))
    return checks + grouped(found)


def _reservations(name: str, error: str | None) -> Check:
    if error is None:
        return Check("reservations", name, "ok", "the folder of claims is root's, sticky, and on the node itself")
    words, remedy = split_remedy(clean(error))
    return Check("reservations", name, "fail", words, "", remedy)


def _clock(name: str, offset_s: float | None) -> Check:
    if offset_s is None:
        return Check("clock", name, "skipped", "no reading on request")
    if abs(offset_s) <= CLOCK_S:
        return Check("clock", name, "ok", f"within {CLOCK_S:.0f} s of this machine's")
    words = f"{format_duration(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} this machine's"
    cause = "a lease expires by the clock of its node"
    return Check("clock", name, "warn", words, cause, "synchronize both: see `chronyc tracking` or `timedatectl`")
