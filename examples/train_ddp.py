"""Train a small network with DistributedDataParallel on synthetic data; the loss decreases.

Written for torchrun's environment, so gpuboard and torchrun can start it:

    gpuboard launch --n 2 examples/train_ddp.py --epochs 3
    torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 3
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(samples: int, features: int) -> TensorDataset:
    """Return inputs (samples, features) and targets (samples, 1) of one fixed nonlinear function for all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    weights = torch.randn(features, 1, generator=generator) / features**0.5
    return TensorDataset(inputs, torch.tanh(inputs @ weights))


def train(args: argparse.Namespace) -> float:
    """Train on this rank's part of the data; return the mean loss over all ranks of the last epoch."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(args.features, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = dataset(args.samples, args.features)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=args.workers)

    mean = torch.zeros(1, device=device)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        started = time.monotonic()
        mean.zero_()
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if rank == 0:
            print(f"epoch {epoch}  loss {mean.item():.5f}  {time.monotonic() - started:.2f} s", flush=True)
    dist.destroy_process_group()
    return mean.item()


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers per rank")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
