"""asyncssh's and the system's errors while connecting → TransportError with words and a remedy (pure)."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import asyncssh

from gpuboard.transport.base import TransportError
from gpuboard.transport.ssh import errors

if TYPE_CHECKING:
    from gpuboard.transport.ssh.asyncssh_config import SshHost


def explain(error: Exception, name: str, host: SshHost | None, timeout_s: float) -> TransportError:
    """Return what a failure to reach ``name`` means; ``host`` is None when its configuration could not be read."""
    if isinstance(error, TransportError):
        return error
    if host is not None and (refusal := errors.wants_a_job(name, host.said)):
        return refusal
    if isinstance(error, TimeoutError) and error.errno is None:
        return errors.no_answer(timeout_s)
    if isinstance(error, socket.gaierror):
        return errors.no_address(name)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _host_key(error, name, host)
    if isinstance(error, asyncssh.PermissionDenied):
        if host is not None and host.asks:
            return errors.asks(name, host.user)
        return errors.not_let_in(name, host.user if host else "")
    if isinstance(error, asyncssh.ChannelOpenError):
        return errors.not_through(name, host.jumps[-1] if host and host.jumps else "", error.reason)
    if isinstance(error, asyncssh.DisconnectError):
        return errors.dropped(name, error.reason)
    if isinstance(error, OSError):
        return errors.by_error(error)
    if host is None:
        return TransportError("resolve", f"ssh_config: {error}", "correct the file that `ssh_config` names")
    return TransportError("lost", f"ssh: {type(error).__name__}: {error}", f"try `ssh {name}`")


def _host_key(error: asyncssh.HostKeyNotVerifiable, name: str, host: SshHost | None) -> TransportError:
    offered = host.offered or "" if host else ""
    if "revoked" in error.reason.lower():
        return errors.revoked_key(name)
    if host is not None and host.key_is_known():
        return errors.changed_key(name, offered, host.key_name, host.port)
    return errors.unknown_key(name, offered)
