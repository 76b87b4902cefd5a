"""Whether a GPU of the run may be the reason for a failure or a stall (pure)."""

from __future__ import annotations

import re

from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.snapshot import NodeView, Snapshot
from gpuboard.model.text import clean

_ERROR = re.compile(r"CUDA|NCCL|cublas|cudnn|cufft|\bGPU\b", re.IGNORECASE)


def names_gpu(text: str) -> bool:
    """Whether an error may come from a GPU or its driver."""
    return bool(_ERROR.search(text))


def damaged(rank_map: RankMap, snapshot: Snapshot) -> list[str]:
    """Return a line for each rank whose GPU is broken, sick or gone; nodes without a reading are left out."""
    views = {view.name: view for view in snapshot.nodes if view.state == "up" and view.gpus}
    found = [(rank, _damage(rank, views[rank.node])) for rank in rank_map.ranks if rank.node in views]
    return [f"rank {rank.rank} ({rank.node}:{rank.index}): {clean(words, 300)}" for rank, words in found if words]


def _damage(rank: Rank, view: NodeView) -> str:
    gpu = next((g for g in view.gpus if rank.uuid in {g.uuid, *(m.uuid for m in g.mig)}), None)
    if gpu is None:
        return f"GPU {rank.index} is lost: the driver no longer lists {rank.uuid}; the node's kernel log may explain it"
    if gpu.state == "broken":
        return f"GPU {rank.index} is broken: {gpu.reason}"
    return f"GPU {rank.index} is sick: {'; '.join(gpu.sick)}" if gpu.sick else ""
