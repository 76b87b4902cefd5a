"""Request + schedule → the shape of a job, or a refusal if no job can ever satisfy the request. Pure.

Slurm chooses the GPUs. Decided here are their type, the nodes to exclude, and the largest number of nodes: as many as
are needed with the GPUs that the newest schedule shows as free, or, if these are too few, with all GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpuboard.errors import UsageError
from gpuboard.leases.policy.candidates import check, matches, nodes_needed
from gpuboard.leases.policy.refusal import described, never_possible
from gpuboard.model.request import Refusal, RefusedGpu, Request
from gpuboard.model.schedule import Gres, Schedule, SchedulerNode
from gpuboard.model.text import clean
from gpuboard.model.units import format_size
from gpuboard.scheduler.slurm.sbatch_args import Shape

_MIG_TYPE = re.compile(r"[0-9]g[._]?[0-9]+gb", re.IGNORECASE)  # a100_3g.40gb, 1g.10gb
_SIZE = re.compile(r"(?<![0-9a-z])(?:gpu|gpumem|mem|vram)?[_-]?([1-9][0-9]{0,3})gi?b?(?![0-9a-z])", re.IGNORECASE)
# Node states in which no GPU can be allocated now; `_free` handles reserved nodes, whose GPUs need the reservation.
_CLOSED = frozenset(
    """
    blocked down drain drained draining error fail failing future invalid invalid_reg maint maintenance no_respond
    not_responding power_down powering_down reboot reboot_issued reboot_requested unknown unregistered
    """.split()  # noqa: SIM905 (easier to read)
)


class Fit(msgspec.Struct, frozen=True):
    """The shape of a job that can satisfy a request, and the reason for it."""

    shape: Shape
    why: str
    excluded: tuple[str, ...] = ()  # the nodes of ``shape.exclude``


class Limits(msgspec.Struct, frozen=True):
    """The nodes, partitions and reservation that the job may use."""

    scope: Collection[str] | None = None  # Slurm's names of the allowed nodes; None: all
    partitions: tuple[str, ...] = ()  # the job's; (): unknown
    reservation: str = ""


def fit(request: Request, schedule: Schedule, limits: Limits) -> Fit | Refusal:
    """Return the job's shape; a Refusal (code 3) if no job can ever satisfy the request.

    Raises UsageError for what Slurm cannot guarantee, with the nearest alternative.
    """
    check(request)
    excluded = _excluded(request, schedule)
    partition = [node for node in schedule.nodes.values() if _in_partition(node, limits.partitions)]
    scope = [node for node in partition if limits.scope is None or node.name in limits.scope]
    kinds = {node.name: _kinds(request, node) for node in scope if node.name not in excluded}
    if not _requests_mig(request) and any(not _is_mig(kind.type) for of in kinds.values() for kind in of):
        # MIG devices only if the request names them or there is nothing else
        kinds = {name: [kind for kind in of if not _is_mig(kind.type)] for name, of in kinds.items()}
    able = [node for node in scope if kinds.get(node.name)]
    if not able:
        return _refuse_unmatched(request, scope, excluded)
    _check_mig(request, kinds)
    types = {kind.type for of in kinds.values() for kind in of}
    one_type = next(iter(types)) if len(types) == 1 else ""
    if not one_type:  # Slurm may then choose any GPUs of a node, so all of them must match
        whole = [node for node in able if len(kinds[node.name]) == len(_present(node.gpus))]
        if not whole:
            names = ", ".join(sorted(clean(name, 40) or "untyped" for name in types))
            why = f"several GPU types match, on nodes with mixed types: {names}"
            return _refused(request, why, scope, excluded, nearest="--model TYPE")
        able = whole
    total = {node.name: sum(kind.count for kind in kinds[node.name]) for node in able}
    free = {node.name: _free(node, kinds[node.name], limits.reservation) for node in able}
    needed = nodes_needed(request, free.values())
    nodes = needed or nodes_needed(request, total.values())
    if nodes is None:
        return _refuse_too_many(request, scope, excluded, total)
    matching = {node.name for node in able}
    all_excluded = tuple(
        node.name
        for node in partition
        if node.name not in matching
        # the type alone keeps the job off nodes in scope that lack it
        and (not one_type or node.name in excluded or node not in scope)
    )
    assert request.n is not None
    shape = Shape(request.n, nodes, request.per_node, one_type, _nodeset(all_excluded))
    return Fit(shape, _why(request, shape, free, needed is not None), all_excluded)


def _excluded(request: Request, schedule: Schedule) -> set[str]:
    """Return the nodes that `--exclude` names. Raises UsageError for single GPUs, and for `--gpus`."""
    if request.picks:
        nodes = sorted({pick.node for pick in request.picks if pick.node is not None})
        where = f" --nodes '{','.join(nodes)}'" if nodes else ""
        raise UsageError(
            f"--gpus cannot be used with Slurm, which chooses the GPUs; try --n {len(request.picks)}{where}"
        )
    found: set[str] = set()
    for pick in request.exclude:
        if pick.node is None or pick.index is not None or pick.uuid is not None:
            raise UsageError(
                "--exclude takes only whole nodes with Slurm, which chooses the GPUs; "
                f"try --exclude {pick.node or 'NODE'}"
            )
        found.add(pick.node)
    if unknown := sorted(found - schedule.nodes.keys()):
        raise UsageError(f"--exclude: no node {clean(unknown[0], 64)!r} in Slurm")
    return found


def _in_partition(node: SchedulerNode, partitions: Sequence[str]) -> bool:
    return not partitions or not node.partitions or bool(set(partitions) & set(node.partitions))


def _present(gpus: Sequence[Gres]) -> list[Gres]:
    return [kind for kind in gpus if kind.count > 0]


def _kinds(request: Request, node: SchedulerNode) -> list[Gres]:
    """Return the types of a node's GPUs that match the request, with their counts."""
    found = _present(node.gpus)
    if request.model is not None:
        by_type = [kind for kind in found if kind.type and _is_model(kind.type, request.model)]
        by_feature = len(found) == 1 and any(_is_model(feature, request.model) for feature in node.features)
        found = by_type or (found if by_feature else [])
    if request.gpu_mem is not None:
        found = [kind for kind in found if (_memory(kind, node) or 0) >= request.gpu_mem]
    return found


