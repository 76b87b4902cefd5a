"""Refusals: the reason for every GPU, and the nearest request that would succeed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from gpuboard.leases.policy.candidates import Candidate, by_node, evaluate, is_current, nodes_needed
from gpuboard.model.request import Choice, Pick, Refusal, RefusalCode, RefusedGpu, Request, slot
from gpuboard.model.snapshot import NodeView, Snapshot, free_memory
from gpuboard.model.units import format_size, ranges

Choose = Callable[[Request, Snapshot], Choice | Refusal]

_SHOWN = 4  # nodes named in a message


def refuse(request: Request, snapshot: Snapshot, candidates: Sequence[Candidate]) -> Refusal:
    """Return the refusal of a request for ``n`` GPUs that does not fit now.

    Code 3 only if every node was read and the request would not fit even if all their GPUs were free.
    """
    assert request.n is not None
    unread = _unread(snapshot.nodes)
    ever = [len(gpus) for gpus in by_node([c for c in candidates if not c.never]).values()]
    code: RefusalCode = 3 if not unread and nodes_needed(request, ever) is None else 4
    nearest = _nearest(request, snapshot, candidates, code)
    message = f"requested {described(request)}; "
    if _one_mig_device(request, snapshot, candidates):
        message += "a process can use only one MIG device"
    else:
        message += _free(candidates) + (f"; {never_possible(ever)}" if code == 3 else "")
    if unread:
        message += f"; {'; '.join(unread)}"
    return Refusal(code, message + (f"; try {nearest}" if nearest else ""), _reasons(candidates), nearest)


def refuse_picks(
    request: Request, snapshot: Snapshot, named: Sequence[Candidate], missing: Sequence[Pick], choose: Choose
) -> Refusal:
    """Return the refusal of a request for named GPUs, some of which are not available or do not exist.

    ``choose``: the policy, which finds alternatives.
    """
    never = bool(missing) or any(c.never for c in named)  # as far as nodes were read
    names = {pick.node for pick in request.picks} | {c.node for c in named}
    nodes = sorted(snapshot.nodes, key=lambda node: node.name not in names)  # the named ones are in the message
    nodes = [node for node in nodes if never or node.name in names]
    unread = _unread(nodes)
    code: RefusalCode = 3 if never and not unread else 4
    why = _unavailable(named)
    read = {node.name for node in nodes if is_current(node)}
    why += [f"no GPU {_name(pick)}" for pick in missing if pick.node is None or pick.node in read]
    why += unread
    options = [_alternative(request, snapshot, named, choose), "--wait" if code == 4 and _may_change(nodes) else ""]
    nearest = " or ".join(option for option in options if option)
    return Refusal(code, "; ".join(why) + (f"; try {nearest}" if nearest else ""), _reasons(named), nearest)


def _unavailable(named: Sequence[Candidate]) -> list[str]:
    """Return why GPUs are not available, once for all with the same reason: ``gpu01:0-3@gpu02:1 are busy: …``."""
    alike: dict[tuple[str, str], list[Candidate]] = {}
    for one in named:
        if one.reason is not None:
            alike.setdefault((one.state, one.reason), []).append(one)
    return [
        f"{_places(those)} {'is' if len(those) == 1 else 'are'} {state}: {reason}"
        for (state, reason), those in alike.items()
    ]


def _places(those: Sequence[Candidate]) -> str:
    parts = []
    for on_node in by_node(those).values():
        whole = all(one.mig is None for one in on_node)
        slots = ranges({one.index for one in on_node}) if whole else ",".join(one.slot for one in on_node)
        parts.append(f"{on_node[0].node}:{slots}")
    return "@".join(parts)


def _reasons(candidates: Sequence[Candidate]) -> tuple[RefusedGpu, ...]:
    return tuple(RefusedGpu(c.node, c.index, c.uuid, c.state, c.reason or "available", c.mig) for c in candidates)


def _unread(nodes: Sequence[NodeView]) -> list[str]:
    """Return messages about nodes without a current reading, and about nodes that cannot hold claims."""
    unread = [f"{node.name} ({node.error or node.state})" for node in nodes if not is_current(node)]
    failed = [f"{node.name} ({node.claims_error})" for node in nodes if is_current(node) and node.claims_error]
    found = {"not read": unread, "cannot be reserved": failed}
    return [f"{what}: {_shortened(those)}" for what, those in found.items() if those]


def _may_change(nodes: Sequence[NodeView]) -> bool:
    """Return whether waiting may help: not where every node cannot hold claims."""
    return not all(is_current(node) and node.claims_error for node in nodes)


def _shortened(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(nodes[:_SHOWN]) + more


def _name(pick: Pick) -> str:
    where = f"{pick.node}:" if pick.node else ""
    return where + (pick.uuid if pick.uuid is not None else slot(pick.index, pick.mig))


def described(request: Request) -> str:
    """Return a request as text: ``4 GPUs, 2 on each node``."""
    text = f"{request.n} GPU{'s' if request.n != 1 else ''}"
    if request.per_node is not None:
        text += f", {request.per_node} on each node"
    if request.max_nodes is not None:
        text += " on one node" if request.max_nodes == 1 else f" on at most {request.max_nodes} nodes"
    if request.model is not None:
        text += f" of model {request.model}"
    if request.gpu_mem is not None:
        text += f" with {format_size(request.gpu_mem)} free"
    return text


def never_possible(counts: Collection[int]) -> str:
    """Return why a request for a number of GPUs cannot be met by nodes with ``counts`` matching GPUs."""
    text = f"never possible here: matching GPUs in total: {sum(counts)}"
    return text + (f", at most {max(counts)} on one node" if len(counts) > 1 else "")


def _one_mig_device(request: Request, snapshot: Snapshot, candidates: Sequence[Candidate]) -> bool:
    """Return whether only MIG devices match a request for several GPUs."""
    return all(c.never for c in candidates) and any(
        c.mig is not None and not c.never for c in evaluate(_single(request), snapshot, ())
    )


def _single(request: Request) -> Request:
    """Return the request for one GPU in place of several."""
    return msgspec.structs.replace(request, n=1, per_node=None)


def _free(candidates: Sequence[Candidate]) -> str:
    """Return the free GPUs by node and, by state, the number of others: ``gpu01 has 3 free (5 busy)``."""
    able = [c for c in candidates if not c.never]
    if candidates and not able:
        return "no GPU matches"
    free = by_node([c for c in able if c.reason is None])
    if free:
        fullest = sorted(free.items(), key=lambda item: (-len(item[1]), item[0]))
        text = _shortened([f"{name} has {len(gpus)} free" for name, gpus in fullest])
    else:
        text = "no GPU is free"
    states = Counter(_category(c) for c in able if c.reason is not None)
    others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    unmatched = sum(c.never for c in candidates)
    others += (", " if others and unmatched else "") + (f"{unmatched} not matching" if unmatched else "")
    return text + (f" ({others})" if others else "")


def _category(candidate: Candidate) -> str:
    if candidate.state != "free":
        return candidate.state
    if (candidate.reason or "").startswith("sick"):
        return "free but sick"
    return "with too little free memory" if (candidate.reason or "").endswith("requested") else "not reservable"


def _nearest(request: Request, snapshot: Snapshot, candidates: Sequence[Candidate], code: int) -> str:
    """Return options that would make the request work, the nearest first: ``--max-nodes 2, --n 3 or --wait``."""
    free = [len(gpus) for gpus in by_node([c for c in candidates if c.reason is None]).values()]
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
    if _one_mig_device(request, snapshot, candidates) and _fits(_single(request), snapshot):
        options.append("--n 1")
    if not request.allow_sick and _fits(msgspec.structs.replace(request, allow_sick=True), snapshot):
        options.append("--allow-sick")
    if request.gpu_mem is not None and (size := _memory_that_fits(request, snapshot)):
        options.append(f"--gpu-mem {size}")
    if request.exclude and _fits(msgspec.structs.replace(request, exclude=()), snapshot):
        options.append("without --exclude")
    is_model_taken = request.model is not None and not _model_is_free(request, snapshot)
    if is_model_taken and _fits(msgspec.structs.replace(request, model=None), snapshot):
        options.append("without --model")
    if code == 4 and _may_change(snapshot.nodes):
        options.append("--wait")
    return " or ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))


def _model_is_free(request: Request, snapshot: Snapshot) -> bool:
    """Return whether any GPU of the requested model is free, also an excluded one or one with too little memory."""
    return _fits(Request(n=1, model=request.model), snapshot)


def _fits(request: Request, snapshot: Snapshot) -> bool:
    free = by_node([c for c in evaluate(request, snapshot, ()) if c.reason is None])
    return nodes_needed(request, [len(gpus) for gpus in free.values()]) is not None


def _memory_that_fits(request: Request, snapshot: Snapshot) -> str | None:
    """Return the largest ``--gpu-mem``, in whole GiB, that would let the request succeed now; None if none does."""
    unlimited = msgspec.structs.replace(request, gpu_mem=None)
    sizes = sorted(
        {free // 2**30 for node in snapshot.nodes for gpu in node.gpus if (free := free_memory(gpu)) is not None},
        reverse=True,
    )
    for size in sizes:
        if 0 < size * 2**30 < (request.gpu_mem or 0) and _fits(
            msgspec.structs.replace(unlimited, gpu_mem=size * 2**30), snapshot
        ):
            return f"{size}GiB"
    return None


def _alternative(request: Request, snapshot: Snapshot, named: Sequence[Candidate], choose: Choose) -> str:
    """Return free GPUs as ``--gpus gpu01:4,5``: as many as possible of the named models, else as many of any model."""
    models = {candidate.gpu.name for candidate in named}
    nodes = [
        msgspec.structs.replace(node, gpus=[gpu for gpu in node.gpus if gpu.name in models]) for node in snapshot.nodes
    ]
    alike = msgspec.structs.replace(snapshot, nodes=nodes)
    for n, among in (*((n, alike) for n in range(len(request.picks), 0, -1)), (len(request.picks), snapshot)):
        plain = msgspec.structs.replace(request, picks=(), n=n)
        if _fits(plain, among):
            found = choose(plain, among)
            assert isinstance(found, Choice)
            places: dict[str, list[str]] = {}
            for gpu in found.gpus:
                places.setdefault(gpu.node, []).append(slot(gpu.index, gpu.mig))
            return "--gpus " + "@".join(f"{node}:{','.join(indexes)}" for node, indexes in places.items())
    return ""
