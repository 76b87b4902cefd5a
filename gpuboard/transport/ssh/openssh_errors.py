"""stderr and exit code of the system's ssh → TransportError (pure). OpenSSH does not translate its messages."""

from __future__ import annotations

import re

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.ssh import errors
from gpuboard.transport.ssh.resolve import Resolved
from gpuboard.transport.ssh.single_flight import Dropped

SSH_FAILED = 255  # ssh's own failure; also the exit code of a remote command with that code or killed by a signal

# Lines of ssh that are unrelated to its end.
_CHATTER = re.compile(
    r"debug[123]: |Warning: Permanently added |Authenticated to |Authenticated using |Transferred: |Bytes per second: "
    r"|Shared connection to |ControlSocket .* already exists, disabling|mux_client_request_session: session request"
    r"|Pseudo-terminal will not be allocated|Control socket connect\(|Load key "
)
_OFFERED = re.compile(r"debug1: Server host key: (\S+ SHA256:\S+)")
_METHODS = re.compile(r"Permission denied \(([^)]*)\)")
_CONNECT = re.compile(r"connect to (?:host|address) .* port \d+: (.*)")
# connect()'s error in the C library's English (ssh sets no locale for messages) → errno.
_ERRNO = {
    "Connection refused": 111,
    "No route to host": 113,
    "Network is unreachable": 101,
    "Connection reset by peer": 104,
    "Broken pipe": 32,
}
_TIMED_OUT = re.compile(r"timed out|Timeout before authentication")
_DROPPED = re.compile(
    r"(?:kex|ssh)_exchange_identification: (.*)|banner exchange: (.*)|(Connection (?:closed|reset) by .*)"
)
_KILLED = "the agent was killed by a signal"
_BROKEN = re.compile(
    r"Timeout, server |client_loop: |Connection to .* closed by |Connection reset |Read from remote host "
    r"|Failed to connect to new control master|mux_client_\w+: (?:read from master failed|.*: Broken pipe)"
)


def explain_ssh(
    stderr: bytes,
    code: int | None,
    host: Resolved,
    *,
    hop: str,
    python: str,
    timeout_s: float,
    connected: bool,
    was_alive: bool,
    alive: bool,
) -> TransportError:
    """Return why a session over ssh has ended.

    ``hop``: the jump host before it, or empty; ``connected``: the agent has sent output; ``python``: its interpreter;
    ``alive``: the shared connection still works; ``was_alive``: it was open at some time.
    """
    text = stderr.decode("utf-8", "replace")
    lines = [clean(line) for line in text.splitlines() if line.strip() and not _CHATTER.match(line)]
    if code != SSH_FAILED:
        return explain_exit(code, "\n".join(lines).encode(), python)
    broken = next((line for line in reversed(lines) if _BROKEN.match(line)), "")
    if alive and not broken:
        if connected or not lines:  # ssh does not report signals; nothing else ends a session like this
            return TransportError("exited", _KILLED)
    elif connected or (was_alive and all(map(_BROKEN.match, lines))):
        # a session ends without a message when the connection that it shares ends
        return TransportError("lost", f"the connection was lost: {broken or 'ssh gave no reason'}")
    return explain_login(text, host, hop=hop, timeout_s=timeout_s)


def explain_login(text: str, host: Resolved, *, hop: str, timeout_s: float) -> TransportError:
    """Return why ssh could not log in; :class:`Dropped` is retried."""
    name = host.name
    offered = found[-1] if (found := _OFFERED.findall(text)) else ""
    lines = [clean(line) for line in text.splitlines() if line.strip() and not _CHATTER.match(line)]
    last = lines[-1] if lines else ""
    if refusal := errors.job_required(name, text):
        return refusal
    if "REVOKED HOST KEY" in text or "is marked as revoked" in text:
        return errors.revoked_key(name)
    if "HOST IDENTIFICATION HAS CHANGED" in text:
        return errors.changed_key(name, offered, host.key_name, host.port)
    if "host key is known for" in text or "Host key verification failed" in text:
        return errors.unknown_key(name, offered)
    if "Could not resolve hostname" in text:
        return errors.no_address(name)
    if "Bad configuration option" in text or "Bad owner or permissions" in text or "terminating, " in text:
        return TransportError("resolve", f"ssh_config: {lines[0]}", "correct the file that `ssh_config` names")
    methods = _METHODS.findall(text)
    if methods or any("Permission denied" in line for line in lines):
        return _refused(host, methods[-1].split(",") if methods else [])
    if "Too many authentication failures" in text:
        remedy = "set IdentityFile and IdentitiesOnly for it in your ssh_config"
        return TransportError("auth", f"ssh: {host.user}@{name} was refused: too many keys were tried", remedy)
    if connecting := _CONNECT.search(text):
        return _not_connected(clean(connecting[1]).strip(), timeout_s)
    if dropped := _DROPPED.search(text):
        why = next(clean(group).strip() for group in dropped.groups() if group)
        if _TIMED_OUT.search(why):
            return errors.no_answer(timeout_s)
        if host.proxy_command is not None and not hop:
            words = f"ssh: the ProxyCommand of {name} ended without a connection ({clean(host.proxy_command, 120)})"
            return Dropped("unreachable", words, f"run `ssh {name}` to see its error messages")
        return Dropped(
            "lost", f"ssh: {why[:1].lower()}{why[1:]}, while logging in", "see sshd's MaxStartups and its log"
        )
    if failed := re.search(r"open failed: (.*)", text):
        return errors.not_through(name, hop, clean(failed[1]).strip())
    if _TIMED_OUT.search(text):
        return errors.no_answer(timeout_s)
    return errors.dropped(name, last)


def _refused(host: Resolved, methods: list[str]) -> TransportError:
    if {"password", "keyboard-interactive"} & set(methods):
        return errors.interaction_required(host.name, host.user, may_ask=True)
    return errors.key_refused(host.name, host.user)


def _not_connected(why: str, timeout_s: float) -> TransportError:
    if _TIMED_OUT.search(why):
        return errors.no_answer(timeout_s)
    known = errors.by_errno(_ERRNO[why]) if why in _ERRNO else None
    return known or TransportError("unreachable", f"ssh: {why[:1].lower()}{why[1:]}")
