"""Shared by all ledgers: ids and terms of leases, the rank map file, release without interruption."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuboard import files, paths
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.keeper.holder import Holder
from gpuboard.model.decoding import from_json
from gpuboard.model.rankmap import RankMap
from gpuboard.model.units import format_duration, parse_duration

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.model.request import ChosenGpu


# Ids are read aloud and typed: without 0 o 1 l i u, which look or sound alike.
_LETTERS = "abcdefghjkmnpqrstvwxyz"
_SIGNS = _LETTERS + "23456789"
_ID_LENGTH = 6  # 5e8 ids
LONGEST_S = 366 * 86400.0  # the longest claim that agents accept (agent/claims/rules.py)


class Terms(msgspec.Struct, frozen=True):
    """How long a lease lasts, its holder and its purpose."""

    for_s: float | None  # None: the site's maximum
    holder: Holder | None  # None: detached
    purpose: str = ""
    moves: bool = False  # another process will be the holder: claims, which never change, name none


def duration(for_s: float | None, settings: Settings) -> float:
    """Return the duration of a lease in seconds. Raises UsageError above the site's limit."""
    limit_s = parse_duration(settings.max_lease)
    if for_s is not None and for_s > limit_s:
        raise UsageError(f"--for {format_duration(for_s)} exceeds max_lease = {settings.max_lease} of the config")
    return limit_s if for_s is None else for_s


def new_id(used: Collection[str] = ()) -> str:
    """Return a random lease id of six unambiguous characters, the first a letter."""
    while True:
        dice = os.urandom(_ID_LENGTH * 2)
        numbers = [int.from_bytes(dice[i : i + 2], "big") for i in range(0, len(dice), 2)]
        lease = _LETTERS[numbers[0] % len(_LETTERS)] + "".join(_SIGNS[n % len(_SIGNS)] for n in numbers[1:])
        if lease not in used:
            return lease


def rank_map_file(env: Mapping[str, str], lease: str) -> str:
    """Return the path of a lease's rank map."""
    return f"{paths.state_dir(env)}/leases/{lease}.json"


def write_rank_map(env: Mapping[str, str], rank_map: RankMap, *, whole: bool) -> str:
    """Return the path of a lease's rank map; write it if it covers the ``whole`` lease. Raises GpuboardError."""
    assert rank_map.lease is not None
    file = rank_map_file(env, rank_map.lease)
    if whole:
        write_private(file, msgspec.json.encode(rank_map) + b"\n")
    return file


def stored_rank_map(env: Mapping[str, str], lease: str) -> RankMap | None:
    """Return the rank map written when a lease was allocated; None if it is not on this host."""
    try:
        with open(rank_map_file(env, lease), "rb") as file:
            return from_json(file.read(), RankMap)
    except (OSError, msgspec.DecodeError):
        return None


def as_allocated(env: Mapping[str, str], lease: str, gpus: Sequence[ChosenGpu]) -> Sequence[ChosenGpu]:
    """Return ``gpus`` in the order of the lease's rank map, which the user may have chosen, if it is on this host."""
    known = stored_rank_map(env, lease)
    order = {(rank.node, rank.uuid): rank.rank for rank in known.ranks} if known is not None else {}
    if order.keys() != {(gpu.node, gpu.uuid) for gpu in gpus}:
        return gpus
    return sorted(gpus, key=lambda gpu: order[gpu.node, gpu.uuid])


def write_private(path: str, data: bytes) -> None:
    """Write a file atomically, readable by its owner only. Raises GpuboardError."""
    try:
        paths.make_private(os.path.dirname(path))
        files.write_private(path, data)
    except OSError as error:
        raise GpuboardError(f"cannot write {path}: {error.strerror}") from error


def remove_rank_map(env: Mapping[str, str], lease: str) -> None:
    """Remove the rank map of a lease that has ended."""
    with contextlib.suppress(OSError):
        os.unlink(rank_map_file(env, lease))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore ctrl-C, SIGTERM and SIGHUP during a release, which takes milliseconds if every node answers."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    except ValueError:  # not the main thread, which alone runs signal handlers
        before = []
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
