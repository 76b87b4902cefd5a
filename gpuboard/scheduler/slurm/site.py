"""Where Slurm is on this host: its programs, the environment they get, its configuration and a few keys of that."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gpuboard.transport.spawn import SLURM_SETUP

_CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")  # the last: configless
_CONF_MAX = 2**22  # bytes
# Variables that change what Slurm's commands do or print; those that say where Slurm is are kept.
_PREFIXES = ("SLURM_", "SLURMD_", "SCONTROL_", "SQUEUE_", "SINFO_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_")


class Site(NamedTuple):
    """What is there of Slurm."""

    scontrol: str | None
    conf: str | None  # path of slurm.conf; None: only its own programs know where it is


def here(env: Mapping[str, str]) -> Site:
    """Return what this host has; a few looks at files."""
    scontrol = which("scontrol", env)
    said = env.get("SLURM_CONF")
    if said:
        return Site(scontrol, said)
    beside = [os.path.join(os.path.dirname(os.path.dirname(scontrol)), "etc/slurm.conf")] if scontrol else []
    return Site(scontrol, next((path for path in (*_CONFS, *beside) if os.path.exists(path)), None))


def key(site: Site, env: Mapping[str, str]) -> str:
    """Return a short name for this configuration of this cluster, another one after the file was changed."""
    words = [site.scontrol or "", site.conf or "", env.get("SLURM_CONF_SERVER", "")]
    if site.conf:
        try:
            status = os.stat(site.conf)
            words += [str(status.st_ino), str(status.st_mtime_ns)]
        except OSError:
            pass  # the question will say what is wrong with it
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
    """Return the socket through which Slurm's programs prove who they are; None where they do so in another way."""
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
    """Return the environment for a command whose output is read: English, times in seconds, nothing else changed."""
    kept = {key: value for key, value in env.items() if key in SLURM_SETUP or not key.startswith(_PREFIXES)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
