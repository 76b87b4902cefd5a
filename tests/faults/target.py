"""A small training loop with one fault: ``target.py FAULT FILE [SECONDS]``. Rank 1 has it, in step 3 if it is one of
the loop.

The moment of the fault (seconds since the epoch) is written to FILE. "run" has no fault: it trains for SECONDS.
"""

import itertools
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
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
RANK = int(os.environ["RANK"])
SUSPECT = RANK == 1
STEPS = 8
AT = 3


def fault_begins() -> None:
    """Write down the moment of the fault."""
    begun = Path(f"{sys.argv[2]}.{os.getpid()}")
    begun.write_text(str(time.time()))
    begun.rename(sys.argv[2])


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


def use_all_memory() -> None:
    """Allocate until the kernel ends the process; the bench runs this in a memory cgroup."""
    held = []
    while True:
        held.append(torch.ones(2**27))


def raise_error() -> None:
    """Fail as a program does."""
    raise ValueError("label 17 is out of range")


def touch_cuda() -> None:
    """Initialize CUDA in a process forked from one that has done so, as far as that is possible without a GPU."""
    torch.cuda._is_in_bad_fork = lambda: True
    torch.cuda.init()  # type: ignore[no-untyped-call]


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
    "sigterm-ignored": raise_error,
    "out-of-memory": out_of_memory,
    "oom-kill": use_all_memory,
    "unpicklable": lambda: torch.multiprocessing.get_context("spawn").Process(target=lambda: None).start(),
}
# Before init_process_group
STARTING: dict[str, Callable[[], object]] = {
    "hang-before-init": hang,
    "exit0-before-init": lambda: sys.exit(0),
    "raise-before-init": raise_error,
}
# In a DataLoader worker
ITEM: dict[str, Callable[[], object]] = {
    "loader-hangs": hang,
    "loader-killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loader-raises": raise_error,
    "cuda-fork": touch_cuda,
    "shm-full": lambda: torch.ones(2**22),
}
DIFFERENT = {"skip", "op", "shape", "dtype", "order"}


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """A data set with a fault in the worker that loads item AT."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if SUSPECT and index == AT:
            fault_begins()
            found = ITEM[FAULT]()
            return found if isinstance(found, torch.Tensor) else torch.ones(4)
        return torch.ones(4)


class Model(torch.nn.Module):
    """Two layers. With a fault, the second one gets no gradient in step AT."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4)
        self.step = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the output of both layers, of the first one if the second fails."""
        found: torch.Tensor = self.body(batch)
        self.step += 1
        if self.step != AT or (FAULT == "swallow" and not SUSPECT):
            return self.head(found)  # type: ignore[no-any-return]
        fault_begins()
        if FAULT == "swallow":
            try:
                raise_error()
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
        return found


def batches() -> Iterable[torch.Tensor]:
    """Return the batches of the run."""
    if FAULT in ITEM:
        return torch.utils.data.DataLoader(Items(), batch_size=1, num_workers=1)
    return (torch.ones(4) for _ in range(AT if FAULT == "uneven" and SUSPECT else STEPS))


def reduce(step: int, batch: torch.Tensor) -> None:
    """Reduce a batch over all ranks, the suspect in its own way at step AT."""
    if SUSPECT and step == AT:
        if FAULT in LOADING:
            fault_begins()
            LOADING[FAULT]()
        if FAULT in DIFFERENT:
            fault_begins()
        if FAULT == "skip":
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
    if RANK == 0 and step == AT and FAULT == "slow":
        fault_begins()
        time.sleep(SECONDS)
    distributed.all_reduce(batch)
    if FAULT == "order" and not (SUSPECT and step == AT):
        distributed.all_reduce(torch.ones(3, 3))


def run() -> None:
    """Train for SECONDS; the suspect needs 30 % more time per step with the fault "straggler"."""
    until = time.monotonic() + SECONDS
    step_s = 0.4 if FAULT == "straggler" else 0.05
    for step in itertools.count():
        if step == AT and SUSPECT:
            fault_begins()
        if SUSPECT and os.path.exists("lost"):
            raise RuntimeError("CUDA error: unspecified launch failure")
        time.sleep(step_s * (1.3 if SUSPECT and FAULT == "straggler" else 1.0))
        going_on = torch.tensor(float(time.monotonic() < until))
        distributed.all_reduce(going_on, distributed.ReduceOp.MIN)
        if not going_on:
            return


def main() -> None:
    """Train."""
    if FAULT == "sigterm-ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if SUSPECT and FAULT in STARTING:
        fault_begins()
        STARTING[FAULT]()
    distributed.init_process_group("gloo")
    if FAULT in {"run", "straggler"}:
        run()
    elif FAULT in {"swallow", "unused"}:
        model = torch.nn.parallel.DistributedDataParallel(Model())
        for batch in batches():
            model(batch).sum().backward()
    else:
        for step, batch in enumerate(batches()):
            reduce(step, batch)
    if SUSPECT and FAULT == "uneven":
        fault_begins()
        hang()
    distributed.destroy_process_group()
    if RANK == 0 and FAULT == "save":
        fault_begins()
        time.sleep(SECONDS)


if __name__ == "__main__":
    main()
