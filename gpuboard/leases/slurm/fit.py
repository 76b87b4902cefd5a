"""A request and what Slurm holds → the shape of a job that would be given it, or why none ever will. Pure.

Slurm chooses the GPUs. What can be decided here is the kind, which nodes are out of the question, and how many nodes
are enough: as many as the newest schedule shows free GPUs on, else as many as it would take if all were free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from gpuboard.errors import UsageError
from gpuboard.leases.policy.candidates import check, matches, nodes_needed
from gpuboard.leases.policy.refusal import asked_words
from gpuboard.model.request import Refusal, RefusedGpu, Request
from gpuboard.model.schedule import Gres, Schedule, SchedulerNode
from gpuboard.model.text import clean
from gpuboard.model.units import format_size
from gpuboard.scheduler.slurm.sbatch_args import Shape

_MIG_TYPE = re.compile(r"[0-9]g[._]?[0-9]+gb", re.IGNORECASE)  # a100_3g.40gb, 1g.10gb
_SIZE = re.compile(r"(?<![0-9a-z])(?:gpu|gpumem|mem|vram)?[_-]?([1-9][0-9]{0,3})gi?b?(?![0-9a-z])", re.IGNORECASE)
# Node states in which nobody gets GPUs of it now; a reserved one gives them to who names the reservation.
_CLOSED = frozenset(
    """
    blocked down drain drained draining error fail failing future invalid invalid_reg maint maintenance no_respond
    not_responding power_down powering_down reboot reboot_issued reboot_requested unknown unregistered
    """.split()  # noqa: SIM905 (words to read)
)


class Fit(msgspec.Struct, frozen=True):
    """The shape of a job that may be given what was asked for, and why it is so."""

    shape: Shape
    why: str
    excluded: tuple[str, ...] = ()  # the nodes of ``shape.exclude``


class Limits(msgspec.Struct, frozen=True):
    """Within what the job is asked for."""

    scope: Collection[str] | None = None  # Slurm's names of the nodes that may serve; None: all
    partitions: tuple[str, ...] = ()  # the job's; (): not known
    reservation: str = ""


def fit(request: Request, schedule: Schedule, limits: Limits) -> Fit | Refusal:
    """Return the job's shape; a Refusal (code 3) when no node could ever serve.

    Raises UsageError for what Slurm cannot promise, with the nearest thing that works.
    """
    check(request)
    out = _excluded(request, schedule)
    partition = [node for node in schedule.nodes.values() if _in_partition(node, limits.partitions)]
    scope = [node for node in partition if limits.scope is None or node.name in limits.scope]
    kinds = {node.name: _kinds(request, node) for node in scope if node.name not in out}
    if not _asks_mig(request) and any(not _is_mig(kind.type) for of in kinds.values() for kind in of):
        # a slice goes to who names it, and to others where there is nothing else
        kinds = {name: [kind for kind in of if not _is_mig(kind.type)] for name, of in kinds.items()}
    able = [node for node in scope if kinds.get(node.name)]
    if not able:
        return _never(request, scope, out)
    _check_slices(request, kinds)
    types = {kind.type for of in kinds.values() for kind in of}
    one_type = next(iter(types)) if len(types) == 1 else ""
    if not one_type:  # any kind of a node's GPUs would be given: only nodes all of whose GPUs serve
        whole = [node for node in able if len(kinds[node.name]) == len(_present(node.gpus))]
        if not whole:
            names = ", ".join(sorted(clean(name, 40) or "untyped" for name in types))
            words = f"nodes have several types of GPUs, and several serve: {names}"
            return _refused(request, f"{words}; name one of them with --model", scope, out, nearest="--model TYPE")
        able = whole
    total = {node.name: sum(kind.count for kind in kinds[node.name]) for node in able}
    free = {node.name: _free(node, kinds[node.name], limits.reservation) for node in able}
    needed = nodes_needed(request, free.values())
    nodes = needed or nodes_needed(request, total.values())
    if nodes is None:
        return _too_many(request, scope, out, total)
    serving = {node.name for node in able}
    excluded = tuple(
        node.name
        for node in partition
        if node.name not in serving
        # nodes without that type are out by themselves, unless they were to be
        and (not one_type or node.name in out or node not in scope)
    )
    assert request.n is not None
    shape = Shape(request.n, nodes, request.per_node, one_type, _nodeset(excluded))
    return Fit(shape, _why(request, shape, free, needed is not None), excluded)


def _excluded(request: Request, schedule: Schedule) -> set[str]:
    """Return the nodes that `--exclude` names. Raises UsageError for single GPUs, and for `--gpus`."""
    if request.picks:
        nodes = sorted({pick.node for pick in request.picks if pick.node is not None})
        where = f" --nodes '{','.join(nodes)}'" if nodes else ""
        raise UsageError(
            f"--gpus: through Slurm no single GPUs can be had, Slurm chooses them; try --n {len(request.picks)}{where}"
        )
    found: set[str] = set()
    for pick in request.exclude:
        if pick.node is None or pick.index is not None or pick.uuid is not None:
            raise UsageError(
                "--exclude: through Slurm whole nodes can be left out, not single GPUs, as Slurm chooses them; "
                f"try --exclude {pick.node or 'NODE'}"
            )
        found.add(pick.node)
    if unknown := sorted(found - schedule.nodes.keys()):
        raise UsageError(f"--exclude: Slurm knows no node {clean(unknown[0], 64)!r}")
    return found


def _in_partition(node: SchedulerNode, partitions: Sequence[str]) -> bool:
    return not partitions or not node.partitions or bool(set(partitions) & set(node.partitions))


def _present(gpus: Sequence[Gres]) -> list[Gres]:
    return [kind for kind in gpus if kind.count > 0]


def _kinds(request: Request, node: SchedulerNode) -> list[Gres]:
    """Return which of a node's GPUs serve the request. Raises UsageError when that cannot be told of any node."""
    found = _present(node.gpus)
    if request.model is not None:
        by_type = [kind for kind in found if kind.type and _is_model(kind.type, request.model)]
        by_feature = len(found) == 1 and any(_is_model(feature, request.model) for feature in node.features)
        found = by_type or (found if by_feature else [])
    if request.gpu_mem is not None:
        found = [kind for kind in found if (_memory(kind, node) or 0) >= request.gpu_mem]
    return found


