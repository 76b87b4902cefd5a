"""What a request says of each GPU: whether it can be had now, or ever, and why not. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import msgspec

from gpuboard.errors import UsageError
from gpuboard.model.request import ChosenGpu, Pick, Request, slot
from gpuboard.model.snapshot import GpuView, MigView, NodeView, Snapshot
from gpuboard.model.text import quoted
from gpuboard.model.units import format_size

_MODEL_MAX = 256  # characters: a driver's names have 96 at most (NVML_DEVICE_NAME_V2_BUFFER_SIZE)
_MIG_PROFILE = re.compile(r"[0-9]c?[.]?[0-9]*g[.]?", re.ASCII)


class Candidate(msgspec.Struct, frozen=True):
    """One GPU (or MIG device) that was looked at. ``why_not`` None: it can be had now."""

    node: str
    index: int
    uuid: str
    gpu: GpuView
    state: str
    free_memory: int | None  # bytes
    why_not: str | None
    never: bool = False  # it could not serve this request if it were free, either
    mig: int | None = None  # the number of the MIG device, None: the whole GPU

    @property
    def sick(self) -> bool:
        return "sick" in self.gpu.flags

    @property
    def slot(self) -> str:
        """Its index, as ``status`` prints it."""
        return slot(self.index, self.mig)

    @property
    def place(self) -> str:
        """Its node and index."""
        return f"{self.node}:{self.slot}"

    @property
    def chosen(self) -> ChosenGpu:
        return ChosenGpu(self.node, self.index, self.uuid, mig=self.mig)


def check(request: Request) -> None:
    """Raise UsageError when the request contradicts itself."""
    n, per_node, max_nodes = request.n, request.per_node, request.max_nodes
    if (n is None) == (not request.picks):
        raise UsageError("say how many GPUs (--n 4) or which (--gpus gpu01:0,3), one of the two")
    if request.model is not None and len(request.model) > _MODEL_MAX:
        raise UsageError(f"--model {quoted(request.model)} is longer than {_MODEL_MAX} characters")
    if len(set(request.picks)) < len(request.picks):
        raise UsageError("--gpus names a GPU twice")
    if request.picks and (per_node or max_nodes):
        raise UsageError("--gpus names the GPUs: --per-node and --max-nodes go with --n only")
    if n is not None and n < 1:
        raise UsageError(f"--n {n}: at least one GPU")
    if n is not None and per_node is not None:
        if n % per_node:
            raise UsageError(f"--n {n} is no multiple of --per-node {per_node}; try --n {n - n % per_node or per_node}")
        if max_nodes is not None and n // per_node > max_nodes:
            raise UsageError(
                f"--n {n} with --per-node {per_node} takes {n // per_node} nodes, more than --max-nodes {max_nodes}"
            )


def read(node: NodeView) -> bool:
    """Tell whether this node's GPUs were seen as they are now."""
    return node.state == "up" and node.error is None


def look(request: Request, snapshot: Snapshot, own: Collection[str]) -> list[Candidate]:
    """Return every GPU the request could mean, by node and index, each with why it cannot serve.

    A MIG device serves who asks for its profile or names it, and for one GPU where no whole one could ever serve.
    """
    whole = [
        (node, gpu, _look_at(request, node, gpu, own))
        for node in sorted(snapshot.nodes, key=lambda node: node.name)
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index)
    ]
    whole = _each_once(whole)
    parts = request.n == 1 and all(map(read, snapshot.nodes)) and all(candidate.never for _, _, candidate in whole)
    found: list[Candidate] = []
    for node, gpu, candidate in whole:
        found.append(candidate)
        if request.n == 1 or any(names_gpu(pick, node.name, gpu.index, mig.uuid, number)
                                 for number, mig in enumerate(gpu.mig) for pick in request.picks):  # fmt: skip
            fits = parts and (request.model is None or matches(gpu.name, request.model))
            found += [_look_at_mig(request, node, gpu, number, own, fits=fits) for number in range(len(gpu.mig))]
    return found


def _each_once(whole: list[tuple[NodeView, GpuView, Candidate]]) -> list[tuple[NodeView, GpuView, Candidate]]:
    """Return the same, a GPU that was read under two names of its node ruled out under all but one.

    That is the first under which it can be had: a node that lists another's GPUs takes none of them away.
    """
    kept: dict[str, Candidate] = {}
    for _, gpu, candidate in whole:
        if kept.setdefault(gpu.uuid, candidate).why_not is not None and candidate.why_not is None:
            kept[gpu.uuid] = candidate
    for at, (node, gpu, candidate) in enumerate(whole):
        named = kept[gpu.uuid]
        if named.node != node.name:
            words = f"the same GPU as {named.node}:{named.index}"
            whole[at] = (node, gpu, msgspec.structs.replace(candidate, why_not=words, never=True))
    return whole


