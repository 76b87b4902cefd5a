"""How many GPUs and nodes a cluster has, by model and state: what the header shows (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from gpuboard.model.gpu import short_model
from gpuboard.model.snapshot import NodeView, judged

# for Counter, which counts in C: 8,000 GPUs per second, most of them equal
_MODEL_AND_STATE = attrgetter("name", "state")
_DELAY = attrgetter("delay_s")


class Count(NamedTuple):
    """How many GPUs of a model there are in each state."""

    model: str
    total: int
    states: Counter[str]


class Sums(NamedTuple):
    """How many GPUs and nodes there are, by model and state."""

    models: list[Count]  # most GPUs first
    nodes: int
    unreachable: int
    connecting: int  # no reading and no failure yet
    stale: int
    oldest_s: float | None  # age of the oldest values, stale and unreachable nodes included; None: no reading

    @property
    def free(self) -> int:
        """How many GPUs are free."""
        return sum(count.states["free"] for count in self.models)


def sums_of(nodes: Sequence[NodeView]) -> Sums:
    """Count the GPUs of nodes. A GPU in MIG mode counts as its devices, which are models of their own."""
    every = list(chain.from_iterable(map(judged, nodes)))
    pairs: Counter[tuple[str, str]] = Counter(map(_MODEL_AND_STATE, every))
    for gpu in [gpu for gpu in every if gpu.mig]:
        pairs[gpu.name, gpu.state] -= 1
        for device in gpu.mig:
            pairs[f"{short_model(gpu.name)} {device.profile}", device.state] += 1
    states: Counter[str] = Counter()
    ages = []
    delayed = any(map(_DELAY, every))
    for node in nodes:
        states["connecting" if node.connecting else node.state] += 1
        if node.age_s is not None:
            ages.append(node.age_s + (max(map(_DELAY, judged(node)), default=0.0) if delayed else 0.0))
    models: dict[str, Counter[str]] = {}
    for (name, state), count in (+pairs).items():
        models.setdefault(short_model(name), Counter())[state] += count
    counts = [Count(model, states.total(), states) for model, states in models.items()]
    counts.sort(key=lambda count: (-count.total, count.model))
    return Sums(
        counts, len(nodes), states["unreachable"], states["connecting"], states["stale"], max(ages, default=None)
    )
