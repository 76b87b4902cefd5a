"""What on a host kills background processes: a keeper, whose leases then expire 90 s later, and detached runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from gpuboard.agent.proc import user_name

# logind.conf(5): the first folder that has logind.conf counts, drop-ins of all of them are read in order of name.
_FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")


def reapers(env: Mapping[str, str], uid: int, root: str = "") -> list[str]:
    """Return warnings for user ``uid`` about what would kill the keeper; ``root`` is a prefix of every path read."""
    found = []
    if kills_at_logout(uid, root):
        found.append(
            "logind kills the keeper when you log out (KillUserProcesses=yes), and your leases on this host expire "
            "90 s later; to keep them, run `loginctl enable-linger` and work in `systemd-run --user --scope bash`"
        )
    job = _job(root)
    if job and not env.get("SLURM_JOB_ID"):  # with it, the job has its own keeper: runtime_dir.folder_name
        found.append(
            f"this session belongs to Slurm job {job}, and Slurm kills the keeper when the job ends: your leases on "
            "this host expire 90 s later; to keep them, run any gpuboard command here before that"
        )
    return found


def run_reapers(env: Mapping[str, str], uid: int, root: str = "") -> list[str]:
    """Return warnings for user ``uid`` about what ends a detached run of this session; ``root`` as above."""
    found = []
    if kills_at_logout(uid, root):
        found.append(
            "logind ends this run when you log out (KillUserProcesses=yes); to keep such a run, use "
            "`loginctl enable-linger` and launch it with `systemd-run --user --scope gpuboard launch …`"
        )
    if job := env.get("SLURM_JOB_ID") or _job(root):
        found.append(
            f"this run ends with Slurm job {job}, and a batch job ends with its script: let the script wait with "
            "`gpuboard attach`"
        )
    return found


def kills_at_logout(uid: int, root: str = "") -> bool:
    """Return whether logind kills this process when its session, of user ``uid``, ends."""
    return "/session-" in _read(f"{root}/proc/self/cgroup") and _kills_user_processes(root, user_name(uid))


def _job(root: str) -> str:
    found = re.search(r"/job_(\d+)(/|$)", _read(f"{root}/proc/self/cgroup"), re.MULTILINE)
    return found[1] if found else ""


def _kills_user_processes(root: str, user: str) -> bool:
    """Return whether logind kills ``user``'s processes at the end of a session (logind.conf(5))."""
    values = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    for key, value in _settings(root):
        if key in values:
            values[key] = value
    only, excluded = values["KillOnlyUsers"].split(), values["KillExcludeUsers"].split()
    kills = values["KillUserProcesses"].lower() in {"yes", "true", "on", "1", "y", "t"}
    return kills and user not in excluded and (not only or user in only)


def _settings(root: str) -> Iterator[tuple[str, str]]:
    files = [next((path for folder in _FOLDERS if os.path.exists(path := f"{root}{folder}/logind.conf")), "")]
    dropins: dict[str, str] = {}
    for folder in reversed(_FOLDERS):  # /etc wins over a drop-in of the same name elsewhere
        try:
            names = os.listdir(f"{root}{folder}/logind.conf.d")
        except OSError:
            continue
        dropins.update({name: f"{root}{folder}/logind.conf.d/{name}" for name in names if name.endswith(".conf")})
    for path in files + [dropins[name] for name in sorted(dropins)]:
        for line in _read(path).splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith(("#", ";")):
                yield key.strip(), value.strip()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