def _is_model(name: str, model: str) -> bool:
    """Return whether Slurm's name of a GPU type matches ``model``; ``_``, ``-`` and ``.`` equal blanks."""
    return matches(name, model) or matches(_plain(name), _plain(model))


def _plain(text: str) -> str:
    return re.sub(r"[\s_.-]+", " ", text)


def _memory(kind: Gres, node: SchedulerNode) -> int | None:
    """Return a GPU's memory in bytes according to the name of its type or, on a node with one type, of a feature."""
    if slice_ := re.search(r"[0-9]g[._]?([0-9]+)gb", kind.type, re.IGNORECASE):
        return int(slice_[1]) * 10**9
    texts = [kind.type, *(node.features if len(_present(node.gpus)) == 1 else ())]
    found = [int(size) for text in texts for size in _SIZE.findall(_plain(text))]
    return found[0] * 10**9 if found else None


def _is_mig(type_: str) -> bool:
    return bool(_MIG_TYPE.search(type_))


def _requests_mig(request: Request) -> bool:
    return request.model is not None and bool(re.search(r"[0-9]g([._]|$)", request.model.lower()))


def _check_mig(request: Request, kinds: Mapping[str, Sequence[Gres]]) -> None:
    if request.n != 1 and any(_is_mig(kind.type) for of in kinds.values() for kind in of):
        raise UsageError("a process can use only one MIG device; try --n 1")


