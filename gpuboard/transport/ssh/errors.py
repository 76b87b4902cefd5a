"""Messages and remedies of connection failures, the same for every ssh transport (pure)."""

from __future__ import annotations

import errno
import re

from gpuboard.model.text import clean
from gpuboard.transport.base import Kind, TransportError


class InteractionRequired(TransportError):
    """The server asks for a password or a code, which only the user can type."""


_BY_ERRNO: dict[int, tuple[Kind, str, str]] = {
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
    """Return the error for an errno of connect(); None for one that is not listed."""
    return TransportError(*_BY_ERRNO[code]) if code in _BY_ERRNO else None


def by_error(error: OSError) -> TransportError:
    """Return the error for an OSError while connecting."""
    # Several addresses that failed differently raise one OSError without errno; its text has the numbers.
    codes = [error.errno] if error.errno else [int(code) for code in re.findall(r"\[Errno (\d+)\]", str(error))]
    for code in codes:
        if found := by_errno(code):
            return found
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return TransportError(
            "resolve",
            f"ssh: {error.filename}: {error.strerror}",
            "check `ssh_config` in the config, and ProxyCommand and the key files in your ssh_config",
        )
    return TransportError("unreachable", f"ssh: {error.strerror or error}")


def any_error(error: Exception) -> TransportError:
    """Return the error for an exception that ends a thread of a transport, which would not be reported otherwise."""
    if isinstance(error, TransportError):
        return error
    return by_error(error) if isinstance(error, OSError) else TransportError("lost", f"{type(error).__name__}: {error}")


def no_answer(timeout_s: float) -> TransportError:
    """Return the error for a connection timeout."""
    return TransportError("timeout", f"ssh: no answer in {timeout_s:.0f} s", "is the node hung or overloaded?")


def no_address(name: str) -> TransportError:
    """Return the error for a host name without an address."""
    remedy = "check the name, /etc/hosts and your ssh_config"
    return TransportError("resolve", f"ssh: the name {name!r} cannot be resolved", remedy)


def key_refused(name: str, user: str) -> TransportError:
    """Return the error for a login where no key was accepted."""
    who = f"{user}@{name}" if user else name
    remedy = f"check `ssh {name}`: is your key in authorized_keys there, and in the agent or an IdentityFile here?"
    return TransportError("auth", f"ssh: {who} was refused: no key was accepted", remedy)


def interaction_required(name: str, user: str, *, may_ask: bool = False) -> InteractionRequired:
    """Return the error for a login that needs a password or a code; ``may_ask``: this transport can ask for it."""
    remedy = (
        "run `gpuboard status` on a terminal, where ssh can ask for it"
        if may_ask
        else 'set transport = "openssh", which lets ssh ask on a terminal'
    )
    return InteractionRequired(
        "auth",
        f"ssh: {user}@{name} was refused: the server asks for a password or a code",
        f"is your key in authorized_keys there, and in the agent or an IdentityFile here? Else {remedy}",
    )


def job_required(name: str, banner: str) -> TransportError | None:
    """Return the error for a login refused without a job on the node, as found in ``banner``; else None.

    pam_slurm_adopt and the older pam_slurm send it before they disconnect. The keys were accepted.
    """
    lines = [clean(line, 200) for line in banner.splitlines() if _NO_JOB.search(line)]
    if not lines:
        return None
    return TransportError(
        "no-job",
        f"ssh: {name} only accepts users with a job running on it: {lines[-1]}",
        f"start a job there (salloc -w {name}); gpuboard connects when it runs",
    )


def revoked_key(name: str) -> TransportError:
    """Return the error for a host key that known_hosts marks as revoked."""
    return TransportError("host-key", f"ssh: the host key of {name} is revoked", "ask its administrator")


def unknown_key(name: str, offered: str) -> TransportError:
    """Return the error for a host that known_hosts lacks; ``offered``: type and fingerprint of its key, or empty."""
    shown = f" ({offered})" if offered else ""
    return TransportError(
        "host-key",
        f"ssh: the host key of {name} is unknown{shown}",
        f"run `ssh {name}` once and compare the fingerprint",
    )


def changed_key(name: str, offered: str, key_name: str, port: int) -> TransportError:
    """Return the error for a host with another key; ``offered``: its key now; ``key_name``: its name in known_hosts."""
    shown = f" ({offered})" if offered else ""
    target = key_name if port == 22 else f"[{key_name}]:{port}"
    return TransportError(
        "host-key",
        f"ssh: the host key of {name} has CHANGED{shown}: a new installation, or an attack",
        f"ask its administrator; then `ssh-keygen -R '{target}'` and `ssh {name}`",
    )


def not_through(name: str, hop: str, reason: str) -> TransportError:
    """Return the error for a node that the jump host ``hop`` (empty: none) cannot reach."""
    through = f" through {hop}" if hop else ""
    return TransportError("unreachable", f"ssh: {name} cannot be reached{through}: {reason}")


def no_session(name: str, reason: str) -> TransportError:
    """Return the error for a server that accepts the login but starts no command."""
    remedy = f"does `ssh {name} true` work? MaxSessions in its sshd_config must be at least 1"
    return TransportError("refused", f"ssh: {name} accepted the login but opened no session: {reason}", remedy)


def dropped(name: str, reason: str) -> TransportError:
    """Return the error for a connection that the server closed before login."""
    return TransportError("lost", f"ssh: {reason or 'disconnected while logging in'}", f"try `ssh {name}`")
