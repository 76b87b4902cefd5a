"""How a Slurm command failed → what, where, and what to do. The texts are Slurm's own (slurm_errno.c)."""

from __future__ import annotations

import os

from gpuboard.model.text import clean
from gpuboard.scheduler.slurm.site import Site, munge_socket, settings
from gpuboard.transport.command import Ran

# A part of what Slurm says → what that means of the controller, and what to do.
DOWN = "Unable to contact slurm controller"  # what other commands say when `scontrol ping` says DOWN
_CONTACT = {
    DOWN: "cannot be reached (connect failure); is it running there? `scontrol ping` tells",
    "Socket timed out on send": "takes questions and does not answer; is it overloaded? see `scontrol ping`, `sdiag`",
    "Zero Bytes were transmitted": "hangs up; has it this host's munge key? `munge -n | ssh CONTROLLER unmunge` tells",
    "controller in standby": "is in standby; is the primary controller running? `scontrol ping` tells",
}
_OTHERS = {
    "authentication": "does not believe who we are; has munge one key and one time on both hosts?",
    "credential": "does not believe who we are; has munge one key and one time on both hosts?",
    "Incompatible versions": "is too old or too new for this host's programs; see `scontrol --version` on both",
    "permission denied": "tells us nothing (permission denied); ask the administrator",
}
# The same without a controller in it.
_LOCAL = {
    "configuration source": "Slurm's configuration is not found on this host; set SLURM_CONF to the path of slurm.conf",
    "Unable to process configuration file": "Slurm's configuration {} cannot be used; `scontrol ping` says why",
}


def failure(done: Ran, site: Site) -> str:
    """Return why a command failed that ended with an error, or did not end."""
    said = done.err
    for text, meaning in _LOCAL.items():
        if text in said:
            return meaning.format(clean(site.conf or "", 200))
    conf = settings(site)
    name = clean(conf.get("slurmctldhost", conf.get("controlmachine", "")).partition("(")[0], 64)
    controller = f"slurmctld on {name}" if name else "slurmctld"
    # munge's silence is a connect failure to Slurm's programs, or one of authentication
    silent = not done.ended or any(text in said for text in (*_CONTACT, "authentication", "credential"))
    if silent and (refused := _munge_refuses(munge_socket(conf))) is not None:
        return refused
    if not done.ended:
        return f"{controller} gave no answer in {done.took_s:.0f} s; is it stopped or overloaded? see `scontrol ping`"
    for text, meaning in (_CONTACT | _OTHERS).items():
        if text in said:
            return f"{controller} {meaning}"
    last = clean(next((line for line in reversed(said.splitlines()) if line.strip()), ""), 200)
    code = "?" if done.code is None else done.code
    return f"`scontrol` ended with exit code {code}" + (f": {last}" if last else " without a word")


def is_contact(done: Ran) -> bool:
    """Tell whether a failure is one of reaching the controller, which `scontrol ping` tries at less cost."""
    return not done.ended or any(text in done.err for text in _CONTACT)


def missing(site: Site) -> str | None:
    """Return what keeps Slurm's programs from being started, or from finding a cluster, None where nothing does."""
    if site.scontrol is None:
        return (
            "scheduler is set to slurm, and there is no scontrol on PATH; install Slurm's programs, or set it to none"
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
            return f"munged does not run on this host ({path}: {why}), and Slurm needs it: `systemctl start munge`"
    return None
