"""Which scheduler there is. Every command asks this, so it imports next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuboard.scheduler.slurm.site import here

if TYPE_CHECKING:
    from gpuboard.config import Settings
    from gpuboard.scheduler.slurm.service import Slurm


def find(settings: Settings, env: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm of this host, None where there is none; it is not asked anything yet.

    Where the settings say "slurm" there is always one, and what is missing is its error.
    """
    if settings.scheduler == "none":
        return None
    site = here(env)
    known = site.scontrol is not None and (site.conf is not None or "SLURM_CONF_SERVER" in env)
    if not known and settings.scheduler != "slurm":
        return None
    from gpuboard.scheduler.slurm.service import Slurm  # 12 ms: only where there is one

    return Slurm(settings, env, site)
