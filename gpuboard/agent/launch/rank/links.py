"""The target ``gpuboard:links``: measures the links between the ranks and their all-reduce.

This source is executed in the node's training interpreter (Python 3.8 or later), without other modules of gpuboard.
It is the same for NCCL and gloo but for the device of the tensors.
"""

import time

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

_SIZES = (256, 16, 1)  # parts of the largest size, for the all-reduce
_MOST = 2000  # repetitions of one measurement
_PARTS = 3  # of a measurement, of which the fastest counts: a disturbance is shorter


class Links:
    """``measure`` takes about ``seconds``; ``largest`` is the size of its largest tensors in bytes."""

    def __init__(self, torch: "Any", device: "Any", seconds: float, largest: int) -> None:
        self._torch = torch
        self._distributed = torch.distributed
        self._device = device
        self._seconds = seconds
        self._largest = largest
        self._rank = self._distributed.get_rank()
        self._world = self._distributed.get_world_size()

    def measure(self) -> "Dict[str, Any]":
        """Return ``reductions`` of all ranks and ``transfers`` between neighbours in the ring of two ranks or more."""
        rounds = _rounds(self._world)
        share = self._seconds / 2 / len(_SIZES)
        reductions = [self._reduce(max(4, self._largest // part), share) for part in _SIZES]
        edges = [edge for found in rounds for edge in found]
        times = self._tensor(8 * 2 * len(edges), self._torch.float64)
        share = self._seconds / 2 / len(rounds) / 2
        for found in rounds:
            for backwards in (False, True):
                self._distributed.barrier()
                mine = next((edge for edge in found if self._rank in edge), None)
                if mine is None:
                    continue
                source, target = mine[::-1] if backwards else mine
                took_s = self._transfer(source, target, share)
                if took_s is not None:
                    times[2 * edges.index(mine) + backwards] = took_s
        self._distributed.all_reduce(times)  # each one was filled in by one rank
        took_s = times.view(-1, 2).tolist()
        transfers = [
            {"ranks": list(edge), "bytes": self._largest, "there_s": took_s[at][0], "back_s": took_s[at][1]}
            for at, edge in enumerate(edges)
        ]
        return {"reductions": reductions, "transfers": transfers}

    def _reduce(self, size: int, share_s: float) -> "Dict[str, Any]":
        """Measure the all-reduce of ``size`` bytes for about ``share_s``."""
        value = self._tensor(size, self._torch.float32)

        def repeat(count: int) -> None:
            for _ in range(count):
                self._distributed.all_reduce(value)
            self._synchronize()

        repeat(2)  # connections are made at the first one
        took_s = self._slowest(self._timed(lambda: repeat(3)) / 3)
        count = _count(share_s / _PARTS, took_s)
        self._distributed.barrier()
        took_s = min(self._slowest(self._timed(lambda: repeat(count)) / count) for _ in range(_PARTS))
        return {"bytes": value.numel() * 4, "count": count, "took_s": took_s}

    def _transfer(self, source: int, target: int, share_s: float) -> "Optional[float]":
        """Send from one rank to another for about ``share_s``; return the seconds of one transfer to the sender."""
        value = self._tensor(self._largest, self._torch.float32)
        number = self._tensor(8, self._torch.float64)
        sends = self._rank == source

        def repeat(count: int) -> None:
            for _ in range(count):
                if sends:
                    self._distributed.send(value, target)
                else:
                    self._distributed.recv(value, source)
            if sends:  # all have arrived when the answer has
                self._distributed.recv(number, target)
            else:
                self._distributed.send(number, source)
            self._synchronize()

        repeat(1)
        took_s = self._timed(lambda: repeat(2)) / 2
        if sends:
            number[0] = count = _count(share_s / _PARTS, took_s)
            self._distributed.send(number, target)
            return min(self._timed(lambda: repeat(count)) / count for _ in range(_PARTS))
        self._distributed.recv(number, source)
        count = int(number.item())
        for _ in range(_PARTS):
            repeat(count)
        return None

    def _tensor(self, size: int, dtype: "Any") -> "Any":
        """Return a tensor of ``size`` bytes. Zeros: sums of anything else would grow without limit."""
        width = 8 if dtype == self._torch.float64 else 4
        return self._torch.zeros(max(1, size // width), dtype=dtype, device=self._device)

    def _timed(self, call: "Callable[[], None]") -> float:
        self._synchronize()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def _slowest(self, took_s: float) -> float:
        """Return the longest time of all ranks."""
        value = self._tensor(8, self._torch.float64)
        value[0] = took_s
        self._distributed.all_reduce(value, op=self._distributed.ReduceOp.MAX)
        return float(value.item())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()


def _count(share_s: float, took_s: float) -> int:
    """Return how often to repeat what took ``took_s`` once."""
    return max(1, min(_MOST, int(share_s / max(took_s, 1e-9))))


def _rounds(world: int) -> "List[List[Tuple[int, int]]]":
    """Return the pairs of neighbours in the ring of ranks, in rounds in which each rank is in one pair at most.

    >>> _rounds(5)
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]
    """
    ring = [(rank, (rank + 1) % world) for rank in range(world if world > 2 else 1)]
    last = [ring.pop()] if len(ring) > 1 and world % 2 else []
    return [found for found in (ring[::2], ring[1::2], last) if found]
