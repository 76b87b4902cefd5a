"""A small training loop with one fault: ``target.py FAULT FILE``. Rank 1 has it, in step 3 if it is one of the loop.

The moment of the fault (seconds since the epoch) is written to FILE.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import distributed

FAULT = sys.argv[1]
RANK = int(os.environ["RANK"])
SUSPECT = RANK == 1
STEPS = 8
AT = 3


def fault_begins() -> None:
    """Write down the moment of the fault."""
    Path(sys.argv[2]).write_text(str(time.time()))


def hang() -> None:
    """Sleep longer than any measurement."""
    time.sleep(10_000)


def spin() -> None:
    """Compute in C code that keeps the GIL."""
    re.match("(a+)+$", "a" * 64 + "b")


def out_of_memory() -> None:
    """Allocate more than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    torch.ones(2**40)


def raise_error() -> None:
    """Fail as a program does."""
    raise ValueError("label 17 is out of range")


# In the loop, in place of loading a batch
LOADING: dict[str, Callable[[], object]] = {
    "hang": hang,
    "spin": spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: os._exit(3),
    "raise": raise_error,
    "out-of-memory": out_of_memory,
    "slow": lambda: time.sleep(float(sys.argv[3])),
}
# Before init_process_group
STARTING: dict[str, Callable[[], object]] = {
    "hang-before-init": hang,
    "exit0-before-init": lambda: sys.exit(0),
    "raise-before-init": raise_error,
}


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """A data set with a fault in the worker that loads item AT."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if SUSPECT and index == AT and FAULT.startswith("loader-"):
            fault_begins()
            {"loader-hangs": hang, "loader-killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
             "loader-raises": raise_error}[FAULT]()  # fmt: skip
        return torch.ones(4)


def batches() -> Iterable[torch.Tensor]:
    """Return the batches of the run."""
    if FAULT.startswith("loader-"):
        return torch.utils.data.DataLoader(Items(), batch_size=1, num_workers=1)
    return (torch.ones(4) for _ in range(AT if FAULT == "uneven" and SUSPECT else STEPS))


def reduce(step: int, batch: torch.Tensor) -> None:
    """Reduce a batch over all ranks, the suspect in its own way at step AT."""
    if SUSPECT and step == AT:
        if FAULT in LOADING:
            fault_begins()
            LOADING[FAULT]()
        if FAULT in {"skip", "op", "shape", "dtype", "order", "swallow"}:
            fault_begins()
        if FAULT == "skip":
            return
        if FAULT == "swallow":
            try:
                raise_error()
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
                return
        if FAULT == "op":
            distributed.broadcast(batch, 0)
            return
        if FAULT == "order":
            distributed.all_reduce(torch.ones(3, 3))
        if FAULT == "shape":
            batch = torch.ones(5, 5)
        if FAULT == "dtype":
            batch = batch.double()
    distributed.all_reduce(batch)
    if FAULT == "order" and not (SUSPECT and step == AT):
        distributed.all_reduce(torch.ones(3, 3))


def main() -> None:
    """Train."""
    if SUSPECT and FAULT in STARTING:
        fault_begins()
        STARTING[FAULT]()
    distributed.init_process_group("gloo")
    for step, batch in enumerate(batches()):
        reduce(step, batch)
    if SUSPECT and FAULT == "uneven":
        fault_begins()
        hang()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
