"""The Python interface: ``with gpuboard.lease(n=2) as lease: …`` and ``gpuboard.status()``.

A lease taken here lives with this Python process; ended by its block, by ``release()`` or with the process.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuboard.allocate.allocator import Allocator
from gpuboard.allocate.common import Terms, duration
from gpuboard.allocate.formats import Allocation, variables
from gpuboard.allocate.picks import parse_picks
from gpuboard.allocate.policy import check
from gpuboard.errors import UsageError
from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.request import Request
from gpuboard.model.units import parse_duration, parse_size

if TYPE_CHECKING:
    from gpuboard.cluster.inventory import Node
    from gpuboard.config import Settings
    from gpuboard.model.snapshot import Snapshot

__all__ = ["Lease", "lease", "status"]


class Lease:
    """GPUs reserved for a ``with`` block. Made by :func:`lease`; nothing is reserved before the block begins.

    In the block CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and the GPUBOARD_* variables of the lease are in os.environ,
    so that CUDA and child processes see exactly these GPUs; after it they are as before.
    """

    def __init__(
        self,
        request: Request,
        settings: Settings,
        *,
        for_s: float,
        wait_s: float | None,
        purpose: str,
        nodes: list[Node],
    ) -> None:
        self._request = request
        self._for_s = for_s
        self._wait_s = wait_s
        self._purpose = purpose
        self._nodes = nodes
        self._settings = settings
        self._said = bool(nodes)
        self._allocation: Allocation | None = None
        self._before: dict[str, str | None] = {}

    @property
    def id(self) -> str:
        """The lease's id."""
        return self.allocation.lease.id

    @property
    def gpus(self) -> list[Rank]:
        """The GPUs in rank order: node, index, uuid, rank and local rank of each."""
        return self.allocation.rank_map.ranks

    @property
    def rank_map(self) -> RankMap:
        """Which rank gets which GPU."""
        return self.allocation.rank_map

    @property
    def allocation(self) -> Allocation:
        """All of it. Raises RuntimeError outside the block."""
        if self._allocation is None:
            raise RuntimeError("nothing is reserved: use `with gpuboard.lease(n=2) as lease:`")
        return self._allocation

    def renew(self, for_: str | float | None = None) -> None:
        """Let the lease end ``for_`` (``"2h"`` or seconds; default: as long as it was asked for) from now."""
        for_s = self._for_s if for_ is None else duration(_seconds(for_), self._settings)
        with self._allocator() as allocator:
            allocator.renew(self.allocation.lease, for_s)

    def release(self) -> None:
        """End the lease now; the block's end then does nothing more."""
        allocation, self._allocation = self._allocation, None
        self._restore()
        if allocation is not None:
            with self._allocator() as allocator:
                for words in allocator.release(allocation.lease):
                    warnings.warn(f"lease {allocation.lease.id} lapses within 90 s: {words}", stacklevel=2)

    def __enter__(self) -> Self:
        """Reserve. Raises Refused, NoNodeReached and other GpuboardErrors; then nothing is reserved."""
        from gpuboard.ledger.holder import identify

        if self._allocation is not None:
            raise RuntimeError(f"this lease is in use already ({self.id}); make another with gpuboard.lease(…)")
        _warn_if_initialised()
        with self._allocator() as allocator:
            terms = Terms(self._for_s, identify(os.getpid()), self._purpose)
            self._allocation = allocator.allocate(self._request, terms, self._wait_s)
            allocator.published(self._allocation.lease)
        for name, value in variables(self._allocation).items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _allocator(self) -> Allocator:
        from gpuboard.cluster.inventory import inventory

        nodes = self._nodes or inventory(self._settings)
        return Allocator(nodes, self._settings, os.environ, said=self._said)


def lease(
    n: int | None = None,
    *,
    gpus: str | None = None,
    per_node: int | None = None,
    max_nodes: int | None = None,
    model: str | None = None,
    gpu_mem: str | int | None = None,
    topology: str = "best",
    exclude: str = "",
    nodes: str | None = None,
    for_: str | float | None = None,
    wait: str | float | bool = False,
    purpose: str = "",
) -> Lease:
    """Return a context manager that reserves GPUs for its block, with the options of ``gpuboard allocate``.

    ``gpus`` and ``exclude`` as ``"gpu01:0,3@gpu02:1"``; ``gpu_mem`` ``"40GiB"`` or bytes; ``for_`` and ``wait`` as
    ``"2h"`` or seconds, ``wait=True``: for ever. Raises UsageError and ConfigError at once.
    """
    settings = _settings()
    try:
        request = Request(
            n=n,
            picks=parse_picks(gpus) if gpus else (),
            per_node=per_node,
            max_nodes=max_nodes,
            model=model,
            gpu_mem=parse_size(gpu_mem) if isinstance(gpu_mem, str) else gpu_mem,
            topology=topology,
            exclude=parse_picks(exclude, whole_nodes=True) if exclude else (),
        )
        for_s = duration(None if for_ is None else _seconds(for_), settings)
        wait_s = None if wait is False else float("inf") if wait is True else _seconds(wait)
    except ValueError as error:
        raise UsageError(str(error)) from None
    check(request)
    return Lease(
        request,
        settings,
        for_s=for_s,
        wait_s=wait_s,
        purpose=purpose or _program(),
        nodes=_nodes(settings, nodes),
    )


def status(nodes: str | None = None) -> Snapshot:
    """Return the cluster as it is now: every node's newest reading, each with its age."""
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory import inventory
    from gpuboard.scheduler.find import find

    settings = _settings()
    scheduler = find(settings, os.environ)
    found = _nodes(settings, nodes) or inventory(settings, (), (lambda: scheduler.look(15.0)) if scheduler else None)
    fleet = Fleet(found, settings, interval_s=None, scheduler=scheduler)
    fleet.start()
    try:
        fleet.wait(fleet.connect_s + 5)
        return fleet.snapshot()
    finally:
        fleet.close()


def _settings() -> Settings:
    from pathlib import Path

    from gpuboard import config

    file = os.environ.get("GPUBOARD_CONFIG")
    return config.load(os.environ, {}, Path(file) if file else None).settings


def _nodes(settings: Settings, said: str | None) -> list[Node]:
    """Return the nodes that were named, none when none was."""
    from gpuboard.cluster.inventory import inventory

    names: Sequence[str] = [] if said is None else [said]
    return inventory(settings, names) if names else []


def _seconds(value: str | float) -> float:
    return parse_duration(value) if isinstance(value, str) else float(value)


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in {"", "-c"} else "python"


def _warn_if_initialised() -> None:
    """CUDA reads CUDA_VISIBLE_DEVICES once: afterwards the block would compute on GPUs that are not its own."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            "CUDA is initialised already in this process, so it goes on seeing the GPUs it saw before; "
            "reserve before the first use of CUDA, or hand lease.gpus to processes that you start",
            stacklevel=4,
        )
