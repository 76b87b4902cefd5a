"""Slurm on this host: its programs, their environment, its configuration file and a few keys of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gpuboard.transport.spawn import SLURM_SETUP

_CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")  # the last: configless
_CONF_MAX = 2**22  # bytes
# Variables that change what Slurm's commands do or print are removed, except those that locate Slurm.
_PREFIXES = ("SLURM_", "SLURMD_", "SCONTROL_", "SQUEUE_", "SINFO_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_")


class Site(NamedTuple):
    """What is installed of Slurm."""

    scontrol: str | None
    conf: str | None  # path of slurm.conf; None: known only to Slurm's programs


def here(env: Mapping[str, str]) -> Site:
    """Return what this host has; checks a few files."""
    scontrol = which("scontrol", env)
    if conf := env.get("SLURM_CONF"):
        return Site(scontrol, conf)
    beside = [os.path.join(os.path.dirname(os.path.dirname(scontrol)), "etc/slurm.conf")] if scontrol else []
    return Site(scontrol, next((path for path in (*_CONFS, *beside) if os.path.exists(path)), None))


def key(site: Site, env: Mapping[str, str]) -> str:
    """Return a short key of this cluster's configuration, which changes with the file."""
    words = [site.scontrol or "", site.conf or "", env.get("SLURM_CONF_SERVER", "")]
    if site.conf:
        try:
            status = os.stat(site.conf)
            words += [str(status.st_ino), str(status.st_mtime_ns)]
        except OSError:
            pass  # the query will report it
    import hashlib  # 8 ms: only where there is a Slurm

    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def settings(site: Site) -> dict[str, str]:
    """Return the keys of slurm.conf, in lower case, and their values; empty where it cannot be read."""
    if site.conf is None:
        return {}
    try:
        with open(site.conf, "rb") as file:
            text = file.read(_CONF_MAX).decode("utf-8", "replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*(\w+)\s*=\s*([^#\s]+)", line):
            found.setdefault(match[1].lower(), match[2])
    return found


def munge_socket(conf: Mapping[str, str]) -> str | None:
    """Return the socket of munge; None where Slurm authenticates in another way."""
    if conf.get("authtype", "auth/munge") != "auth/munge":
        return None
    match = re.search(r"socket=([^,]+)", conf.get("authinfo", ""))
    return match[1] if match else "/run/munge/munge.socket.2"


def which(name: str, env: Mapping[str, str]) -> str | None:
    """Return the path of a program on PATH (shutil.which takes 5 ms to import)."""
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command whose output is parsed: English, times as epoch seconds."""
    kept = {key: value for key, value in env.items() if key in SLURM_SETUP or not key.startswith(_PREFIXES)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
