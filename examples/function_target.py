"""A function that gpuboard calls in every rank, after init_process_group:

gpuboard launch --n 2 examples.function_target:main
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def main() -> None:
    """Sum the ranks with one all-reduce and print the result on rank 0; gpuboard destroys the group afterwards."""
    cuda = dist.get_backend() == "nccl"
    total = torch.tensor([float(dist.get_rank())], device="cuda" if cuda else "cpu")
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        where = os.uname().nodename
        print(f"{dist.get_world_size()} ranks, the sum of their numbers is {total.item():.0f} (rank 0 on {where})")
