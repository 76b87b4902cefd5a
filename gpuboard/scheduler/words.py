"""How a Slurm command failed → what, where, and what to do. The texts are Slurm's own (slurm_errno.c)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpuboard.model.text import clean
from gpuboard.scheduler.commands import Done
from gpuboard.scheduler.site import Site, munge_socket, settings

# A part of what Slurm says → what it means and what to do. {ctld}: where the controller is configured to run.
_MEANINGS = (
    (
        "Unable to contact slurm controller",
        "slurmctld{ctld} cannot be reached (connect failure); is it running there? `scontrol ping` tells",
    ),
    (
        "Socket timed out on send/recv",
        "slurmctld{ctld} takes the question and does not answer; it is hung or overloaded: `sdiag`, `scontrol ping`",
    ),
    (
        "Zero Bytes were transmitted or received",
        "slurmctld{ctld} hung up; does it take this host's munge key? `munge -n | ssh CONTROLLER unmunge` tells",
    ),
    ("backup controller in standby", "only the backup slurmctld answers, in standby; is the primary running?"),
    (
        "Incompatible versions",
        "the Slurm programs of this host are too old or too new for slurmctld{ctld}; `scontrol --version` on both",
    ),
    ("authentication", "slurmctld{ctld} does not believe who we are; has munged one key and one time on both hosts?"),
    ("credential", "slurmctld{ctld} does not believe who we are; has munged one key and one time on both hosts?"),
    ("Access/permission denied", "slurmctld{ctld} tells us nothing (permission denied); ask the administrator"),
    ("configuration source", "Slurm's configuration is not found on this host; set SLURM_CONF to the path of it"),
    ("Unable to process configuration file", "Slurm's configuration {conf} cannot be used; `scontrol ping` says why"),
)  # fmt: skip
_CONTACTS = 4  # the first so many are of reaching the controller


def failure(done: Done, site: Site) -> str:
    """Return why a command failed that ended with an error, or did not end."""
    if is_contact(done):
        return unreachable(done, site)
    for text, meaning in _MEANINGS:
        if text in done.stderr:
            return meaning.format(ctld=_controller(settings(site)), conf=clean(site.conf or "", 200))
    said = clean(next((line for line in reversed(done.stderr.splitlines()) if line.strip()), ""), 200)
    return f"`scontrol` ended with exit code {done.code}" + (f": {said}" if said else " without a word")


def unreachable(done: Done, site: Site) -> str:
    """Return why the controller was not reached."""
    conf = settings(site)
    ctld = _controller(conf)
    if refused := _munge_refuses(munge_socket(conf)):
        return refused
    if done.code is None:
        return (
            f"slurmctld{ctld} gave no answer in {done.took_s:.0f} s; is it stopped or overloaded? `scontrol ping` tells"
        )
    text = next((meaning for text, meaning in _MEANINGS[:_CONTACTS] if text in done.stderr), _MEANINGS[0][1])
    return text.format(ctld=ctld)


def is_contact(done: Done) -> bool:
    """Tell whether a failure is one of reaching the controller, which `scontrol ping` tries at less cost."""
    return done.code is None or any(text in done.stderr for text, _ in _MEANINGS[:_CONTACTS])


def _controller(conf: Mapping[str, str]) -> str:
    name = clean(conf.get("slurmctldhost", conf.get("controlmachine", "")).partition("(")[0], 64)
    return f" on {name}" if name else ""


def missing(site: Site) -> str | None:
    """Return what keeps Slurm's programs from being started, or from finding a cluster, None where nothing does."""
    if site.scontrol is None:
        return (
            'scheduler = "slurm" is set, and there is no scontrol on PATH; install Slurm\'s programs, or set scheduler'
        )
    if site.conf is not None and not os.path.exists(site.conf):
        # scontrol would wait for it for a minute
        return f"SLURM_CONF={clean(site.conf, 200)}: there is no such file; correct it or unset it"
    if site.conf is not None and not os.access(site.conf, os.R_OK):
        return f"{clean(site.conf, 200)} cannot be read by you; ask the administrator"
    return None


def _munge_refuses(path: str | None) -> str | None:
    """Return what is wrong with munge here: Slurm's programs call it a connect failure to slurmctld."""
    if path is None:
        return None
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except OSError as error:
            why = error.strerror or "no answer"
            return (
                f"munged does not run on this host ({path}: {why}); Slurm's programs need it: `systemctl start munge`"
            )
    return None
