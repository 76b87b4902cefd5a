"""Login through paramiko: address, jump hosts, host key, the user's keys.

Not through SSHClient: it lacks IdentitiesOnly, its HostKeys reads known_hosts incompletely (see known_hosts.py), and
its errors do not show whether a server asks for a password.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import paramiko

from gpuboard.files import SSH_CONFIG_MAX, read
from gpuboard.model.text import clean
from gpuboard.model.units import parse_duration
from gpuboard.transport.base import TransportError
from gpuboard.transport.ssh import errors, resolve
from gpuboard.transport.ssh.known_hosts import KnownHosts
from gpuboard.transport.ssh.single_flight import Dropped, SingleFlight, retry_dropped

if TYPE_CHECKING:
    from gpuboard.config import Settings

_KEEPALIVE_S, _KEEPALIVE_COUNT = 15, 3
_WAKE_S = 5.0  # between two wake-ups of paramiko's thread; its default of 0.1 s costs 5 % of a core at 100 nodes


class ParamikoLogins:
    """Connections of one transport. May be used from any thread; all methods block."""

    def __init__(self, settings: Settings) -> None:
        self.timeout_s = parse_duration(settings.connect_timeout)
        self.closed = threading.Event()
        self._config: resolve.Resolver | OwnConfig = (
            resolve.Resolver(settings.ssh_config, cache=resolve.cache_file())
            if resolve.available()
            else OwnConfig(settings.ssh_config)
        )
        self._known_hosts = settings.known_hosts
        self._known: dict[tuple[tuple[str, float], ...], KnownHosts] = {}
        self._logins = SingleFlight()
        self._jumps: dict[tuple[str, ...], paramiko.Transport] = {}

    def find(self, spec: str) -> resolve.Resolved:
        """Return the ssh configuration of ``[user@]host[:port]``. Raises TransportError."""
        return self._config.get(spec)

    def log_in(self, host: resolve.Resolved) -> paramiko.Transport:
        """Return a connection to ``host``. Raises TransportError."""
        chain = resolve.jump_chain(host.name, host.jumps, lambda name: self.find(name).jumps)
        via = self._through(chain) if chain else None
        return retry_dropped(lambda: self._log_in_once(host, via), self.timeout_s, self.closed)

    def close(self) -> None:
        """Drop the connections to jump hosts."""
        self.closed.set()
        for connection in list(self._jumps.values()):
            drop(connection)
        self._config.close()

    def _through(self, chain: tuple[str, ...]) -> paramiko.Transport:
        """Return the connection to the last host of ``chain``, which all nodes behind it share."""

        def find() -> paramiko.Transport | None:
            found = self._jumps.get(chain)
            return found if found is not None and found.is_active() else None

        def make() -> paramiko.Transport:
            via = self._through(chain[:-1]) if chain[:-1] else None
            host = self.find(chain[-1])
            self._jumps[chain] = made = retry_dropped(lambda: self._log_in_once(host, via), self.timeout_s, self.closed)
            if self.closed.is_set():  # meanwhile: ``close`` has dropped the others
                drop(made)
            return made

        return self._logins.run(chain, find, make)

    def _log_in_once(self, host: resolve.Resolved, via: paramiko.Transport | None) -> paramiko.Transport:
        connection = None
        until = time.monotonic() + self.timeout_s
        try:
            link = self._link(host, via)
            connection = paramiko.Transport(link)
            link.settimeout(_WAKE_S)
            connection.banner_timeout = connection.handshake_timeout = self.timeout_s
            connection.auth_timeout = connection.channel_timeout = self.timeout_s
            known = self._known_keys(host)
            _prefer(connection, known.kinds(host.key_name, host.port))
            connection.start_client(timeout=self.timeout_s)
            _verify(connection, host, known)
            connection.set_keepalive(host.count("serveraliveinterval") or _KEEPALIVE_S)
            _authenticate(connection, host)
            return connection
        except BaseException as error:
            banner = ""
            if connection is not None:
                banner = _banner(connection)
                drop(connection)
            if isinstance(error, Exception) and (refusal := errors.job_required(host.name, banner)):
                raise refusal from error
            if isinstance(error, paramiko.SSHException | EOFError) and time.monotonic() > until:
                raise errors.no_answer(self.timeout_s) from error  # paramiko has many errors for a timeout
            if isinstance(error, Exception):
                raise explain(error, host, hop=host.jumps[-1] if via else "", timeout_s=self.timeout_s) from error
            raise

    def _link(self, host: resolve.Resolved, via: paramiko.Transport | None) -> Any:
        """Return a socket, or an object that acts as one, to ``host``."""
        if via is not None:
            return via.open_channel(
                "direct-tcpip", (host.hostname, host.port), ("127.0.0.1", 0), timeout=self.timeout_s
            )
        if host.proxy_command is not None:
            return _proxied(host.proxy_command)
        link = _connected(host.hostname, host.port, host.family, self.timeout_s)
        # paramiko's keepalives wait for no reply, so TCP has to detect a path that drops packets
        alive_s = host.count("serveraliveinterval") or _KEEPALIVE_S
        count = host.count("serveralivecountmax") or _KEEPALIVE_COUNT
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, alive_s * count * 1000)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    def _known_keys(self, host: resolve.Resolved) -> KnownHosts:
        files = host.known_hosts() or [os.path.expanduser(file) for file in self._known_hosts]
        key = tuple((file, os.stat(file).st_mtime if os.path.exists(file) else 0.0) for file in files)
        if key not in self._known:
            self._known[key] = KnownHosts(files)
        return self._known[key]


class OwnConfig:
    """ssh_config as paramiko reads it, where there is no ssh program: without Include."""

    def __init__(self, ssh_config: str) -> None:
        self._files, _ = resolve.config_files(ssh_config)

    def get(self, spec: str) -> resolve.Resolved:
        """Return a host's configuration. Raises TransportError for a file that has an Include or cannot be read."""
        user, name, port = resolve.split(spec)
        local_user = resolve.local_user()
        config = paramiko.SSHConfig()
        for file in self._files:
            try:
                lines = read(file, SSH_CONFIG_MAX).decode("utf-8", "replace").splitlines()
                config.parse(lines)
            except (OSError, paramiko.SSHException) as error:
                raise TransportError("resolve", f"ssh_config: {file}: {error}", "correct that file") from None
            if any(resolve.included("\n".join(lines), resolve.include_folder(file))):
                raise TransportError(
                    "resolve",
                    f"ssh_config: {file} has an Include, which paramiko does not read",
                    'install ssh (openssh-client), which is used then, or set transport = "asyncssh"',
                )
        try:
            found = config.lookup(name)
        except Exception as error:  # an unsupported Match, a name without an address, …
            raise TransportError("resolve", f"ssh_config: {clean(str(error))}", "correct your ssh_config") from None
        values = {key: list(value) if isinstance(value, list) else [value or "none"] for key, value in found.items()}
        for key in ("userknownhostsfile", "globalknownhostsfile"):
            if key in values:
                values[key] = values[key][0].split()
        values.setdefault("identityfile", [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")])
        values["user"] = [user or values.get("user", [local_user])[0]]
        values["port"] = [str(port) if port else values.get("port", ["22"])[0]]
        return resolve.Resolved(spec, values)

    def close(self) -> None:
        """Nothing to save: the files are read again for every host."""


def _banner(connection: paramiko.Transport) -> str:
    """Return the server's login banner; get_banner() returns None when the connection has ended."""
    banner = getattr(connection.auth_handler, "banner", None)
    return banner.decode("utf-8", "replace") if isinstance(banner, bytes) else ""


def drop(connection: paramiko.Transport) -> None:
    """End a connection at once."""
    link = connection.sock
    with suppress(Exception):  # a socket that was never connected, a channel of a connection that has ended
        if isinstance(link, socket.socket):
            link.shutdown(socket.SHUT_RDWR)  # wakes paramiko's thread
        connection.close()
        link.close()


def explain(error: Exception, host: resolve.Resolved, *, hop: str, timeout_s: float) -> TransportError:
    """Return the error for a failure to reach ``host``."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, socket.gaierror):
        return errors.no_address(host.name)
    if isinstance(error, TimeoutError):
        return errors.no_answer(timeout_s)
    if isinstance(error, paramiko.ChannelException):
        return errors.not_through(host.name, hop, error.text) if hop else errors.no_session(host.name, error.text)
    if isinstance(error, paramiko.AuthenticationException):
        return errors.key_refused(host.name, host.user)
    if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError)):
        return Dropped("lost", "ssh: the connection was closed while logging in", "see sshd's MaxStartups and its log")
    if isinstance(error, OSError):
        return errors.by_error(error)
    words = clean(str(error)) or type(error).__name__
    if "protocol banner" in words:
        if host.proxy_command is not None:
            failed = f"ssh: the ProxyCommand of {host.name} ended without a connection"
            return Dropped(
                "unreachable",
                f"{failed} ({clean(host.proxy_command, 120)})",
                f"run `ssh {host.name}` to see its error messages",
            )
        return Dropped("lost", "ssh: the connection was closed while logging in", "see sshd's MaxStartups and its log")
    return errors.dropped(host.name, words)


def _connected(name: str, port: int, family: int, timeout_s: float) -> socket.socket:
    """Return a socket to the first address of ``name`` that answers. Raises OSError."""
    last: OSError | None = None
    for kind, _, _, _, address in socket.getaddrinfo(name, port, family, socket.SOCK_STREAM):
        link = socket.socket(kind, socket.SOCK_STREAM)
        link.settimeout(timeout_s)
        try:
            link.connect(address)
        except OSError as error:
            link.close()
            last = error
            continue
        return link
    raise last or socket.gaierror(socket.EAI_NONAME, "no address")


class _Proxied(socket.socket):
    """The stdin and stdout of a ProxyCommand, which is ended when it is closed: it may not read its input."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(fileno=descriptor)
        self._process = process

    def close(self) -> None:
        super().close()
        self._process.terminate()


def _proxied(command: str) -> socket.socket:
    """Return a socket that is the stdin and stdout of a ProxyCommand, which runs in a shell as with ssh."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    threading.Thread(target=process.wait, daemon=True).start()  # else it remains a zombie
    return _Proxied(ours.detach(), process)


def _prefer(connection: paramiko.Transport, kinds: list[str]) -> None:
    """Prefer host keys of the known types: a key of another type would count as unknown."""
    options = connection.get_security_options()
    wanted = [
        kind for known in kinds for kind in (("rsa-sha2-512", "rsa-sha2-256") if known == "ssh-rsa" else (known,))
    ]
    first = [kind for kind in wanted if kind in options.key_types]
    options.key_types = (*first, *(kind for kind in options.key_types if kind not in first))


def _verify(connection: paramiko.Transport, host: resolve.Resolved, known: KnownHosts) -> None:
    """Raise TransportError unless known_hosts has the server's key."""
    key = connection.get_remote_server_key()
    offered = f"{key.get_name()} {key.fingerprint}"
    verdict = known.judge(host.key_name, host.port, key.asbytes())
    if verdict == "revoked":
        raise errors.revoked_key(host.name)
    if verdict == "changed":
        raise errors.changed_key(host.name, offered, host.key_name, host.port)
    if verdict == "unknown":
        raise errors.unknown_key(host.name, offered)


def _authenticate(connection: paramiko.Transport, host: resolve.Resolved) -> None:
    """Offer the keys of ssh-agent and of files, never a password. Raises paramiko's errors and TransportError."""
    try:
        connection.auth_none(host.user)
        return
    except paramiko.BadAuthenticationType as error:
        methods = set(error.allowed_types)
    files = [file for file in host.all("identityfile") if os.access(file, os.R_OK)]
    for key in _keys(host, files) if "publickey" in methods else ():
        try:
            if not (more := connection.auth_publickey(host.user, key)):
                return
        except paramiko.AuthenticationException:
            if not connection.is_active():
                raise
            continue  # the next key
        methods = set(more)
        break
    if methods & {"password", "keyboard-interactive"}:
        raise errors.interaction_required(host.name, host.user)
    raise errors.key_refused(host.name, host.user)


def _keys(host: resolve.Resolved, files: list[str]) -> Iterator[Any]:
    """Yield the keys to offer, those of ssh-agent first, as in ssh."""
    only = (
        {blob for file in files if (blob := resolve.public_key(file))} if host.get("identitiesonly") == "yes" else None
    )
    with contextlib.closing(paramiko.Agent()) as agent:
        for key in agent.get_keys() if host.values.get("identityagent") != ["none"] else ():
            if only is None or key.asbytes() in only:
                yield key
        for file in files:
            with suppress(Exception):  # encrypted, of an unsupported type, or not a key
                yield paramiko.PKey.from_path(file)
