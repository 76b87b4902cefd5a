"""Text of dialog fields → a request; answers of the policy and times → text for users. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Protocol

from gpuboard.board.scene import Scene
from gpuboard.leases.picks import parse_picks
from gpuboard.model.request import ChosenGpu, Pick, Refusal, Request, slots
from gpuboard.model.snapshot import mig_number
from gpuboard.model.units import format_duration, is_whole, parse_size

MOST = 8192  # GPUs in one request: the largest cluster that is tested
_NODES_NAMED = 4  # nodes that are named in a sentence
_INSTEAD = (  # command-line options in a refusal → the board's terms
    (r"--max-nodes (\d+)", r"at most \1 nodes"),
    (r"--n 1\b", "1 GPU"),
    (r"--n (\d+)", r"\1 GPUs"),
    (r"--gpu-mem (\S+)", r"\1 of memory"),
    (r"without --model", "any model"),
    (r"--model (\S+)", r"model \1"),
    (r"--gpus: ", ""),
    (r" \(--allow-sick takes it\)", ""),
    (r"--allow-sick", "a sick GPU that you select"),
    (r"named by --gpus", "named"),
    (r"--gpus names", "you named"),
    (r"--gpus (\S)", r"\1"),
    (r"--wait", "a watch (w) that notifies you"),
)


class _Placed(Protocol):
    @property
    def node(self) -> str: ...
    @property
    def index(self) -> int | None: ...


def which(text: str) -> str:
    """Check a choice of GPUs: a number, ``gpu01:0,3@gpu02:1`` or UUIDs; return the error or ""."""
    text = text.strip()
    if is_whole(text):
        return "" if 1 <= int(text) <= MOST else f"a number from 1 to {MOST}"
    try:
        parse_picks(text)
    except ValueError:
        return "write 2 or gpu01:0,3@gpu02:1"
    return ""


def request_of(values: Mapping[str, str], marked: Mapping[str, Sequence[Pick]]) -> Request:
    """Return the request for a dialog's valid fields ``gpus, model, memory, nodes``.

    ``marked``: texts of ``gpus`` that mean GPUs known by UUID. Model, memory and nodes apply to a number only.
    """
    text = values["gpus"]
    if text in marked:
        return Request(picks=tuple(marked[text]))
    if not is_whole(text):
        return Request(picks=parse_picks(text))
    return Request(
        n=int(text),
        model=values.get("model") or None,
        gpu_mem=parse_size(values["memory"]) if values.get("memory") else None,
        max_nodes=int(values["nodes"]) if values.get("nodes") else None,
    )


def request_words(request: Request) -> str:
    """Return a request for a number of GPUs as text: ``4 free H100 with 40 GiB on one node``."""
    words = [f"{request.n} free", request.model or ("GPU" if request.n == 1 else "GPUs")]
    if request.gpu_mem is not None:
        words.append(f"with {request.gpu_mem / 2**30:g} GiB")
    if request.max_nodes is not None:
        words.append("on one node" if request.max_nodes == 1 else f"on at most {request.max_nodes} nodes")
    return " ".join(words)


def places_words(gpus: Iterable[_Placed]) -> str:
    """Return GPUs as ``gpu01:0-2,5@gpu02:1``, by node and index."""
    return "@".join(f"{node}:{_slots(on_node)}" for node, on_node in _by_node(gpus))


def gpus_words(gpus: Iterable[_Placed]) -> str:
    """Return the names of GPUs: ``sim02 GPU 3``, ``gpu01 GPUs 0-3,7 and gpu02 GPU 1``; of many nodes the first ones."""
    parts, count = [], 0
    for node, held in _by_node(gpus):
        count += len(held)
        kind = "GPU" if all(_device(gpu) is None for gpu in held) else "MIG device"
        parts.append(f"{node} {kind}{'s' if len(held) > 1 else ''} {_slots(held)}")
    if len(parts) > _NODES_NAMED:
        more = len(parts) - _NODES_NAMED + 1
        parts[_NODES_NAMED - 1 :] = [f"{more} more nodes: {count} GPUs in all"]
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + "".join(parts[-1:])


def _by_node(gpus: Iterable[_Placed]) -> Iterator[tuple[str, list[_Placed]]]:
    ordered = sorted(gpus, key=lambda gpu: (gpu.node, gpu.index is None, gpu.index or 0, _device(gpu) or 0))
    return ((node, [*on_node]) for node, on_node in groupby(ordered, key=lambda gpu: gpu.node))


def _slots(gpus: Sequence[_Placed]) -> str:
    return slots([(gpu.index, _device(gpu)) for gpu in gpus])


def _device(gpu: _Placed) -> int | None:
    found: int | None = getattr(gpu, "mig", None)
    return found


def picks_of(uuids: Iterable[str], scene: Scene) -> tuple[str, tuple[Pick, ...]]:
    """Return those of the GPUs and MIG devices that are in ``scene``, as ``gpu01:0-2@gpu02:1`` and as picks by UUID."""
    found = [(scene.devices[uuid], uuid) for uuid in uuids if uuid in scene.devices]
    gpus = (ChosenGpu(place.node.name, place.gpu.index, uuid, mig=mig_number(place.gpu, uuid)) for place, uuid in found)
    words = places_words(gpus)
    return words, tuple(Pick(place.node.name, None, uuid) for place, uuid in found)


def refusal_words(refusal: Refusal) -> tuple[str, str]:
    """Return the reason of a refusal and the nearest request that would work or "", in the board's terms."""
    return plain(refusal.message.removesuffix(f"; try {refusal.nearest}")), plain(refusal.nearest)


def plain(text: str) -> str:
    """Return a message of a command with its options in the board's terms."""
    for pattern, words in _INSTEAD:
        text = re.sub(pattern, words, text)
    return text


def lasting(seconds: float) -> str:
    """Return a duration as people type it: ``8h``, not ``8h00m``."""
    return format_duration(seconds).replace("h00m", "h").replace("d00h", "d")


def local(at: float, now: float) -> str:
    """Return epoch seconds as a local time: ``14:05``; on another day ``Tue 14:05``, a week away ``31 Jan 14:05``."""
    then, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    if then.date() == today.date():
        return f"{then:%H:%M}"
    return f"{then:%a %H:%M}" if abs(at - now) < 6 * 86400 else f"{then:%d %b %H:%M}"