def _look_at(request: Request, node: NodeView, gpu: GpuView, own: Collection[str]) -> Candidate:
    total = None if gpu.memory_total is None or gpu.memory_used is None else gpu.memory_total - gpu.memory_used
    never = _never(request, node, gpu)
    if never is None and request.model is not None and not matches(gpu.name, request.model):
        never = f"is a {gpu.name}, not {request.model}"
    if never is None and "mig" in gpu.flags:
        devices = sorted({mig.profile for mig in gpu.mig})
        never = f"in MIG mode: {f'its devices can be had: --n 1 --model {devices[0]}' if devices else 'no devices'}"
    now = never or _not_now(request, gpu, gpu, own, total)
    return Candidate(
        node.name, gpu.index, gpu.uuid, gpu, gpu.state, total, now or _unclaimable(node), never is not None
    )


def _look_at_mig(
    request: Request, node: NodeView, gpu: GpuView, number: int, own: Collection[str], *, fits: bool
) -> Candidate:
    mig = gpu.mig[number]
    total = None if mig.memory_total is None or mig.memory_used is None else mig.memory_total - mig.memory_used
    never = _never(request, node, gpu, number)
    fits = fits or bool(request.picks) or bool(request.model and _is_profile(request.model, mig.profile))
    if never is None and not fits:
        never = f"MIG device {mig.profile}: ask for it with --model {mig.profile}"
    now = never or _not_now(request, mig, gpu, own, total)
    return Candidate(
        node.name, gpu.index, mig.uuid, gpu, mig.state, total, now or _unclaimable(node), never is not None, number
    )


def _never(request: Request, node: NodeView, gpu: GpuView, mig: int | None = None) -> str | None:
    part = gpu if mig is None else gpu.mig[mig]
    if request.picks and not any(names_gpu(pick, node.name, gpu.index, part.uuid, mig) for pick in request.picks):
        return "not named by --gpus"
    if any(names_gpu(pick, node.name, gpu.index, part.uuid, mig) for pick in request.exclude):
        return "excluded"
    if request.within is not None and part.uuid not in request.within:
        return "not in the lease"
    if request.gpu_mem is not None and part.memory_total is not None and part.memory_total < request.gpu_mem:
        return f"has {format_size(part.memory_total)} in all, {format_size(request.gpu_mem)} were asked for"
    return None


def _not_now(
    request: Request, part: GpuView | MigView, gpu: GpuView, own: Collection[str], free_memory: int | None
) -> str | None:
    """Return why ``part``, all of ``gpu`` or one of its MIG devices, cannot be had now."""
    inside = request.within is not None
    held = inside and part.state == "reserved" and bool(part.leases) and set(part.leases) <= set(own)
    if part.state != "free" and not held:
        return part.reason or part.state
    if part is gpu and "disputed" in gpu.flags:
        return "claims contradict each other"
    if "sick" in gpu.flags and not (request.allow_sick or request.picks or inside):
        return f"{sick_words(gpu)} (--allow-sick takes it)"
    if request.gpu_mem is not None and (free_memory is None or free_memory < request.gpu_mem):
        return f"{format_size(free_memory)} free, {format_size(request.gpu_mem)} were asked for"
    return None


def _unclaimable(node: NodeView) -> str | None:
    if not read(node):
        return node.error or f"node is {node.state}"
    return f"cannot be reserved: {node.claims_error}" if node.claims_error else None


def sick_words(gpu: GpuView) -> str:
    """Return why a GPU is sick, as people read it."""
    return f"sick: {'; '.join(gpu.sick)}" if gpu.sick else "sick"


def names_gpu(pick: Pick, node: str, index: int, uuid: str, mig: int | None) -> bool:
    """Tell whether ``pick`` means this GPU or MIG device; one with neither index nor UUID means its whole node."""
    if pick.node is not None and pick.node != node:
        return False
    if pick.uuid is not None:
        return uuid == pick.uuid
    return (pick.index, pick.mig) == (index, mig) or (pick.index is None and pick.node is not None)


def matches(name: str, model: str) -> bool:
    """Tell whether a GPU's name is what ``--model`` asks for: a part of it, or a glob; upper and lower case alike."""
    name, model = name.lower(), model.lower()
    return fnmatchcase(name, model) if re.search(r"[*?[]", model) else model in name


def _is_profile(model: str, profile: str) -> bool:
    # "80gb" is a part of 7g.80gb and of a whole GPU's name: only what looks like a slice ("1g", "3g.40gb") means MIG
    return bool(_MIG_PROFILE.search(model.lower())) and matches(profile, model)


def by_node(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the candidates of each node, nodes by name."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.node, []).append(candidate)
    return dict(sorted(found.items()))


def nodes_needed(request: Request, free: Collection[int]) -> int | None:
    """Return how many nodes the request takes when they have ``free`` GPUs; None when it does not fit."""
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
