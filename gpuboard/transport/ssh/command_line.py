"""Command lines of the system's ssh for a host: its options, the connection it shares, the jump hosts before it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuboard.errors import ConfigError
from gpuboard.files import KEY_MAX, read
from gpuboard.model.text import clean
from gpuboard.model.units import parse_duration
from gpuboard.transport.base import TransportError
from gpuboard.transport.command import run
from gpuboard.transport.ssh import control_sockets, errors
from gpuboard.transport.ssh.openssh_errors import explain_login
from gpuboard.transport.ssh.resolve import Resolved, Resolver, cache_file, jump_chain
from gpuboard.transport.ssh.single_flight import SingleFlight, retry_dropped

if TYPE_CHECKING:
    from gpuboard.config import Settings

# Turns off what ssh_config sets for interactive sessions. An unknown host key is never accepted, whatever ssh_config
# says; known_hosts is never written.
_OPTIONS = (
    "-a", "-x", "-T", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no", "-o", "VisualHostKey=no",
    "-o", "StrictHostKeyChecking=yes", "-o", "UpdateHostKeys=no",
)  # fmt: skip
# Only at DEBUG1 does ssh print the key of an unknown server.
_BATCH = ("-o", "BatchMode=yes", "-o", "LogLevel=DEBUG1")
_INTERACTIVE = ("-n", "-o", "BatchMode=no", "-o", "LogLevel=INFO")
_KEEPALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
# Older versions of ssh reject some of these options: they are passed only where ssh_config sets another value.
_DEFAULTS = {"remotecommand": "none", "sessiontype": "default", "stdinnull": "no", "forkafterauthentication": "no"}
_TARGET = "[%h]:%p"
_NO_OP = "true"  # a command that every shell has


class SshRoute:
    """ssh's command lines for one host. ``via``: the route to the jump host before it, whose connection it uses.

    ``shared``: the socket of its shared connection; ``own``: gpuboard's, not one that ssh_config names.
    """

    def __init__(
        self, host: Resolved, via: SshRoute | None, options: tuple[str, ...], *, shared: str | None, own: bool
    ) -> None:
        self.host = host
        self.via = via
        self.shared = shared
        self._options = options
        self._own = own

    @property
    def hop(self) -> str:
        """The jump host before it; empty without one."""
        return self.via.host.spec if self.via is not None else ""

    @property
    def name(self) -> str:
        """The host as the user wrote it."""
        return self.host.spec

    @property
    def may_ask(self) -> bool:
        """Whether ssh may ask for the passphrase of a key or the PIN of a card."""
        return self.host.get("pkcs11provider") is not None or any(map(_encrypted, self.host.all("identityfile")))

    def alive(self) -> bool:
        """Return whether its shared connection is open."""
        return self._master() is not None

    def answers(self) -> bool:
        """Return whether its shared connection is open and its process not about to end; takes up to seconds."""
        return control_sockets.answers(self._master())

    def session(self, command: str) -> list[str]:
        """Return the command line that runs ``command`` there without asking anything."""
        return [*self._call(*_BATCH, *self._sharing(interactive=False)), "--", self.host.name, command]

    def interactive_login(self) -> list[str]:
        """Return the command line that opens the shared connection on a terminal, where ssh may ask."""
        return [*self._call(*_INTERACTIVE, *self._sharing(interactive=True)), "--", self.host.name, _NO_OP]

    def login(self) -> list[str]:
        """Return the command line that opens the shared connection without asking anything."""
        return self.session(_NO_OP)

    def forward(self, address: str) -> list[str]:
        """Return the command line that connects its stdin and stdout to ``address`` from there."""
        over = ("-S", self._master() or "none") if self._own else ()
        return [*self._call(*_BATCH, *over, "-o", "ControlMaster=no"), "-W", address, "--", self.host.name]

    def shared_options(self) -> list[str]:
        """Return the options with which another ssh uses the open connection to this host, or to its jump host."""
        if self._own and (path := self._master()):
            return ["-S", path, "-o", "ControlMaster=no"]
        return self._proxy() if self.via is not None and self.via.alive() else []

    def _master(self) -> str | None:
        paths = (self._typed, self.shared) if self._own else (self.shared,)
        return next((path for path in paths if control_sockets.alive(path)), None)

    @property
    def _typed(self) -> str | None:
        """The socket of a connection that needed a password or a code."""
        return None if self.shared is None else f"{self.shared}p"

    def _sharing(self, *, interactive: bool) -> list[str]:
        if not self._own:
            return []  # as in ssh_config
        if path := self._master():
            return ["-S", path, "-o", "ControlMaster=no"]
        path = self._typed if interactive else self.shared
        if path is None:
            return ["-S", "none", "-o", "ControlMaster=no"]
        persist_s = control_sockets.TYPED_PERSIST_S if interactive else control_sockets.PERSIST_S
        return ["-S", path, "-o", "ControlMaster=auto", "-o", f"ControlPersist={persist_s}"]

    def _proxy(self) -> list[str]:
        if self.via is None:
            return []
        words = [word if word == _TARGET else word.replace("%", "%%") for word in self.via.forward(_TARGET)]
        return ["-o", f"ProxyCommand={' '.join(map(shlex.quote, words))}"]

    def _call(self, *more: str) -> list[str]:
        user, port = self.host.spec_user, self.host.spec_port
        login = [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ())]
        return [*self._options, *more, *self._proxy(), *login]


class SshRoutes:
    """The routes of one process to all hosts. May be used from any thread."""

    def __init__(self, settings: Settings, env: Mapping[str, str]) -> None:
        """Raises ConfigError where there is no ssh."""
        ssh = shutil.which("ssh")
        if ssh is None:
            raise ConfigError(
                'transport = "openssh": no `ssh` on PATH; install openssh-client, or set transport = "asyncssh"'
            )
        self.environ = {**env, "SSH_ASKPASS_REQUIRE": "never"}  # no graphical prompts
        self.timeout_s = parse_duration(settings.connect_timeout)
        self.at_a_time = settings.max_connections
        usual = settings.known_hosts == type(settings)().known_hosts  # ssh's own defaults
        self._known_hosts = None if usual else [os.path.expanduser(file) for file in settings.known_hosts]
        self._resolver = Resolver(settings.ssh_config, cache=cache_file(), timeout_s=self.timeout_s)
        connect_s = max(1, math.ceil(self.timeout_s))
        self._words = (ssh, *self._resolver.flags, *_OPTIONS, "-o", f"ConnectTimeout={connect_s}")
        self._folder = control_sockets.socket_folder(env)
        self._lock = threading.Lock()
        self._logins = SingleFlight()
        self._used: set[str] = set()
        self._closed = threading.Event()

    def find(self, spec: str) -> SshRoute:
        """Return the route to a host without logging in anywhere. Raises TransportError."""
        host = self._resolver.get(spec)
        route: SshRoute | None = None
        if self._folder is not None:  # else ssh itself handles the jump hosts, and logs in to them every time
            for hop in jump_chain(host.name, host.jumps, lambda name: self._resolver.get(name).jumps):
                route = self._route(self._resolver.get(hop), route)
        return self._route(host, route)

    def open_jumps(self, spec: str) -> SshRoute:
        """Return the route to a host after logging in to the jump hosts before it. Raises TransportError."""
        route = self.find(spec)
        if route.via is not None:
            self._log_in_jumps(route.via)
        return route

    def log_in(self, route: SshRoute) -> bool:
        """Open the shared connection of ``route`` without asking anything. Raises TransportError."""
        return retry_dropped(lambda: self._log_in_once(route), self.timeout_s, self._closed)

    def jump_failure(self, route: SshRoute) -> TransportError | None:
        """Return why the jump host before ``route`` cannot reach it; None when it can. Raises TransportError."""
        if route.via is None:
            return None
        host = route.host
        _, err = self.run(route.via.forward(f"[{host.hostname}]:{host.port}"))
        if "tdio forwarding" not in err and "open failed" not in err:
            return None
        failed = re.search(r"open failed: (.*)", err)
        reason = clean(failed[1]) if failed else f"no connection from there to {host.hostname} port {host.port}"
        return errors.not_through(host.name, route.hop, reason)

    def run(self, argv: list[str]) -> tuple[int | None, str]:
        """Run ssh to its end and return its exit code and stderr.

        The code is None when it was killed after ``connect_timeout`` or by ``close``. Raises TransportError.
        """
        try:
            ran = run(argv, self.environ, self.timeout_s, stopped=self._closed)
        except OSError as error:
            raise errors.by_error(error) from None
        return (ran.code, ran.err) if ran.ended else (None, "")

    def detach(self) -> None:
        """Stop running logins; shared connections stay open for other processes."""
        self._closed.set()
        self._resolver.close()

    def close(self) -> None:
        """Stop running logins; gpuboard's shared connections end with their last session."""
        self.detach()
        with self._lock:  # threads that log in may still add to it
            used = [*self._used]
        control_sockets.stop(used)

    def _log_in_jumps(self, route: SshRoute) -> None:
        """Log in to a jump host and those before it. Raises TransportError."""
        if route.via is not None:
            self._log_in_jumps(route.via)
        self._logins.run(route.shared or route.host.spec, lambda: route.alive() or None, lambda: self.log_in(route))

    def _log_in_once(self, route: SshRoute) -> bool:
        code, err = self.run(route.login())
        if code == 0 or route.alive():
            return True  # a mere jump host may refuse the command
        if code is None:
            raise errors.no_answer(self.timeout_s)
        raise explain_login(err, route.host, hop=route.hop, timeout_s=self.timeout_s)

    def _route(self, host: Resolved, via: SshRoute | None) -> SshRoute:
        options = list(self._words)
        if not host.count("serveraliveinterval"):
            options += _KEEPALIVE
        if host.known_hosts() is None and self._known_hosts is not None:
            files = " ".join(f'"{file}"' for file in self._known_hosts)
            options += ["-o", f"UserKnownHostsFile={files}", "-o", "GlobalKnownHostsFile=/dev/null"]
        for key, default in _DEFAULTS.items():
            if key in host.values and host.values[key][0].lower() != default:
                options += ["-o", f"{key}={default}"]
        configured = host.get("controlpath")
        lasts = host.get("controlmaster") in {"auto", "yes", "true"} and host.get("controlpersist") not in {None, "no"}
        own = configured is None or not (lasts or control_sockets.alive(configured))
        shared = self._socket(host, via) if own else configured
        if own and shared is not None:
            with self._lock:
                self._used.add(shared)
        return SshRoute(host, via, tuple(options), shared=shared, own=own)

    def _socket(self, host: Resolved, via: SshRoute | None) -> str | None:
        """Return the socket for connections to ``host``: a hash of address, user and jump hosts."""
        if self._folder is None:
            return None
        hops = []
        while via is not None:
            hops.append(via.shared)
            via = via.via
        what = [self._resolver.flags, host.spec, host.hostname, host.port, host.user, host.proxy_command, hops]
        return f"{self._folder}/{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}"


def shared_options(spec: str, settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Return the options with which another ssh uses an open connection to a host. Raises TransportError."""
    routes = SshRoutes(settings, env)
    try:
        return routes.find(spec).shared_options()
    finally:
        routes.detach()


def _encrypted(path: str) -> bool:
    """Return whether a private key needs a passphrase (PROTOCOL.key of OpenSSH, and PEM)."""
    try:
        text = read(path, KEY_MAX)
    except OSError:
        return False
    if b"BEGIN OPENSSH PRIVATE KEY" not in text:
        return b"ENCRYPTED" in text
    try:
        head = base64.b64decode(b"".join(text.splitlines()[1:3]) + b"==")
    except ValueError:
        return False
    return not head.startswith(b"openssh-key-v1\0\0\0\0\x04none")
