"""A small training loop with one fault: ``target.py FAULT``. Rank 1 has it, in step 3 if it is one of the loop."""

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterable

FAULT = sys.argv[1]
RANK = int(os.environ["RANK"])
AT_FAULT = RANK == 1
LONG_S = 10_000.0


def hang_in_python() -> None:
    """Sleep as long as any test runs."""
    time.sleep(LONG_S)


def spin_with_the_gil() -> None:
    """Use a CPU in C code without releasing the GIL."""
    re.match("(a+)+$", "a" * 64 + "b")


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose sixth item never comes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if AT_FAULT and index == 5:
            hang_in_python()
        return torch.ones(4)


def load_batch(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    if AT_FAULT and step == 3:
        if FAULT == "hang":
            hang_in_python()
        if FAULT == "spin":
            spin_with_the_gil()
        if FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "exit0":
            sys.exit(0)
        if FAULT == "slow":
            time.sleep(float(sys.argv[2]))
    return torch.ones(4)


def step_of_training(step: int, batch: torch.Tensor) -> None:
    """Reduce a batch over all ranks."""
    if AT_FAULT and step == 3:
        if FAULT == "skip":
            batch = load_batch(step + 1)
            distributed.barrier()
            return
        if FAULT == "op":
            distributed.broadcast(batch, 0)
            return
        if FAULT == "shape":
            batch = torch.ones(5, 5)
        if FAULT == "dtype":
            batch = batch.double()
        if FAULT == "swallow":
            try:
                raise ValueError("bad label in forward")
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
                return
    distributed.all_reduce(batch)


def batches() -> "Iterable[torch.Tensor]":
    """Return the batches of the run."""
    if FAULT == "loader":
        return torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=1)
    return (load_batch(step) for step in range(4 if FAULT == "uneven" and AT_FAULT else 8))


def main() -> None:
    """Train."""
    if AT_FAULT:
        if FAULT == "absent":
            hang_in_python()
        if FAULT == "exit0-before-init":
            sys.exit(0)
        if FAULT == "raise-before-init":
            raise ValueError("no such data set")
    distributed.init_process_group("gloo")
    for step, batch in enumerate(batches()):
        step_of_training(step, batch)
        if RANK == 0:
            print("step", step, flush=True)
    distributed.destroy_process_group()


main()