def _is_model(name: str, model: str) -> bool:
    """Tell whether Slurm's word for a kind of GPU is what ``model`` asks for, blanks for ``_`` or not."""
    return matches(name, model) or matches(_plain(name), _plain(model))


def _plain(text: str) -> str:
    return re.sub(r"[\s_.-]+", " ", text)


def _memory(kind: Gres, node: SchedulerNode) -> int | None:
    """Return the bytes that a GPU has by its type's name or, where the node has one kind, by a feature's."""
    if slice_ := re.search(r"[0-9]g[._]?([0-9]+)gb", kind.type, re.IGNORECASE):
        return int(slice_[1]) * 10**9
    texts = [kind.type, *(node.features if len(_present(node.gpus)) == 1 else ())]
    found = [int(size) for text in texts for size in _SIZE.findall(_plain(text))]
    return found[0] * 10**9 if found else None


def _is_mig(type_: str) -> bool:
    return bool(_MIG_TYPE.search(type_))


def _asks_mig(request: Request) -> bool:
    return request.model is not None and bool(re.search(r"[0-9]g([._]|$)", request.model.lower()))


def _check_slices(request: Request, kinds: Mapping[str, Sequence[Gres]]) -> None:
    if request.n != 1 and any(_is_mig(kind.type) for of in kinds.values() for kind in of):
        raise UsageError("a process sees one MIG device: of these ask for one, --n 1")


def _free(node: SchedulerNode, kinds: Sequence[Gres], reservation: str) -> int:
    if node.flags & _CLOSED or ("reserved" in node.flags and (not reservation or node.reservation != reservation)):
        return 0
    used = {kind.type: kind.count for kind in node.used}
    return sum(max(0, kind.count - used.get(kind.type, 0)) for kind in kinds)


def _nodeset(names: Sequence[str]) -> str:
    """Return nodes as Slurm reads them: folded where each has one range."""
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
        spread = f"at most {spread}, the fewest"
    words = f"{asked_words(request)}: {spread}; free for Slurm: {shown or 'none'}"
    if not fits_now:
        words += ", so it has to wait"
    if shape.type:
        words += f"; type {shape.type}"
    return clean(words, 1000)


def _too_many(request: Request, scope: Sequence[SchedulerNode], out: set[str], total: Mapping[str, int]) -> Refusal:
    words = f"never possible here: {sum(total.values())} could serve if all were free"
    if len(total) > 1:
        words += f", at most {max(total.values())} on one node"
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
    return _refused(request, words, scope, out, nearest=" or ".join(options))


def _never(request: Request, scope: Sequence[SchedulerNode], out: set[str]) -> Refusal:
    kinds = sorted({clean(kind.type, 40) or "untyped" for node in scope for kind in _present(node.gpus)})
    sized = [_memory(kind, node) for node in scope for kind in _present(node.gpus)]
    words = f"no node of Slurm's serves; types of GPUs here: {', '.join(kinds) or 'none'}"
    nearest = ""
    if request.gpu_mem is not None and not any(sized):
        words += ", none of which tells how much memory it has"
        nearest = "--model TYPE without --gpu-mem, or --slurm=--constraint=FEATURE"
    elif request.model is not None:
        nearest = "without --model"
    return _refused(request, words, scope, out, nearest=nearest)


def _refused(request: Request, words: str, scope: Sequence[SchedulerNode], out: set[str], *, nearest: str) -> Refusal:
    gpus = tuple(
        RefusedGpu(node.name, index, "", "unknown", _why_not(request, node, kind, out))
        for node in scope
        for index, kind in enumerate(kind for kind in _present(node.gpus) for _ in range(min(kind.count, 64)))
    )
    message = f"asked for {asked_words(request)}; {words}"
    return Refusal(3, message + (f"; try {nearest}" if nearest else ""), gpus, nearest)


def _why_not(request: Request, node: SchedulerNode, kind: Gres, out: set[str]) -> str:
    if node.name in out:
        return "excluded"
    memory = _memory(kind, node)
    if request.model is not None and not _is_model(kind.type, request.model):
        return f"is of type {clean(kind.type, 40) or 'none'}, not {request.model}"
    if request.gpu_mem is not None and (memory or 0) < request.gpu_mem:
        return f"{format_size(memory)} by its type, {format_size(request.gpu_mem)} were asked for"
    return "could serve"
