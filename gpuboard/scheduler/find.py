"""Which scheduler there is. Every command asks this, so it imports next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpuboard.scheduler.slurm.site import here

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.slurm.service import Slurm


def finder(settings: Settings, env: Mapping[str, str]) -> Callable[[], Slurm] | None:
    """Return what makes the Slurm of this host, None where there is none; nothing is asked.

    Where the settings say "slurm" there is always one, and what is missing is its error.
    """
    if settings.scheduler == "none":
        return None
    site = here(env)
    known = site.scontrol is not None and (site.conf is not None or "SLURM_CONF_SERVER" in env)
    if not known and settings.scheduler != "slurm":
        return None

    def make() -> Slurm:
        from gpuboard.scheduler.slurm.service import Slurm  # 12 ms: only where it is asked

        return Slurm(settings, env, site)

    return make


def find(settings: Settings, env: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm of this host, as :func:`finder`."""
    make = finder(settings, env)
    return make() if make is not None else None
