"""Why a request was not granted, and the nearest one that would work. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gpuboard.leases.policy.candidates import Candidate, by_node, look, nodes_needed, read
from gpuboard.model.request import Choice, Pick, Refusal, RefusalCode, RefusedGpu, Request, slot
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.units import format_size

Choose = Callable[[Request, Snapshot], Choice | Refusal]

_SHOWN = 4  # nodes named in a message


def refuse(request: Request, snapshot: Snapshot, looked: Sequence[Candidate]) -> Refusal:
    """Return the refusal of a request for ``n`` GPUs that does not fit now.

    Code 3 only when every node was read and the request would not fit if all their GPUs were free.
    """
    assert request.n is not None
    unread = _unread(snapshot)
    ever = [len(gpus) for gpus in by_node([c for c in looked if not c.never]).values()]
    code: RefusalCode = 3 if not unread and nodes_needed(request, ever) is None else 4
    nearest = _nearest(request, snapshot, looked, code)
    message = f"asked for {asked_words(request)}; {_have(looked)}"
    if code == 3:
        message += f"; never possible here: {sum(ever)} could serve if all were free"
    if unread:
        message += f"; {'; '.join(unread)}"
    return Refusal(code, message + (f"; try {nearest}" if nearest else ""), _reasons(looked), nearest)


def refuse_picks(
    request: Request, snapshot: Snapshot, named: Sequence[Candidate], missing: Sequence[Pick], choose: Choose
) -> Refusal:
    """Return the refusal of a request for named GPUs, some of which are taken or not there.

    ``choose``: the policy, which looks for others in their place.
    """
    unread = _unread(snapshot)
    absent = [_pick_words(pick) for pick in missing]
    code: RefusalCode = 3 if not unread and (missing or any(c.never for c in named)) else 4
    words = [f"{c.place} is {c.state}: {c.why_not}" for c in named if c.why_not is not None]
    words += [f"there is no GPU {pick}" for pick in absent]
    words += unread
    options = [_instead(request, snapshot, named, choose), "--wait" if code == 4 else ""]
    nearest = " or ".join(option for option in options if option)
    return Refusal(code, "; ".join(words) + (f"; try {nearest}" if nearest else ""), _reasons(named), nearest)


def _reasons(looked: Sequence[Candidate]) -> tuple[RefusedGpu, ...]:
    return tuple(RefusedGpu(c.node, c.index, c.uuid, c.state, c.why_not or "could be had", c.mig) for c in looked)


def _unread(snapshot: Snapshot) -> list[str]:
    """Return words about nodes that say nothing, and about nodes that hold no reservations."""
    silent = [f"{node.name} ({node.error or node.state})" for node in snapshot.nodes if not read(node)]
    unfit = [f"{node.name} ({node.claims_error})" for node in snapshot.nodes if read(node) and node.claims_error]
    found = {"not read": silent, "cannot be reserved": unfit}
    return [f"{words}: {_some(nodes)}" for words, nodes in found.items() if nodes]


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def _pick_words(pick: Pick) -> str:
    where = f"{pick.node}:" if pick.node else ""
    return where + (pick.uuid if pick.uuid is not None else slot(pick.index, pick.mig))


def asked_words(request: Request) -> str:
    """Return what was asked for: ``4 GPUs, 2 on each node``."""
    words = f"{request.n} GPU{'s' if request.n != 1 else ''}"
    if request.per_node is not None:
        words += f", {request.per_node} on each node"
    if request.max_nodes is not None:
        words += " on one node" if request.max_nodes == 1 else f" on at most {request.max_nodes} nodes"
    if request.model is not None:
        words += f" of model {request.model}"
    if request.gpu_mem is not None:
        words += f" with {format_size(request.gpu_mem)} free"
    return words


def _have(looked: Sequence[Candidate]) -> str:
    able = [c for c in looked if not c.never]
    free = by_node([c for c in able if c.why_not is None])
    if free:
        fullest = sorted(free.items(), key=lambda item: (-len(item[1]), item[0]))
        words = _some([f"{name} has {len(gpus)} free" for name, gpus in fullest])
    else:
        words = "none is free"
    states = Counter(_why_not(c) for c in able if c.why_not is not None)
    others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    unfit = sum(c.never for c in looked)
    others += (", " if others and unfit else "") + (f"{unfit} cannot serve this request" if unfit else "")
    return words + (f" ({others})" if others else "")


def _why_not(candidate: Candidate) -> str:
    if candidate.state != "free":
        return candidate.state
    if (candidate.why_not or "").startswith("sick"):
        return "free but sick"
    return "free but too full" if (candidate.why_not or "").endswith("were asked for") else "not reservable"


def _nearest(request: Request, snapshot: Snapshot, looked: Sequence[Candidate], code: int) -> str:
    """Return options that would make the request work, the nearest first: ``--max-nodes 2, --n 3 or --wait``."""
    free = [len(gpus) for gpus in by_node([c for c in looked if c.why_not is None]).values()]
    options: list[str] = []
    without_limit = msgspec.structs.replace(request, max_nodes=None)
    if request.max_nodes is not None and not request.one_node and (needed := nodes_needed(without_limit, free)):
        options.append(f"--max-nodes {needed}")
    if request.per_node is not None and nodes_needed(msgspec.structs.replace(request, per_node=None), free):
        options.append(f"--n {request.n} without --per-node")
    step = request.per_node or 1
    most = min((request.n or 0) - step, sum(free) // step * step)
    for n in range(most, 0, -step):
        if nodes_needed(msgspec.structs.replace(request, n=n), free):
            options.append(f"--n {n}")
            break
    if not request.allow_sick and _works(msgspec.structs.replace(request, allow_sick=True), snapshot):
        options.append("--allow-sick")
    if request.gpu_mem is not None and (size := _memory_that_fits(request, snapshot)):
        options.append(f"--gpu-mem {size}")
    if request.exclude and _works(msgspec.structs.replace(request, exclude=()), snapshot):
        options.append("without --exclude")
    leaves_model = request.model is not None and not _model_is_free(request, snapshot)
    if leaves_model and _works(msgspec.structs.replace(request, model=None), snapshot):
        options.append("without --model")
    if code == 4:
        options.append("--wait")
    return " or ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))


def _model_is_free(request: Request, snapshot: Snapshot) -> bool:
    """Tell whether a GPU of the model asked for is free, too small or excluded ones included."""
    return _works(Request(n=1, model=request.model), snapshot)


def _works(request: Request, snapshot: Snapshot) -> bool:
    """Tell whether the request could be had now."""
    free = by_node([c for c in look(request, snapshot, ()) if c.why_not is None])
    return nodes_needed(request, [len(gpus) for gpus in free.values()]) is not None


def _memory_that_fits(request: Request, snapshot: Snapshot) -> str | None:
    """Return the largest whole number of GiB that as many free GPUs have, None when there is none."""
    unlimited = msgspec.structs.replace(request, gpu_mem=None)
    sizes = sorted(
        {(gpu.memory_total - gpu.memory_used) // 2**30 for node in snapshot.nodes for gpu in node.gpus
         if gpu.memory_total is not None and gpu.memory_used is not None},
        reverse=True,
    )  # fmt: skip
    for size in sizes:
        if 0 < size * 2**30 < (request.gpu_mem or 0) and _works(
            msgspec.structs.replace(unlimited, gpu_mem=size * 2**30), snapshot
        ):
            return f"{size}GiB"
    return None


def _instead(request: Request, snapshot: Snapshot, named: Sequence[Candidate], choose: Choose) -> str:
    """Return as many other GPUs that are free, as ``--gpus gpu01:4,5``; of the models that were named while any is.

    Fewer of these where there are not so many.
    """
    models = {candidate.gpu.name for candidate in named}
    nodes = [
        msgspec.structs.replace(node, gpus=[gpu for gpu in node.gpus if gpu.name in models]) for node in snapshot.nodes
    ]
    alike = msgspec.structs.replace(snapshot, nodes=nodes)
    for n, among in (*((n, alike) for n in range(len(request.picks), 0, -1)), (len(request.picks), snapshot)):
        plain = msgspec.structs.replace(request, picks=(), n=n)
        if _works(plain, among):
            found = choose(plain, among)
            assert isinstance(found, Choice)
            places: dict[str, list[str]] = {}
            for gpu in found.gpus:
                places.setdefault(gpu.node, []).append(slot(gpu.index, gpu.mig))
            return "--gpus " + "@".join(f"{node}:{','.join(indexes)}" for node, indexes in places.items())
    return ""
