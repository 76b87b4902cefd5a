"""The Python interface: ``with gpuboard.lease(n=2) as lease: …`` and ``gpuboard.status()``.

This Python process holds the lease. It ends with its block, with ``release()`` or with the process.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Self

from gpuboard.errors import GpuboardError, UsageError
from gpuboard.leases.composite import CompositeLedger, open_ledger
from gpuboard.leases.ledger import JobOptions, Scope
from gpuboard.leases.output.formats import Allocation, variables
from gpuboard.leases.picks import parse_picks
from gpuboard.leases.policy.candidates import check
from gpuboard.leases.reserve import release_own, reserve, terms_of
from gpuboard.leases.terms import duration
from gpuboard.model.rankmap import Rank, RankMap
from gpuboard.model.request import Request, Topology
from gpuboard.model.snapshot import Snapshot
from gpuboard.model.units import parse_duration, parse_size
from gpuboard.scheduler.find import find, finder

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.slurm.current_job import Inside

__all__ = ["Lease", "lease", "status"]


class Lease:
    """GPUs reserved for a ``with`` block, made by :func:`lease`. The block reserves them when it begins.

    The block sets CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and the GPUBOARD_* variables of the lease in os.environ, so
    that CUDA and child processes see exactly these GPUs. Its end restores the previous values.
    """

    def __init__(
        self,
        request: Request,
        settings: Settings,
        *,
        for_s: float | None,
        wait_s: float | None,
        purpose: str,
        nodes: list[str],
        options: JobOptions,
    ) -> None:
        self._request = request
        self._for_s = for_s
        self._wait_s = wait_s
        self._purpose = purpose
        self._nodes = nodes
        self._options = options
        self._settings = settings
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
        """The lease and its rank map. Raises RuntimeError outside the block."""
        if self._allocation is None:
            raise RuntimeError("nothing is reserved: use `with gpuboard.lease(n=2) as lease:`")
        return self._allocation

    def renew(self, for_: str | float | None = None) -> None:
        """Let the lease end ``for_`` from now: ``"2h"`` or seconds; default: the duration it was reserved for."""
        for_s = self._for_s if for_ is None else duration(_seconds(for_), self._settings)
        with self._ledger() as ledger:
            renewed = ledger.renew(self.allocation.lease, for_s or self.allocation.lease.remaining_s)
        for where, message in renewed.failed.items():
            raise GpuboardError(f"lease {self.id} was not renewed ({where}): {message}")

    def release(self) -> None:
        """End the lease now; the end of the block then does nothing."""
        allocation, self._allocation = self._allocation, None
        self._restore()
        if allocation is not None:
            release_own(self._ledger(), allocation.lease, partial(warnings.warn, stacklevel=3))

    def __enter__(self) -> Self:
        """Reserve. Raises Refused, NoNodeReached and other GpuboardErrors, and reserves nothing then."""
        from gpuboard.keeper.holder import identify

        if self._allocation is not None:
            raise RuntimeError(f"this lease is already in use ({self.id}); create another with gpuboard.lease(…)")
        _warn_if_initialized()
        terms = terms_of(self._for_s, identify(os.getpid()), self._purpose, self._settings)
        warn = partial(warnings.warn, stacklevel=4)
        with (
            self._ledger() as ledger,
            ledger.allocator(picks=self._request.picks, options=self._options) as allocator,
            reserve(allocator, self._request, terms, wait_s=self._wait_s, notify=warn) as self._allocation,
        ):
            pass
        for name, value in variables(self._allocation).items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _ledger(self) -> CompositeLedger:
        return open_ledger(
            lambda: _scope(self._settings, self._nodes, _job(self._settings)),
            self._settings,
            os.environ,
            finder(self._settings, os.environ),
        )


def lease(
    n: int | None = None,
    *,
    gpus: str | None = None,
    per_node: int | None = None,
    max_nodes: int | None = None,
    model: str | None = None,
    gpu_mem: str | int | None = None,
    topology: Topology = "best",
    allow_sick: bool = False,
    exclude: str = "",
    nodes: str | None = None,
    for_: str | float | None = None,
    wait: str | float | bool = False,
    purpose: str = "",
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    reservation: str | None = None,
    slurm: Sequence[str] = (),
) -> Lease:
    """Return a context manager that reserves GPUs for its block, with the options of ``gpuboard allocate``.

    ``gpus`` and ``exclude``: ``"gpu01:0,3@gpu02:1"``; ``gpu_mem``: ``"40GiB"`` or bytes; ``for_`` and ``wait``:
    ``"2h"`` or seconds (``wait=True``: no limit); ``slurm``: ``["--constraint=a100"]``. Raises UsageError and
    ConfigError, before the block.
    """
    _check_types(locals())
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
            allow_sick=allow_sick,
            exclude=parse_picks(exclude, whole_nodes=True) if exclude else (),
        )
        for_s = None if for_ is None else duration(_seconds(for_), settings)
        wait_s = None if wait is False or wait is None else _wait_seconds(wait)
    except ValueError as error:
        raise UsageError(str(error)) from None
    check(request)
    return Lease(
        request,
        settings,
        for_s=for_s,
        wait_s=wait_s,
        purpose=purpose or _program(),
        nodes=[] if nodes is None else [nodes],
        options=JobOptions(partition, account, qos, reservation, tuple(slurm)),
    )


def _check_types(given: Mapping[str, object]) -> None:
    """Raise UsageError for arguments of ``lease`` whose types ``check`` does not look at."""
    for name in ("gpus", "model", "exclude", "nodes", "purpose", "partition", "account", "qos", "reservation"):
        if not isinstance(given[name], (str, NoneType)):
            raise UsageError(f"{name}={given[name]!r}: must be a string")
    for name in ("gpu_mem", "for_", "wait"):
        if not isinstance(given[name], (str, Real, NoneType)):
            raise UsageError(f"{name}={given[name]!r}: must be a string or a number")
    slurm = given["slurm"]
    if isinstance(slurm, str) or not isinstance(slurm, Iterable) or not all(isinstance(one, str) for one in slurm):
        raise UsageError(f"slurm={slurm!r}: must be a list of strings, as ['--constraint=a100']")


def status(nodes: str | None = None) -> Snapshot:
    """Return a snapshot of the cluster: every node's newest reading, each with its age."""
    from gpuboard.cluster.fleet import Fleet

    settings = _settings()
    found = _scope(settings, [] if nodes is None else [nodes], None)
    fleet = Fleet(found.nodes, settings, interval_s=None, scheduler=find(settings, os.environ))
    fleet.start()
    try:
        fleet.wait_all(fleet.connect_s + 5)
        fleet.freshen()
        return fleet.snapshot()
    finally:
        fleet.close()


