"""Evaluate a request for each GPU: whether it is available now, or could ever be, and why not. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import get_args

import msgspec

from gpuboard.errors import UsageError
from gpuboard.model.gpu import short_model
from gpuboard.model.request import ChosenGpu, Pick, Request, Topology, slot
from gpuboard.model.snapshot import GpuView, MigView, NodeView, Snapshot, free_memory, usable_memory
from gpuboard.model.text import quoted
from gpuboard.model.units import format_size

_MODEL_MAX = 256  # characters: a driver's names have 96 at most (NVML_DEVICE_NAME_V2_BUFFER_SIZE)
_MIG_PROFILE = re.compile(r"[0-9]c?[.]?[0-9]*g[.]?", re.ASCII)


class Candidate(msgspec.Struct, frozen=True):
    """A GPU or MIG device, evaluated for a request."""

    node: str
    index: int
    uuid: str
    gpu: GpuView
    state: str
    reason: str | None  # why it is not available for the request; None: it is
    never: bool = False  # it does not match the request, even when it is free
    mig: int | None = None  # the number of the MIG device; None: the whole GPU

    @property
    def sick(self) -> bool:
        return "sick" in self.gpu.flags

    @property
    def slot(self) -> str:
        """The index as ``status`` prints it."""
        return slot(self.index, self.mig)

    @property
    def place(self) -> str:
        """Node and index."""
        return f"{self.node}:{self.slot}"

    @property
    def chosen(self) -> ChosenGpu:
        return ChosenGpu(self.node, self.index, self.uuid, mig=self.mig)


def check(request: Request) -> None:
    """Raise UsageError when the request contradicts itself."""
    n, per_node, max_nodes = request.n, request.per_node, request.max_nodes
    counts: dict[str, object] = {"--n": n, "--per-node": per_node, "--max-nodes": max_nodes}
    for option, count in counts.items():  # the Python interface takes any value
        if count is not None and not (isinstance(count, int) and count >= 1):
            raise UsageError(f"{option} {count!r}: must be a whole number, at least 1")
    if request.topology not in get_args(Topology):
        raise UsageError(f"--topology {request.topology!r} is not one of: {', '.join(get_args(Topology))}")
    if (n is None) == (not request.picks):
        raise UsageError("pass either --n, as --n 4, or --gpus, as --gpus gpu01:0,3")
    if request.model is not None and len(request.model) > _MODEL_MAX:
        raise UsageError(f"--model {quoted(request.model)} is longer than {_MODEL_MAX} characters")
    if len(set(request.picks)) < len(request.picks):
        raise UsageError("--gpus names a GPU twice")
    if request.picks and (per_node or max_nodes):
        raise UsageError("--gpus cannot be combined with --per-node or --max-nodes")
    if n is not None and per_node is not None:
        if n % per_node:
            multiple = n - n % per_node or per_node
            raise UsageError(f"--n {n} is not a multiple of --per-node {per_node}; try --n {multiple}")
        if max_nodes is not None and n // per_node > max_nodes:
            raise UsageError(
                f"--n {n} with --per-node {per_node} needs {n // per_node} nodes, more than --max-nodes {max_nodes}"
            )


def is_current(node: NodeView) -> bool:
    """Return whether this node has a current reading without an error."""
    return node.state == "up" and node.error is None


def without_utilization(snapshot: Snapshot, busy: int) -> tuple[Snapshot, list[str]]:
    """Return the snapshot as if GPUs without a process were free, and the nodes that have such GPUs.

    ``busy``: percent of utilization from which on a GPU is busy.
    """
    nodes = [msgspec.structs.replace(node, gpus=[_quiet(gpu, busy) for gpu in node.gpus]) for node in snapshot.nodes]
    names = [now.name for now, then in zip(snapshot.nodes, nodes, strict=True) if now.gpus != then.gpus]
    return msgspec.structs.replace(snapshot, nodes=nodes), names


def _quiet(gpu: GpuView, busy: int) -> GpuView:
    lingers = gpu.state == "busy" and not gpu.processes and (gpu.utilization or 0) >= busy
    return msgspec.structs.replace(gpu, state="free") if lingers else gpu


def evaluate(request: Request, snapshot: Snapshot, own: Collection[str]) -> list[Candidate]:
    """Return all GPUs, by node and index, and the MIG devices that the request may mean.

    A MIG device is available for a request of its profile, for one that names it, and for ``n=1`` if no whole GPU
    matches on any node. ``own``: ids of the caller's leases.
    """
    whole = [
        (node, gpu, _evaluate_gpu(request, node, gpu, own))
        for node in sorted(snapshot.nodes, key=lambda node: node.name)
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index)
    ]
    whole = _deduplicated(whole)
    only_mig = request.n == 1 and all(map(is_current, snapshot.nodes)) and all(each.never for _, _, each in whole)
    found: list[Candidate] = []
    for node, gpu, candidate in whole:
        found.append(candidate)
        if request.n == 1 or any(names_gpu(pick, node.name, gpu.index, mig.uuid, number)
                                 for number, mig in enumerate(gpu.mig) for pick in request.picks):  # fmt: skip
            fits = only_mig and (request.model is None or matches(gpu.name, request.model))
            found += [_evaluate_mig(request, node, gpu, number, own, fits=fits) for number in range(len(gpu.mig))]
    return found


def _deduplicated(whole: list[tuple[NodeView, GpuView, Candidate]]) -> list[tuple[NodeView, GpuView, Candidate]]:
    """Rule out a GPU that was read under several node names under all names but one.

    That is the first under which it is available, so that a node with a false list of GPUs does not block them.
    """
    kept: dict[str, Candidate] = {}
    for _, gpu, candidate in whole:
        if kept.setdefault(gpu.uuid, candidate).reason is not None and candidate.reason is None:
            kept[gpu.uuid] = candidate
    for at, (node, gpu, candidate) in enumerate(whole):
        first = kept[gpu.uuid]
        if first.node != node.name:
            reason = f"the same GPU as {first.node}:{first.index}"
            whole[at] = (node, gpu, msgspec.structs.replace(candidate, reason=reason, never=True))
    return whole


def _evaluate_gpu(request: Request, node: NodeView, gpu: GpuView, own: Collection[str]) -> Candidate:
    never = _never(request, node, gpu)
    if never is None and request.model is not None and not matches(gpu.name, request.model):
        never = f"is a {gpu.name}, not {request.model}"
    if never is None and "mig" in gpu.flags:
        devices = sorted({mig.profile for mig in gpu.mig})
        never = f"in MIG mode: use --n 1 --model {devices[0]}" if devices else "in MIG mode, without devices"
    now = never or _not_now(request, gpu, gpu, own)
    return Candidate(node.name, gpu.index, gpu.uuid, gpu, gpu.state, now or _unreservable(node), never is not None)


def _evaluate_mig(
    request: Request, node: NodeView, gpu: GpuView, number: int, own: Collection[str], *, fits: bool
) -> Candidate:
    mig = gpu.mig[number]
    never = _never(request, node, gpu, number)
    fits = fits or bool(request.picks) or bool(request.model and _is_profile(request.model, mig.profile))
    if never is None and not fits:
        never = f"MIG device {mig.profile}: use --model {mig.profile}"
    now = never or _not_now(request, mig, gpu, own)
    return Candidate(
        node.name, gpu.index, mig.uuid, gpu, mig.state, now or _unreservable(node), never is not None, number
    )


def _never(request: Request, node: NodeView, gpu: GpuView, mig: int | None = None) -> str | None:
    part = gpu if mig is None else gpu.mig[mig]
    if request.picks and not any(names_gpu(pick, node.name, gpu.index, part.uuid, mig) for pick in request.picks):
        return "not in --gpus"
    parts = {(part.uuid, mig), (gpu.uuid, None)}  # with a GPU its MIG devices are excluded
    if any(names_gpu(pick, node.name, gpu.index, *names) for pick in request.exclude for names in parts):
        return "excluded"
    if request.within is not None and part.uuid not in request.within:
        return "not in the lease"
    usable = usable_memory(part)
    if request.gpu_mem is not None and usable is not None and usable < request.gpu_mem:
        return f"has {_at_least(usable)} usable, {format_size(request.gpu_mem)} requested"
    return None


def _not_now(request: Request, part: GpuView | MigView, gpu: GpuView, own: Collection[str]) -> str | None:
    """Return why ``part``, all of ``gpu`` or one of its MIG devices, is not available now; None if it is."""
    inside = request.within is not None
    held = inside and part.state == "reserved" and bool(part.leases) and set(part.leases) <= set(own)
    if part.state != "free" and not held:
        return part.reason or part.state
    if part is gpu and "disputed" in gpu.flags:
        return "conflicting claims"
    if "sick" in gpu.flags and not (request.allow_sick or request.picks or inside):
        return f"{sick_reason(gpu)} (allowed with --allow-sick)"
    free = free_memory(part)
    if request.gpu_mem is not None and (free is None or free < request.gpu_mem):
        return f"{_at_least(free)} free, {format_size(request.gpu_mem)} requested"
    return None


def _at_least(size: int | None) -> str:
    """Return a size rounded down, as it is compared with a request that is larger."""
    return "?" if size is None else f"{size * 10 // 2**30 / 10:g} GiB"


def _unreservable(node: NodeView) -> str | None:
    if not is_current(node):
        return node.error or f"node is {node.state}"
    return f"cannot be reserved: {node.claims_error}" if node.claims_error else None


def sick_reason(gpu: GpuView) -> str:
    """Return why a GPU is sick."""
    return f"sick: {'; '.join(gpu.sick)}" if gpu.sick else "sick"


def names_gpu(pick: Pick, node: str, index: int, uuid: str, mig: int | None) -> bool:
    """Return whether ``pick`` names this GPU or MIG device; without index and UUID it names all GPUs of its node."""
    if pick.node is not None and pick.node != node:
        return False
    if pick.uuid is not None:
        return uuid == pick.uuid
    return (pick.index, pick.mig) == (index, mig) or (pick.index is None and pick.node is not None)


def matches(name: str, model: str) -> bool:
    """Return whether ``model`` is a part of a GPU's name or of its short one, or a glob for either; case-insensitive.

    Tables show the short name: ``A100 80GB`` for ``NVIDIA A100-SXM4-80GB``.
    """
    names, model = (name.lower(), short_model(name).lower()), model.lower()
    return any(fnmatchcase(one, model) if re.search(r"[*?[]", model) else model in one for one in names)


def _is_profile(model: str, profile: str) -> bool:
    # "80gb" is a part of 7g.80gb and of whole GPUs' names: only a profile ("1g", "3g.40gb") means MIG
    return bool(_MIG_PROFILE.search(model.lower())) and matches(profile, model)


def by_node(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the candidates of each node; nodes are sorted by name."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.node, []).append(candidate)
    return dict(sorted(found.items()))


def nodes_needed(request: Request, free: Collection[int]) -> int | None:
    """Return how many nodes the request needs if they have ``free`` GPUs each; None if it does not fit."""
    assert request.n is not None
    if request.per_node is not None:
        needed = request.n // request.per_node
        fits = sum(count >= request.per_node for count in free) >= needed
    else:
        left, needed = request.n, 0
        for count in sorted(free, reverse=True):
            if left > 0:
                left, needed = left - count, needed + 1
        fits = left <= 0
    return needed if fits and (request.max_nodes is None or needed <= request.max_nodes) else None
