"""How the system's ssh is called for a host: its options, the connection it shares, the jump hosts before it."""

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
from gpuboard.transport.ssh.resolve import Resolved, Resolver, kept_answers, whole_chain
from gpuboard.transport.ssh.single_flight import Gates, again

if TYPE_CHECKING:
    from gpuboard.config import Settings

# What ssh would do for a person at a terminal, and a picture of a cluster does not want. An unknown host key is never
# accepted, whatever ssh_config says; known_hosts is never written.
_OPTIONS = (
    "-a", "-x", "-T", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no", "-o", "VisualHostKey=no",
    "-o", "StrictHostKeyChecking=yes", "-o", "UpdateHostKeys=no",
)  # fmt: skip
# DEBUG1 shows the key of a server that is not known, which ssh tells at no other level.
_BATCH = ("-o", "BatchMode=yes", "-o", "LogLevel=DEBUG1")
_ASKING = ("-n", "-o", "BatchMode=no", "-o", "LogLevel=INFO")
_KEEPALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
# Newer than some ssh that is in use: said only where ssh_config says otherwise.
_USUAL = {"remotecommand": "none", "sessiontype": "default", "stdinnull": "no", "forkafterauthentication": "no"}
_TARGET = "[%h]:%p"
_NOTHING = "true"  # a command that every shell knows


class SshRoute:
    """How to call ssh for one host. ``via``: the way to the jump host before it, whose connection it goes through.

    ``shared``: the socket of its shared connection, ``own``: one of ours, not one that ssh_config names.
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
        """The jump host before it, or nothing."""
        return self.via.host.spec if self.via is not None else ""

    @property
    def name(self) -> str:
        """The host as the user calls it."""
        return self.host.spec

    @property
    def may_ask(self) -> bool:
        """Whether ssh would ask for something of ours: the passphrase of a key, the PIN of a card."""
        return self.host.get("pkcs11provider") is not None or any(map(_encrypted, self.host.all("identityfile")))

    def alive(self) -> bool:
        """Return whether its shared connection stands."""
        return self._master() is not None

    def session(self, command: str) -> list[str]:
        """Return the command line that runs ``command`` there and asks nobody."""
        return [*self._call(*_BATCH, *self._sharing(asked=False)), "--", self.host.name, command]

    def asking(self) -> list[str]:
        """Return the command line that opens the shared connection on a terminal, where ssh may ask."""
        return [*self._call(*_ASKING, *self._sharing(asked=True)), "--", self.host.name, _NOTHING]

    def opening(self) -> list[str]:
        """Return the command line that opens the shared connection and asks nobody."""
        return self.session(_NOTHING)

    def forward(self, address: str) -> list[str]:
        """Return the command line that joins its stdin and stdout to ``address`` as seen from there."""
        over = ("-S", self._master() or "none") if self._own else ()
        return [*self._call(*_BATCH, *over, "-o", "ControlMaster=no"), "-W", address, "--", self.host.name]

    def lead(self) -> list[str]:
        """Return the options that lead an ssh of another kind over what stands: its connection, or its jump host's."""
        if self._own and (path := self._master()):
            return ["-S", path, "-o", "ControlMaster=no"]
        return self._proxy() if self.via is not None and self.via.alive() else []

    def _master(self) -> str | None:
        paths = (self._asked, self.shared) if self._own else (self.shared,)
        return next((path for path in paths if control_sockets.alive(path)), None)

    @property
    def _asked(self) -> str | None:
        """The socket of a connection for which somebody has typed something."""
        return None if self.shared is None else f"{self.shared}p"

    def _sharing(self, *, asked: bool) -> list[str]:
        if not self._own:
            return []  # as ssh_config says
        if path := self._master():
            return ["-S", path, "-o", "ControlMaster=no"]
        path = self._asked if asked else self.shared
        if path is None:
            return ["-S", "none", "-o", "ControlMaster=no"]
        persist_s = control_sockets.ASKED_PERSIST_S if asked else control_sockets.PERSIST_S
        return ["-S", path, "-o", "ControlMaster=auto", "-o", f"ControlPersist={persist_s}"]

    def _proxy(self) -> list[str]:
        if self.via is None:
            return []
        words = [word if word == _TARGET else word.replace("%", "%%") for word in self.via.forward(_TARGET)]
        return ["-o", f"ProxyCommand={' '.join(map(shlex.quote, words))}"]

    def _call(self, *more: str) -> list[str]:
        user, port = self.host.spec_user, self.host.spec_port
        whom = [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ())]
        return [*self._options, *more, *self._proxy(), *whom]