def _free(node: SchedulerNode, kinds: Sequence[Gres], reservation: str) -> int:
    if node.flags & _CLOSED or ("reserved" in node.flags and (not reservation or node.reservation != reservation)):
        return 0
    if any(not kind.type for kind in (*_present(node.gpus), *_present(node.used))):
        # Where slurm.conf and gres.conf differ in types, only totals can be compared.
        free = sum(kind.count for kind in node.gpus) - sum(kind.count for kind in node.used)
        return max(0, min(free, sum(kind.count for kind in kinds)))
    used = {kind.type: kind.count for kind in node.used}
    return sum(max(0, kind.count - used.get(kind.type, 0)) for kind in kinds)


def _nodeset(names: Sequence[str]) -> str:
    """Return a nodeset that Slurm can parse: folded if each name has at most one range."""
    if len(names) < 2:
        return "".join(names)
    from gpuboard.nodesets import fold  # 30 ms: only for several nodes

    folded = fold(names)
    return ",".join(names) if re.search(r"\][^,]*\[", folded) else folded


def _why(request: Request, shape: Shape, free: Mapping[str, int], fits_now: bool) -> str:
    have = sorted(((count, name) for name, count in free.items() if count), key=lambda item: (-item[0], item[1]))
    shown = ", ".join(f"{name} {count}" for count, name in have[:4]) + (", …" if len(have) > 4 else "")
    spread = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"
    if shape.per_node is None and shape.nodes > 1:
        spread = f"at most {spread}, the fewest possible"
    why = f"{described(request)}: {spread}; free for Slurm: {shown or 'none'}"
    if not fits_now:
        why += ", so the job waits"
    if shape.type:
        why += f"; type {shape.type}"
    return clean(why, 1000)


def _refuse_too_many(
    request: Request, scope: Sequence[SchedulerNode], excluded: set[str], total: Mapping[str, int]
) -> Refusal:
    why = never_possible(total.values())
    options = []
    without_limit = msgspec.structs.replace(request, max_nodes=None)
    needed = nodes_needed(without_limit, total.values())
    if request.max_nodes is not None and not request.one_node and needed:
        options.append(f"--max-nodes {needed}")
    step = request.per_node or 1
    for n in range(min((request.n or 0) - step, sum(total.values()) // step * step), 0, -step):
        if nodes_needed(msgspec.structs.replace(request, n=n), total.values()):
            options.append(f"--n {n}")
            break
    return _refused(request, why, scope, excluded, nearest=" or ".join(options))


def _refuse_unmatched(request: Request, scope: Sequence[SchedulerNode], excluded: set[str]) -> Refusal:
    kinds = sorted({clean(kind.type, 40) or "untyped" for node in scope for kind in _present(node.gpus)})
    sized = [_memory(kind, node) for node in scope for kind in _present(node.gpus)]
    why = f"no Slurm node matches; GPU types here: {', '.join(kinds) or 'none'}"
    nearest = ""
    if request.gpu_mem is not None and not any(sized):
        why += ", without a memory size in their names"
        nearest = "--model TYPE without --gpu-mem, or --slurm=--constraint=FEATURE"
    elif request.model is not None:
        nearest = "without --model"
    return _refused(request, why, scope, excluded, nearest=nearest)


def _refused(
    request: Request, why: str, scope: Sequence[SchedulerNode], excluded: set[str], *, nearest: str
) -> Refusal:
    gpus = tuple(
        RefusedGpu(node.name, index, "", "unknown", _reason(request, node, kind, excluded))
        for node in scope
        for index, kind in enumerate(kind for kind in _present(node.gpus) for _ in range(min(kind.count, 64)))
    )
    message = f"requested {described(request)}; {why}"
    return Refusal(3, message + (f"; try {nearest}" if nearest else ""), gpus, nearest)


def _reason(request: Request, node: SchedulerNode, kind: Gres, excluded: set[str]) -> str:
    if node.name in excluded:
        return "excluded"
    memory = _memory(kind, node)
    if request.model is not None and not _is_model(kind.type, request.model):
        return f"is of type {clean(kind.type, 40) or 'none'}, not {request.model}"
    if request.gpu_mem is not None and (memory or 0) < request.gpu_mem:
        return f"{format_size(memory)} according to its type, {format_size(request.gpu_mem)} requested"
    return "matches the request"
