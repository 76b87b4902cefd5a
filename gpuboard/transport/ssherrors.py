"""asyncssh's and the system's errors while connecting → TransportError with words and a cure (pure)."""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING

import asyncssh

from gpuboard.transport.base import TransportError

if TYPE_CHECKING:
    from gpuboard.transport.sshconfig import Host

_BY_ERRNO = {
    errno.ECONNREFUSED: ("refused", "ssh: connection refused", "is sshd running there, and is the port right?"),
    errno.EHOSTUNREACH: ("unreachable", "ssh: no route to the host", "is the node on, and the network up?"),
    errno.ENETUNREACH: ("unreachable", "ssh: the network is unreachable", "is the network up here?"),
    errno.ETIMEDOUT: ("timeout", "ssh: connecting timed out", "is the node on, and no firewall between?"),
    errno.ECONNRESET: ("lost", "ssh: the connection was reset while logging in", "see sshd's MaxStartups and its log"),
    errno.EPIPE: ("lost", "ssh: the connection was closed while logging in", "see sshd's MaxStartups and its log"),
}


def explain(error: Exception, name: str, host: Host | None, timeout_s: float) -> TransportError:
    """Return what a failure to reach ``name`` means; ``host`` is None when its configuration could not be read."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, TimeoutError) and error.errno is None:
        return TransportError("timeout", f"ssh: no answer in {timeout_s:.0f} s", "is the node hung or overloaded?")
    if isinstance(error, socket.gaierror):
        return TransportError(
            "resolve", f"ssh: the name {name!r} has no address", "check the name, /etc/hosts and your ssh_config"
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _host_key(error, name, host)
    if isinstance(error, asyncssh.PermissionDenied):
        who = f"{host.user}@{name}" if host else name
        cure = f"check `ssh {name}`: is your key in authorized_keys there, and in the agent or an IdentityFile here?"
        return TransportError("auth", f"ssh: {who} was refused: no key was accepted", cure)
    if isinstance(error, asyncssh.ChannelOpenError):
        where = f" through {host.jumps[-1]}" if host and host.jumps else ""
        return TransportError("unreachable", f"ssh: {name} cannot be reached{where}: {error.reason}", "")
    if isinstance(error, asyncssh.DisconnectError):
        return TransportError("lost", f"ssh: {error.reason or 'disconnected while logging in'}", f"try `ssh {name}`")
    if isinstance(error, OSError):
        return _os_error(error)
    if host is None:
        return TransportError("resolve", f"ssh_config: {error}", "correct the file that `ssh_config` names")
    return TransportError("lost", f"ssh: {type(error).__name__}: {error}", f"try `ssh {name}`")


def _host_key(error: asyncssh.HostKeyNotVerifiable, name: str, host: Host | None) -> TransportError:
    offered = f" ({host.offered})" if host and host.offered else ""
    if "revoked" in error.reason.lower():
        return TransportError("host-key", f"ssh: the key of {name} is revoked", "ask its administrator")
    if host is not None and host.key_is_known():
        target = host.key_name if host.port == 22 else f"[{host.key_name}]:{host.port}"
        return TransportError(
            "host-key",
            f"ssh: the key of {name} has CHANGED{offered}: a new installation, or somebody in between",
            f"ask its administrator; then `ssh-keygen -R '{target}'` and `ssh {name}`",
        )
    return TransportError(
        "host-key",
        f"ssh: the key of {name} is not known{offered}",
        f"run `ssh {name}` once and compare the fingerprint",
    )


def _os_error(error: OSError) -> TransportError:
    # Several addresses that failed differently come as one OSError without errno, the numbers in its text.
    codes = [error.errno] if error.errno else [int(code) for code in re.findall(r"\[Errno (\d+)\]", str(error))]
    for code in codes:
        if code in _BY_ERRNO:
            return TransportError(*_BY_ERRNO[code])
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return TransportError("resolve", f"ssh: {error}", "check ProxyCommand and the key files in your ssh_config")
    return TransportError("unreachable", f"ssh: {error.strerror or error}")
