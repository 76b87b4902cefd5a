"""A failed Slurm command → an error message with its remedy. The texts matched are Slurm's (slurm_errno.c)."""

from __future__ import annotations

import os

from gpuboard.model.text import clean
from gpuboard.scheduler.slurm.site import Site, munge_socket, settings
from gpuboard.transport.command import Ran

# Part of Slurm's error message → what it means for the controller, and the remedy.
DOWN = "Unable to contact slurm controller"  # other commands print this when `scontrol ping` prints DOWN
_CONTACT = {
    DOWN: "cannot be reached (connect failure); is it running there? see `scontrol ping`",
    "Socket timed out on send": "accepts requests but does not answer; is it overloaded? see `scontrol ping`, `sdiag`",
    "Zero Bytes were transmitted": "closes the connection; wrong munge key? check `munge -n | ssh CONTROLLER unmunge`",
    "controller in standby": "is in standby; is the primary controller running? see `scontrol ping`",
}
_OTHERS = {
    "authentication": "rejects this host's authentication; are munge's key and the time the same on both hosts?",
    "credential": "rejects this host's authentication; are munge's key and the time the same on both hosts?",
    "Incompatible versions": "has a version incompatible with this host's programs; see `scontrol --version` on both",
    "permission denied": "denies permission to query it; ask the administrator",
}
# The same for failures on this host.
_LOCAL = {
    "configuration source": "no configuration of Slurm on this host; set SLURM_CONF to the path of slurm.conf",
    "Unable to process configuration file": "Slurm's configuration {} cannot be used; see `scontrol ping`",
}


def failure(done: Ran, site: Site) -> str:
    """Return why a command failed, or why it did not end."""
    stderr = done.err
    for text, meaning in _LOCAL.items():
        if text in stderr:
            return meaning.format(clean(site.conf or "", 200))
    conf = settings(site)
    name = clean(conf.get("slurmctldhost", conf.get("controlmachine", "")).partition("(")[0], 64)
    controller = f"slurmctld on {name}" if name else "slurmctld"
    # Slurm's programs report a missing munged as a connect failure or an authentication error.
    may_be_munge = not done.ended or any(text in stderr for text in (*_CONTACT, "authentication", "credential"))
    if may_be_munge and (refused := _munge_refuses(munge_socket(conf))) is not None:
        return refused
    if not done.ended:
        waited = f"{done.took_s:.0f} s"
        return f"{controller} did not answer within {waited}; is it stopped or overloaded? see `scontrol ping`"
    for text, meaning in (_CONTACT | _OTHERS).items():
        if text in stderr:
            return f"{controller} {meaning}"
    last = clean(next((line for line in reversed(stderr.splitlines()) if line.strip()), ""), 200)
    code = "?" if done.code is None else done.code
    return f"`scontrol` ended with exit code {code}" + (f": {last}" if last else " and no message")


def is_contact(done: Ran) -> bool:
    """Return whether a command did not reach the controller, which `scontrol ping` checks at less cost."""
    return not done.ended or any(text in done.err for text in _CONTACT)


def missing(site: Site) -> str | None:
    """Return why Slurm's programs cannot be started or cannot find a cluster; None if they can."""
    if site.scontrol is None:
        return (
            "scheduler is set to slurm, but scontrol is not on PATH; install Slurm's programs, or set scheduler to none"
        )
    if site.conf is not None and not os.path.exists(site.conf):
        # scontrol would wait a minute for it
        return f"SLURM_CONF={clean(site.conf, 200)}: no such file; correct or unset the variable"
    if site.conf is not None and not os.access(site.conf, os.R_OK):
        return f"{clean(site.conf, 200)} permission denied; ask the administrator"
    return None


def _munge_refuses(path: str | None) -> str | None:
    """Return why munge does not work on this host; Slurm's programs report only a connect failure to slurmctld."""
    if path is None:
        return None
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except OSError as error:
            why = error.strerror or "no answer"
            return f"munged is not running on this host ({path}: {why}), but Slurm needs it: `systemctl start munge`"
    return None
