"""Finds the scheduler of this host. Every command does, so this imports almost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpuboard.scheduler.slurm.site import here

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.slurm.service import Slurm


def finder(settings: Settings, env: Mapping[str, str]) -> Callable[[], Slurm] | None:
    """Return a function that opens the Slurm of this host, None where there is none; it is not queried.

    With the setting ``scheduler = "slurm"`` there is always one; missing programs are its error.
    """
    if settings.scheduler == "none":
        return None
    site = here(env)
    known = site.scontrol is not None and (site.conf is not None or "SLURM_CONF_SERVER" in env)
    if not known and settings.scheduler != "slurm":
        return None

    def make() -> Slurm:
        from gpuboard.scheduler.slurm.service import Slurm  # 12 ms: only where it is used

        return Slurm(settings, env, site)

    return make


def find(settings: Settings, env: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm of this host, as :func:`finder`."""
    make = finder(settings, env)
    return make() if make is not None else None
