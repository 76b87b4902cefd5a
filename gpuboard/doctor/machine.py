"""What this machine needs: config, state folder, keeper, py-spy, Slurm. Facts, read here, and their checks (pure)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuboard import paths
from gpuboard.cluster.inventory.nodes import folded
from gpuboard.config import Settings
from gpuboard.keeper.logind import reapers
from gpuboard.launch.preflight.check import Check, CheckStatus
from gpuboard.launch.stalls.inspect import pyspy
from gpuboard.model.schedule import Schedule
from gpuboard.model.text import clean, shown
from gpuboard.model.units import format_size
from gpuboard.scheduler.find import finder
from gpuboard.scheduler.slurm import messages
from gpuboard.scheduler.slurm.query_cycle import PROBE_S
from gpuboard.scheduler.slurm.site import environment, here
from gpuboard.transport.command import run

FREE_LEAST = 2**30  # bytes: logs of launches grow in the state folder


class SlurmFacts(msgspec.Struct, frozen=True):
    """The Slurm of this machine."""

    version: str = ""  # of its commands: "slurm 23.11.4"
    error: str | None = None  # why the controller does not answer, with the remedy


class MachineFacts(msgspec.Struct, frozen=True):
    """What the checks of this machine depend on."""

    state_dir: str
    state_error: str | None  # why files cannot be created there
    free: int | None  # bytes
    reapers: list[str]  # what would kill the keeper, with the remedy
    pyspy: str | None
    slurm: SlurmFacts | None  # None: there is none, or the settings exclude it


def machine_facts(settings: Settings, env: Mapping[str, str]) -> MachineFacts:
    """Return the facts of this machine; Slurm's commands may take ``PROBE_S`` each."""
    folder = paths.state_dir(env)
    error, free = _room(folder)
    spy = pyspy()
    return MachineFacts(
        state_dir=str(folder),
        state_error=error,
        free=free,
        reapers=reapers(env, os.geteuid()),
        pyspy=str(spy) if spy else None,
        slurm=_slurm_facts(settings, env),
    )


def _room(folder: Path) -> tuple[str | None, int | None]:
    """Return why files cannot be created in ``folder``, which need not exist, and how many bytes are free."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # Path.exists raises
    try:
        disk = os.statvfs(existing)
    except OSError as error:
        return error.strerror, None
    allowed = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=True)
    return None if allowed else f"{shown(existing)} is not a writable folder", disk.f_bavail * disk.f_frsize


def _slurm_facts(settings: Settings, env: Mapping[str, str]) -> SlurmFacts | None:
    if env.get("GPUBOARD_INVENTORY") or finder(settings, env) is None:
        return None
    site = here(env)
    if missing := messages.missing(site):
        return SlurmFacts(error=missing)
    scontrol = site.scontrol or ""
    try:
        version = run([scontrol, "--version"], environment(env), PROBE_S)
        ping = run([scontrol, "ping"], environment(env), PROBE_S)
    except OSError as error:
        return SlurmFacts(error=f"{scontrol} cannot be run: {error.strerror}")
    if " is UP" in ping.out:
        return SlurmFacts(clean(version.out.strip(), 64))
    failed = ping._replace(err=messages.DOWN) if ping.ended else ping
    return SlurmFacts(clean(version.out.strip(), 64), messages.failure(failed, site))


def split_remedy(text: str) -> tuple[str, str]:
    """Return the parts of a message: what failed and why, and after the last semicolon what to do.

    >>> split_remedy("a failed; b is off; turn b on")
    ('a failed; b is off', 'turn b on')
    """
    words, semicolon, remedy = text.rpartition("; ")
    return (words, remedy) if semicolon else (text, "")


def config_checks(files: Sequence[str], problems: Sequence[str], names: Sequence[str]) -> list[Check]:
    """Return the checks of settings that could be read. ``files``: the config files that exist."""
    read = ", ".join(shown(file) for file in files) or "no config file: defaults"
    checks = [Check("config", None, "warn", clean(text)) for text in problems] or [Check("config", None, "ok", read)]
    return [*checks, Check("nodes", None, "ok", f"{folded(list(names))} ({len(names)})")] if names else checks


def config_failure(name: str, error: Exception) -> Check:
    """Return the check of settings, or of the nodes in them, that cannot be used."""
    words, remedy = split_remedy(str(error))
    return Check(name, None, "fail", words, "", remedy or "`gpuboard config` shows every setting and its origin")


def machine_checks(facts: MachineFacts, schedule: Schedule | None) -> list[Check]:
    """Return the checks of this machine. ``schedule``: Slurm's answer, None where there is none."""
    return [
        _state_folder(facts),
        *_keeper(facts.reapers),
        _pyspy(facts.pyspy),
        _slurm(facts.slurm, schedule),
        _trust(slurm=facts.slurm is not None),
        Check(
            "rank traffic", None, "ok", "torch does not authenticate NCCL and TCPStore connections, so the id of a run "
            "is a secret; train on a network that you trust",
        ),
    ]  # fmt: skip


def _state_folder(facts: MachineFacts) -> Check:
    where = shown(facts.state_dir)
    if facts.state_error is not None:
        cause, remedy = "leases, rank maps and logs are stored there", "make it writable, or set XDG_STATE_HOME"
        return Check("state folder", None, "fail", f"{where}: {facts.state_error}", cause, remedy)
    evidence = f"{where}: {format_size(facts.free)} free"
    if facts.free is not None and facts.free < FREE_LEAST:
        remedy = "delete files there, or lower [runs] max_size in the config"
        return Check("state folder", None, "warn", evidence, "logs of launches may be incomplete", remedy)
    return Check("state folder", None, "ok", evidence)


def _keeper(warnings: Sequence[str]) -> list[Check]:
    """Return whether the keeper, which sends the heartbeats of leases, survives the end of this session."""
    parts = [split_remedy(clean(text)) for text in warnings]
    return [Check("keeper", None, "warn", words, "", remedy) for words, remedy in parts] or [
        Check("keeper", None, "ok", "leases outlive this session while their holders run")
    ]


def _pyspy(path: str | None) -> Check:
    if path is not None:
        return Check("py-spy", None, "ok", shown(path))
    words, cause = "not installed", "reports of stalled launches lack the Python stacks of the ranks"
    return Check("py-spy", None, "warn", words, cause, "pip install py-spy, into the environment of gpuboard")


def _slurm(facts: SlurmFacts | None, schedule: Schedule | None) -> Check:
    if facts is None:
        return Check("slurm", None, "skipped", "no Slurm here, or `scheduler` is set to none")
    if facts.error is not None:
        words, remedy = split_remedy(clean(facts.error))
        return Check("slurm", None, "fail", words, "none of Slurm's GPUs counts as free meanwhile", remedy)
    status: CheckStatus = "ok"
    parts = [f"{facts.version}: the controller answers"]
    if schedule is not None:
        names = [name for name, node in schedule.nodes.items() if node.gpus or node.shards]
        parts.append(f"nodes with GPUs: {folded(names) if names else 'none'}")
        if schedule.notes:
            status = "warn"
            parts += [clean(note) for note in schedule.notes[:3]]
    return Check("slurm", None, status, "; ".join(parts))


def _trust(*, slurm: bool) -> Check:
    """Return the line about what a careless, crashed or malicious user can do to reservations."""
    words = (
        "reservations are files on the nodes: only their owner and root can remove or forge them, and they expire 90 s "
        "after a crash; they do not block a process that ignores them, which is shown as rogue"
    )
    return Check("ledger", None, "ok", f"{words}; on Slurm's nodes a reservation is a job" if slurm else words)