def _settings() -> Settings:
    from pathlib import Path

    from gpuboard import config

    file = os.environ.get("GPUBOARD_CONFIG")
    return config.load(os.environ, {}, Path(file) if file else None).settings


def _job(settings: Settings) -> Inside | None:
    from gpuboard.cluster.inventory.slurm_job import current_job

    return current_job(settings, os.environ, lambda message: warnings.warn(message, stacklevel=4))


def _scope(settings: Settings, names: Sequence[str], job: Inside | None) -> Scope:
    """Return the nodes in scope: those of the Slurm job, else those named, else all known nodes."""
    from gpuboard.cluster.inventory.nodes import inventory

    if job is not None:
        from gpuboard.cluster.inventory.slurm_job import job_nodes

        return Scope(tuple(job_nodes(job, names)), explicit=True, job=job.job)
    scheduler = find(settings, os.environ)
    nodes = inventory(settings, names, scheduler.look if scheduler else None)
    return Scope(tuple(nodes), explicit=bool(names))


def _seconds(value: str | float) -> float:
    """Return the seconds of a duration. Raises ValueError, also for a number that is none."""
    return parse_duration(value if isinstance(value, str) else f"{value:f}s")


def _wait_seconds(value: str | float | bool) -> float:
    if value is True or value == float("inf"):
        return float("inf")
    return 0.0 if value == 0 else _seconds(value)


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in {"", "-c"} else "python"


def _warn_if_initialized() -> None:
    """Warn where CUDA has already read CUDA_VISIBLE_DEVICES: the block would compute on GPUs outside the lease."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            "CUDA is already initialized in this process and keeps the GPUs it saw then; "
            "reserve before the first use of CUDA, or pass lease.gpus to processes that you start",
            stacklevel=4,
        )