class Ways:
    """The ways of one process to all hosts. May be used from any thread."""

    def __init__(self, settings: Settings, env: Mapping[str, str]) -> None:
        """Raises ConfigError where there is no ssh."""
        ssh = shutil.which("ssh")
        if ssh is None:
            raise ConfigError(
                'transport = "openssh": no `ssh` on PATH; install openssh-client, or set transport = "asyncssh"'
            )
        self.environ = {**env, "SSH_ASKPASS_REQUIRE": "never"}  # without a terminal nobody is asked
        self.timeout_s = parse_duration(settings.connect_timeout)
        self.at_a_time = settings.max_connections
        usual = settings.known_hosts == type(settings)().known_hosts  # those that ssh takes by itself
        self._known_hosts = None if usual else [os.path.expanduser(file) for file in settings.known_hosts]
        self._resolver = Resolver(settings.ssh_config, kept=kept_answers(), timeout_s=self.timeout_s)
        connect_s = max(1, math.ceil(self.timeout_s))
        self._words = (ssh, *self._resolver.flags, *_OPTIONS, "-o", f"ConnectTimeout={connect_s}")
        self._folder = control_sockets.socket_folder(env)
        self._lock = threading.Lock()
        self._gates = Gates()
        self._used: set[str] = set()
        self._closed = threading.Event()

    def find(self, spec: str) -> SshRoute:
        """Return the way to a host; nobody is logged in to yet. Raises TransportError."""
        host = self._resolver.get(spec)
        way: SshRoute | None = None
        if self._folder is not None:  # else ssh goes through jump hosts by itself, and logs in to them every time
            for hop in whole_chain(host.name, host.jumps, lambda name: self._resolver.get(name).jumps):
                way = self._way(self._resolver.get(hop), way)
        return self._way(host, way)

    def to(self, spec: str) -> SshRoute:
        """Return the way to a host, logged in to the jump hosts before it. Raises TransportError."""
        way = self.find(spec)
        if way.via is not None:
            self._pass(way.via)
        return way

    def log_in(self, way: SshRoute) -> bool:
        """Open the shared connection of ``way``; asks nobody. Raises TransportError."""
        return again(lambda: self._log_in_once(way), self.timeout_s, self._closed)

    def seen_from(self, way: SshRoute) -> TransportError | None:
        """Return why the jump host before ``way`` does not get there; None when it does. Raises TransportError."""
        if way.via is None:
            return None
        host = way.host
        _, err = self.run(way.via.forward(f"[{host.hostname}]:{host.port}"))
        if "tdio forwarding" not in err and "open failed" not in err:
            return None
        failed = re.search(r"open failed: (.*)", err)
        reason = clean(failed[1]) if failed else f"it gets no connection to {host.hostname} port {host.port}"
        return errors.not_through(host.name, way.hop, reason)

    def run(self, argv: list[str]) -> tuple[int | None, str]:
        """Run ssh to its end and return its exit code and stderr.

        Without a code: it was ended, because the time of a connection is up or we are closed. Raises TransportError.
        """
        try:
            ran = run(argv, self.environ, self.timeout_s, stopped=self._closed)
        except OSError as error:
            raise errors.by_error(error) from None
        return (ran.code, ran.err) if ran.ended else (None, "")

    def keep(self) -> None:
        """End, but leave the shared connections to those who come next."""
        self._closed.set()
        self._resolver.save()

    def close(self) -> None:
        """End what logs in, and let the shared connections that are ours end with their last session."""
        self.keep()
        control_sockets.stop(self._used)

    def _pass(self, way: SshRoute) -> None:
        """Log in to a jump host and those before it. Raises TransportError."""
        if way.via is not None:
            self._pass(way.via)
        self._gates.enter(way.shared or way.host.spec, lambda: way.alive() or None, lambda: self.log_in(way))

    def _log_in_once(self, way: SshRoute) -> bool:
        code, err = self.run(way.opening())
        if code == 0 or way.alive():
            return True  # a host that only lets pass may refuse the command
        if code is None:
            raise errors.no_answer(self.timeout_s)
        raise explain_login(err, way.host, hop=way.hop, timeout_s=self.timeout_s)

    def _way(self, host: Resolved, via: SshRoute | None) -> SshRoute:
        options = list(self._words)
        if not host.count("serveraliveinterval"):
            options += _KEEPALIVE
        if host.known_hosts() is None and self._known_hosts is not None:
            files = " ".join(f'"{file}"' for file in self._known_hosts)
            options += ["-o", f"UserKnownHostsFile={files}", "-o", "GlobalKnownHostsFile=/dev/null"]
        for key, usual in _USUAL.items():
            if key in host.values and host.values[key][0].lower() != usual:
                options += ["-o", f"{key}={usual}"]
        theirs = host.get("controlpath")
        lasts = host.get("controlmaster") in {"auto", "yes", "true"} and host.get("controlpersist") not in {None, "no"}
        own = theirs is None or not (lasts or control_sockets.alive(theirs))
        shared = self._socket(host, via) if own else theirs
        if own and shared is not None:
            with self._lock:
                self._used.add(shared)
        return SshRoute(host, via, tuple(options), shared=shared, own=own)

    def _socket(self, host: Resolved, via: SshRoute | None) -> str | None:
        """Return where the connection to ``host`` is shared: by everything that says where it goes, and as whom."""
        if self._folder is None:
            return None
        hops = []
        while via is not None:
            hops.append(via.shared)
            via = via.via
        what = [self._resolver.flags, host.spec, host.hostname, host.port, host.user, host.proxy_command, hops]
        return f"{self._folder}/{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}"


def lead(spec: str, settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Return the options that lead an ssh of another kind to a host over what stands. Raises TransportError."""
    ways = Ways(settings, env)
    try:
        return ways.find(spec).lead()
    finally:
        ways.keep()


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
