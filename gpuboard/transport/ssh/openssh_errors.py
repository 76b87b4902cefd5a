"""What the system's ssh writes to stderr, with its exit code → TransportError (pure). OpenSSH does not translate."""

from __future__ import annotations

import re

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.ssh import errors
from gpuboard.transport.ssh.resolve import Resolved
from gpuboard.transport.ssh.single_flight import Dropped

SSH_FAILED = 255  # ssh's own exit code; what it ran may end with it too, also when a signal has ended it there

# Lines of ssh that say nothing about an end.
_CHATTER = re.compile(
    r"debug[123]: |Warning: Permanently added |Authenticated to |Authenticated using |Transferred: |Bytes per second: "
    r"|Shared connection to |ControlSocket .* already exists, disabling|mux_client_request_session: session request"
    r"|Pseudo-terminal will not be allocated|Control socket connect\("
)
_OFFERED = re.compile(r"debug1: Server host key: (\S+ SHA256:\S+)")
_CONNECT = re.compile(r"connect to (?:host|address) .* port \d+: (.*)")
# What connect() said, in the C library's English (ssh sets no language for its messages) → errno's name.
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
_KILLED = "the agent was killed by a signal there"
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
    stood: bool,
    stands: bool,
) -> TransportError:
    """Return why a session over ssh is over.

    ``hop``: the jump host before it, or empty; ``connected``: the agent has spoken before; ``python``: its interpreter;
    ``stands``: the connection itself, which it shared, does; ``stood``: it was seen to.
    """
    text = stderr.decode("utf-8", "replace")
    lines = [clean(line) for line in text.splitlines() if line.strip() and not _CHATTER.match(line)]
    if code != SSH_FAILED:
        return explain_exit(code, "\n".join(lines).encode(), python)
    if connected or (stood and not stands and all(map(_BROKEN.match, lines))):
        said = next((line for line in reversed(lines) if _BROKEN.match(line)), "")
        if stands and not said:  # ssh tells of no signal; it is the one way to end like this
            return TransportError("exited", _KILLED)
        # a session ends without a word together with the connection that it shares
        return TransportError("lost", f"the connection was lost: {said or 'ssh does not say why'}")
    if stands and not lines:
        return TransportError("exited", _KILLED)
    return explain_login(text, host, hop=hop, timeout_s=timeout_s)


def explain_login(text: str, host: Resolved, *, hop: str, timeout_s: float) -> TransportError:
    """Return why ssh did not get in. :class:`Dropped` is worth another try."""
    name = host.name
    offered = found[-1] if (found := _OFFERED.findall(text)) else ""
    lines = [clean(line) for line in text.splitlines() if line.strip() and not _CHATTER.match(line)]
    last = lines[-1] if lines else ""
    if refusal := errors.wants_a_job(name, text):
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
    if refused := re.search(r"Permission denied \(([^)]*)\)|Permission denied", text):
        return _refused(host, (refused[1] or "").split(","))
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
            return Dropped("unreachable", words, f"try `ssh {name}`, which shows what it says")
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
        return errors.asks(host.name, host.user, may_ask=True)
    return errors.not_let_in(host.name, host.user)


def _not_connected(why: str, timeout_s: float) -> TransportError:
    if _TIMED_OUT.search(why):
        return errors.no_answer(timeout_s)
    known = errors.by_errno(_ERRNO[why]) if why in _ERRNO else None
    return known or TransportError("unreachable", f"ssh: {why[:1].lower()}{why[1:]}")
