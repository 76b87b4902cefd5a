"""The words and remedies for what can go wrong on the way to a node, the same for every transport over ssh (pure)."""

from __future__ import annotations

import errno
import re

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError


class Asking(TransportError):
    """The server wants what only a person has: a password, a code."""


_BY_ERRNO = {
    errno.ECONNREFUSED: ("refused", "ssh: connection refused", "is sshd running there, and is the port right?"),
    errno.EHOSTUNREACH: ("unreachable", "ssh: no route to the host", "is the node on, and the network up?"),
    errno.ENETUNREACH: ("unreachable", "ssh: the network is unreachable", "is the network up here?"),
    errno.ETIMEDOUT: ("timeout", "ssh: connecting timed out", "is the node on, and no firewall between?"),
    errno.ECONNRESET: ("lost", "ssh: the connection was reset while logging in", "see sshd's MaxStartups and its log"),
    errno.EMFILE: (
        "unreachable",
        "ssh: too many open files here",
        "raise the limit (`ulimit -n`): a node takes up to five of them",
    ),
    errno.EPIPE: ("lost", "ssh: the connection was closed while logging in", "see sshd's MaxStartups and its log"),
}


_NO_JOB = re.compile(r"no active jobs on this node|Access denied by pam_slurm", re.IGNORECASE)


def by_errno(code: int) -> TransportError | None:
    """Return what an error number of connect() means; None for one without words of its own."""
    return TransportError(*_BY_ERRNO[code]) if code in _BY_ERRNO else None


def by_error(error: OSError) -> TransportError:
    """Return what an OSError while connecting means."""
    # Several addresses that failed differently come as one OSError without errno, the numbers in its text.
    codes = [error.errno] if error.errno else [int(code) for code in re.findall(r"\[Errno (\d+)\]", str(error))]
    for code in codes:
        if found := by_errno(code):
            return found
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return TransportError("resolve", f"ssh: {error}", "check ProxyCommand and the key files in your ssh_config")
    return TransportError("unreachable", f"ssh: {error.strerror or error}")


def any_error(error: Exception) -> TransportError:
    """Return what an error means that ends a thread of a transport: nobody else would tell of it."""
    if isinstance(error, TransportError):
        return error
    return by_error(error) if isinstance(error, OSError) else TransportError("lost", f"{type(error).__name__}: {error}")


def no_answer(timeout_s: float) -> TransportError:
    """Nothing came in time."""
    return TransportError("timeout", f"ssh: no answer in {timeout_s:.0f} s", "is the node hung or overloaded?")


def no_address(name: str) -> TransportError:
    """The name is not known."""
    remedy = "check the name, /etc/hosts and your ssh_config"
    return TransportError("resolve", f"ssh: the name {name!r} has no address", remedy)


def not_let_in(name: str, user: str) -> TransportError:
    """No key was accepted."""
    who = f"{user}@{name}" if user else name
    remedy = f"check `ssh {name}`: is your key in authorized_keys there, and in the agent or an IdentityFile here?"
    return TransportError("auth", f"ssh: {who} was refused: no key was accepted", remedy)


def asks(name: str, user: str, *, may_ask: bool = False) -> Asking:
    """The keys were not enough: a password or a code is wanted. ``may_ask``: the transport could ask on a terminal."""
    remedy = (
        "run `gpuboard status` on a terminal, where ssh can ask for it"
        if may_ask
        else 'set transport = "openssh", which lets ssh ask on a terminal'
    )
    return Asking(
        "auth",
        f"ssh: {user}@{name} was refused: it asks for a password or a code",
        f"is your key in authorized_keys there, and in the agent or an IdentityFile here? Else {remedy}",
    )


def wants_a_job(name: str, said: str) -> TransportError | None:
    """Return the refusal that ``said``, what a server told before it hung up, speaks of; None when of none.

    pam_slurm_adopt and the older pam_slurm let in only who has a job on the node: the keys were right.
    """
    lines = [clean(line, 200) for line in said.splitlines() if _NO_JOB.search(line)]
    if not lines:
        return None
    return TransportError(
        "no-job",
        f"ssh: {name} lets in only who has a job there: {lines[-1]}",
        f"get one there (salloc -w {name}); gpuboard looks again when you have it",
    )


def revoked_key(name: str) -> TransportError:
    """known_hosts says that the key the server has shown is not to be trusted."""
    return TransportError("host-key", f"ssh: the key of {name} is revoked", "ask its administrator")


def unknown_key(name: str, offered: str) -> TransportError:
    """known_hosts has no key of the server. ``offered``: type and fingerprint of the one it has shown, or empty."""
    shown = f" ({offered})" if offered else ""
    return TransportError(
        "host-key", f"ssh: the key of {name} is not known{shown}", f"run `ssh {name}` once and compare the fingerprint"
    )


def changed_key(name: str, offered: str, key_name: str, port: int) -> TransportError:
    """known_hosts has another key of the server. ``key_name``: what known_hosts was asked for."""
    shown = f" ({offered})" if offered else ""
    target = key_name if port == 22 else f"[{key_name}]:{port}"
    return TransportError(
        "host-key",
        f"ssh: the key of {name} has CHANGED{shown}: a new installation, or somebody in between",
        f"ask its administrator; then `ssh-keygen -R '{target}'` and `ssh {name}`",
    )


def not_through(name: str, hop: str, reason: str) -> TransportError:
    """A jump host (none: ``hop`` is empty) does not get to the node."""
    through = f" through {hop}" if hop else ""
    return TransportError("unreachable", f"ssh: {name} cannot be reached{through}: {reason}")


def dropped(name: str, reason: str) -> TransportError:
    """The server ended the connection before anybody was logged in."""
    return TransportError("lost", f"ssh: {reason or 'disconnected while logging in'}", f"try `ssh {name}`")
