"""What the demo trains: a small network learns a sine with DistributedDataParallel; it runs under torchrun as well.

gpuboard launch --n 2 --device cpu -m gpuboard.demo_train --steps 60
With ``--fail-at 30`` its last rank fails in step 30, to show how a failure is reported.
"""

from __future__ import annotations

import argparse
import os
import time

import torch  # the ranks' own interpreter has it; nothing of gpuboard imports this module
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(step: int, bad: int | None) -> torch.Tensor:
    """Return 256 points to learn from, shape (256, 1); raises ValueError in step ``bad``."""
    x = torch.rand(256, 1) * 6 - 3
    if step == bad:
        x[17] = float("nan")
    if bool(x.isnan().any()):
        raise ValueError(f"step {step}: sample 17 is not a number")
    return x


def main() -> None:
    """Train; rank 0 prints the loss, averaged over all ranks."""
    parser = argparse.ArgumentParser(description="train a small network with DDP on CPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps, so that a person can watch")
    parser.add_argument("--fail-at", type=int, help="the step in which the last rank fails")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world} on {os.uname().nodename}, pid {os.getpid()}", flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each rank its own data; DDP gives all of them rank 0's weights
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(1, args.steps + 1):
        x = batch(step if rank == world - 1 else 0, args.fail_at)
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch 2.13 has no types there
        optimizer.step()
        if step == 1 or step % max(1, args.steps // 6) == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item() / world:.4f}", flush=True)
        time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
