"""What the user's ssh configuration says about a host: jumps, keys, known hosts. asyncssh reads the rest itself."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncssh.config import SSHClientConfig, SSHConfig
from asyncssh.known_hosts import SSHKnownHosts

from gpuboard.transport.base import TransportError

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_JUMPS_MAX = 8
_CIPHER = "aes128-gcm@openssh.com"  # half the cost of asyncssh's default; FACTS of polling: 0.10 ms against 0.17


class Host:
    """How to log in to one host. ``offered`` is set to the key of a server that could not be verified."""

    def __init__(
        self, name: str, *, options: dict[str, Any], jumps: tuple[str, ...], files: list[str], known: KnownHosts
    ) -> None:
        self.name = name
        self.options = options  # for asyncssh.connect
        self.jumps = jumps
        self.files = files  # ssh_config files, the user's first
        self.known_hosts = known.hosts
        self.known_files = known.files
        self.offered: str | None = None
        self.user: str = options.get("username") or ""
        self.key_name: str = name  # what known_hosts is asked for
        self.port = 22

    def key_is_known(self) -> bool:
        """Return whether known_hosts has any key for this host: then what was offered is a changed one."""
        found = self.known_hosts.match(self.key_name, "", None if self.port == 22 else self.port)
        return any(found[:2])


class KnownHosts:
    """Some known_hosts files as one list."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)
        self.hosts = SSHKnownHosts()
        for file in files:
            try:
                text = Path(file).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # no such file: nobody is known by it
            for line in text.splitlines():
                try:
                    self.hosts.load(line)
                except ValueError:
                    continue  # ssh skips lines it cannot read, too


class HostConfig:
    """Reads ssh_config and known_hosts; the latter once until it changes, since all hosts share it."""

    def __init__(self, ssh_config: str, known_hosts: Sequence[str]) -> None:
        user = os.path.expanduser(ssh_config)
        self._files = [file for file in (user, SYSTEM_CONFIG) if os.access(file, os.R_OK)]
        self._known_hosts = [os.path.expanduser(file) for file in known_hosts]
        self._cache: dict[tuple[tuple[str, float], ...], KnownHosts] = {}

    def host(self, spec: str) -> Host:
        """Return how to log in to ``[user@]host[:port]`` (also ``ssh://…``). Raises ValueError for a bad ssh_config."""
        username, name, port = _split(spec)
        config = SSHClientConfig.load(
            None, self._files, False, False, False, getpass.getuser(), username or (), name, port or ()
        )
        options: dict[str, Any] = {}
        if username:
            options["username"] = username
        if port:
            options["port"] = port
        if config.get("Ciphers") is None:
            options["encryption_algs"] = f"^{_CIPHER}"
        for key, option in (
            ("ServerAliveInterval", "keepalive_interval"),
            ("ServerAliveCountMax", "keepalive_count_max"),
        ):
            if config.get(key):
                options[option] = config.get(key)
        if keys := _texts(config.get("IdentityFile")):
            # ssh goes on without an IdentityFile that is missing or encrypted; asyncssh would give up
            options["client_keys"] = [key for key in keys if os.access(os.path.expanduser(key), os.R_OK)]
            options["ignore_encrypted"] = True
        jump = str(config.get("ProxyJump") or "none")
        jumps = () if jump.lower() == "none" else tuple(hop.strip() for hop in jump.split(","))
        if str(config.get("ProxyCommand") or "").lower() == "none":
            options["proxy_command"] = None
        host = Host(name, options=options, jumps=jumps, files=self._files, known=self._known(config))
        host.user = str(config.get("User") or getpass.getuser())
        host.port = int(str(config.get("Port") or 22))
        host.key_name = str(config.get("HostKeyAlias") or config.get("Hostname") or name)
        return host

    def jumps(self, host: Host) -> tuple[str, ...]:
        """Return all hosts to go through to ``host``, the first one first: that one's own ProxyJump counts, too."""
        chain = host.jumps
        for _ in range(_JUMPS_MAX):
            before = self.host(chain[0]).jumps if chain else ()
            if not before:
                return chain
            chain = before + chain
        raise TransportError("resolve", f"ssh: ProxyJump of {host.name} goes in circles", "check your ssh_config")

    def _known(self, config: SSHConfig) -> KnownHosts:
        own = _texts(config.get("UserKnownHostsFile"))
        files = own + _texts(config.get("GlobalKnownHostsFile")) if own else self._known_hosts
        files = [os.path.expanduser(file) for file in files]
        key = tuple((file, os.stat(file).st_mtime if os.path.exists(file) else 0.0) for file in files)
        if key not in self._cache:
            self._cache[key] = KnownHosts(files)
        return self._cache[key]


def _split(spec: str) -> tuple[str | None, str, int | None]:
    username, at, rest = spec.removeprefix("ssh://").rstrip("/").rpartition("@")
    name, colon, port = rest.rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.endswith("]")):
        return username if at else None, name.strip("[]"), int(port)
    return username if at else None, rest.strip("[]"), None


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []
