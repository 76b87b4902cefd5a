"""Runs without a fault, of many shapes: ``healthy.py SHAPE``. Ranks wait for others, for seconds, for good reasons."""

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
random.seed(RANK)


def tokenize(seconds: float) -> int:
    """Compute in Python, in changing functions, as a script does that prepares its data."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        text = " ".join(str(math.sqrt(number)) for number in range(2000))
        count += len({word[:3] for word in text.split()})
        count += sum(sorted(map(len, text.split())))
    return count


def evaluate(seconds: float) -> None:
    """Compute in torch."""
    until, model, batch = time.monotonic() + seconds, nn.Linear(256, 256), torch.randn(512, 256)
    while time.monotonic() < until:
        with torch.no_grad():
            for _ in range(20):
                batch = torch.tanh(model(batch))
            torch.sort(batch, dim=0)


def on_gpu(seconds: float) -> None:
    """Wait as for a kernel on a GPU."""
    time.sleep(seconds * random.uniform(0.9, 1.1))


def network() -> DistributedDataParallel:
    """Return a small model."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))


def train(steps: int, each: Callable[[int], object]) -> None:
    """Train a small model; ``each`` is called in every step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        each(step)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def slow_start() -> None:
    """Rank 0 prepares the data for all."""
    if RANK == 0:
        tokenize(20)
    distributed.barrier()


def slow_steps() -> None:
    """All ranks wait for their GPUs."""
    train(3, lambda _: on_gpu(10))


def computing() -> None:
    """All ranks compute for long."""
    train(3, lambda _: evaluate(6))


def checkpoint() -> None:
    """Rank 0 writes for long while the others wait."""

    def save(step: int) -> None:
        if RANK == 0 and step == 1:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                torch.save(torch.randn(2**22), "checkpoint.pt")
                descriptor = os.open("checkpoint.pt", os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            Path("checkpoint.pt").unlink()
        distributed.barrier()

    train(3, save)


def accumulation() -> None:
    """Gradients are reduced in every fourth step only."""
    model = network()
    for step in range(12):
        on_gpu(1.5)
        if step % 4:
            with model.no_sync():
                model(torch.randn(4, 64)).sum().backward()
        else:
            model(torch.randn(4, 64)).sum().backward()


def joined() -> None:
    """Ranks have different numbers of steps, and join."""
    model = network()
    with Join([model]):
        for _ in range(3 + 2 * RANK):
            on_gpu(1.5)
            model(torch.randn(4, 64)).sum().backward()


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """Items that take long to load."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        evaluate(1.0)
        return torch.randn(64)


def loader() -> None:
    """Workers load the data."""
    batches = iter(torch.utils.data.DataLoader(Items(), num_workers=2))
    train(8, lambda _: next(batches))


def tiny() -> None:
    """Many small collectives."""
    for _ in range(20_000):
        distributed.all_reduce(torch.ones(1))


def large() -> None:
    """Collectives that take seconds."""
    for _ in range(4):
        distributed.all_reduce(torch.ones(2**25))


def subgroups() -> None:
    """The last rank computes alone for long while the others reduce in a group of theirs, and then wait for it."""
    group = distributed.new_group(list(range(SIZE - 1)))
    if RANK == SIZE - 1:
        evaluate(15)
    else:
        for _ in range(200):
            distributed.all_reduce(torch.ones(8), group=group)
            time.sleep(0.02)
    distributed.barrier()


def barriers() -> None:
    """Nothing but barriers, of ranks that come at different times."""
    for _ in range(8):
        time.sleep(random.uniform(0, 4))
        distributed.barrier()


def evaluation() -> None:
    """Rank 0 alone evaluates."""

    def each(step: int) -> None:
        if RANK == 0 and step == 1:
            evaluate(25)

    train(3, each)


def gpu_evaluation() -> None:
    """Rank 0 alone evaluates on its GPU."""

    def each(step: int) -> None:
        if RANK == 0 and step == 1:
            for _ in range(60):
                on_gpu(0.4)

    train(3, each)


def last_save() -> None:
    """Rank 0 saves after the others have ended."""
    train(3, lambda _: None)
    if RANK == 0:
        until = time.monotonic() + 15
        while time.monotonic() < until:
            torch.save(torch.randn(2**20), "last.pt")
            time.sleep(0.3)
        Path("last.pt").unlink()


def build() -> None:
    """Rank 0 compiles an extension, in processes below it."""
    if RANK == 0:
        code = "import time; t = time.monotonic()\nwhile time.monotonic() < t + 12: sum(range(1000))"
        subprocess.run(["sh", "-c", f'{sys.executable} -c "$0"', code], check=True)
    distributed.barrier()
    train(3, lambda _: None)


def gathering() -> None:
    """Collectives whose ranks have different parts in them."""
    for step in range(30):
        outputs = [torch.zeros(4) for _ in range(SIZE)] if RANK == 0 else None
        distributed.gather(torch.ones(4), outputs, dst=0)
        distributed.broadcast(torch.ones(step + 1), src=step % SIZE)
        gathered: list[object] = [None] * SIZE
        distributed.all_gather_object(gathered, {"rank": RANK, "text": "x" * (RANK + step)})
        on_gpu(0.3)


def imbalance() -> None:
    """The ranks' work changes from step to step."""
    train(100, lambda _: time.sleep(random.uniform(0.05, 0.3)))


def turns() -> None:
    """Another rank has more work every few steps."""
    train(100, lambda step: time.sleep(0.3 if step // 4 % SIZE == RANK else 0.15))


def warming() -> None:
    """Rank 0 fills a cache in its first steps; later it computes as the others do."""
    train(100, lambda step: evaluate(0.15 + (0.6 * math.exp(-step / 5) if RANK == 0 else 0.0)))


SHAPES = [slow_start, slow_steps, computing, checkpoint, accumulation, joined, loader, tiny, large, subgroups, barriers,
          evaluation, gpu_evaluation, last_save, build, gathering, imbalance, turns, warming]  # fmt: skip


def main() -> None:
    """Run one shape."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    next(shape for shape in SHAPES if shape.__name__ == sys.argv[1])()
    if sys.argv[1] != "last_save":
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
