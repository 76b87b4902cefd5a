"""The user's ssh configuration of a host, for asyncssh: jump hosts, keys, known hosts.

asyncssh reads the files itself. Only where they have an Include or a Match, `ssh -G` decides (reasons: resolve.py): it
takes 8 ms a host, and a login through asyncssh 3 to 5 ms.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncssh.config import SSHClientConfig, SSHConfig
from asyncssh.known_hosts import SSHKnownHosts

from gpuboard.files import KEY_MAX, KNOWN_HOSTS_MAX, read
from gpuboard.transport.ssh import resolve

_CIPHER = "aes128-gcm@openssh.com"  # 0.10 ms of CPU a poll; asyncssh's default takes 0.17


class SshHost:
    """How to log in to one host, and what its login showed."""

    def __init__(
        self, name: str, *, options: dict[str, Any], jumps: tuple[str, ...], files: list[str], known: AsyncsshKnownHosts
    ) -> None:
        self.name = name
        self.options = options  # for asyncssh.connect
        self.jumps = jumps
        self.files = files  # ssh_config files that asyncssh reads, the user's first
        self.known_hosts = known.hosts
        self.known_files = known.files
        self.offered: str | None = None  # the key of a server that could not be verified
        self.needs_user = False  # whether the server asks for a password or a code
        self.banner = ""  # the server's messages during the login
        self.user: str = options.get("username") or ""
        self.key_name: str = name  # its name in known_hosts
        self.port = 22

    def key_is_known(self) -> bool:
        """Return whether known_hosts has any key for this host: then a key that it lacks is a changed one."""
        found = self.known_hosts.match(self.key_name, "", None if self.port == 22 else self.port)
        return any(found[:2])


class AsyncsshKnownHosts:
    """Several known_hosts files as one list."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)
        self.hosts = SSHKnownHosts()
        for file in files:
            try:
                text = read(file, KNOWN_HOSTS_MAX).decode("utf-8", "replace")
            except OSError:
                continue  # no such file: it lists no host
            for line in text.splitlines():
                try:
                    self.hosts.load(line)
                except ValueError:
                    continue  # ssh skips malformed lines, too


class HostConfig:
    """Reads ssh_config and known_hosts; the latter only when it has changed, since all hosts share it.

    ``cache``: the file that keeps ssh's answers for later processes. May be used from any thread.
    """

    def __init__(self, ssh_config: str, known_hosts: Sequence[str], cache: Path | None = None) -> None:
        self._files, _ = resolve.config_files(ssh_config)
        self._resolver = resolve.Resolver(ssh_config, cache=cache) if resolve.available() else None
        self._known_hosts = [os.path.expanduser(file) for file in known_hosts]
        self._cache: dict[tuple[tuple[str, float], ...], AsyncsshKnownHosts] = {}

    def host(self, spec: str) -> SshHost:
        """Return how to log in to ``[user@]host[:port]`` (also ``ssh://…``).

        Raises ValueError for an ssh_config that asyncssh cannot read, TransportError for one that ssh cannot.
        """
        if self._resolver is None or self._resolver.plain():
            return self._read(spec, None)
        return self._read(spec, self._resolver.get(spec))

    def jumps(self, host: SshHost) -> tuple[str, ...]:
        """Return all jump hosts on the path to ``host``, in order."""
        return resolve.jump_chain(host.name, host.jumps, lambda name: self.host(name).jumps)

    def close(self) -> None:
        """End calls of ssh; write its answers to the cache file."""
        if self._resolver is not None:
            self._resolver.close()

    def _read(self, spec: str, resolved: resolve.Resolved | None) -> SshHost:
        username, name, port = resolve.split(spec)
        local_user = resolve.local_user()
        files = self._files
        try:
            config = SSHClientConfig.load(
                None, files, False, False, False, local_user, username or (), name, port or ()
            )
        except ValueError:
            if resolved is None:
                raise
            config = SSHClientConfig.load(None, [], False, False, False, local_user, (), name, ())
        options: dict[str, Any] = {}
        if config.get("Ciphers") is None:
            options["encryption_algs"] = f"^{_CIPHER}"
        options["username"] = user = str(config.get("User") or local_user)
        if port:
            options["port"] = port
        alive = (config.get("ServerAliveInterval"), config.get("ServerAliveCountMax"))
        keys = _texts(config.get("IdentityFile"))
        jumps = resolve.parse_jumps(_text(config.get("ProxyJump")))
        proxy = _text(config.get("ProxyCommand"))
        key_name = str(config.get("HostKeyAlias") or config.get("Hostname") or name)
        where = int(str(config.get("Port") or 22))
        known = self._known_files(config)
        own_keys = bool(config.get("IdentitiesOnly"))
        if resolved is not None:
            if not config.loaded or str(config.get("Hostname") or name) != resolved.hostname:
                files, name = [], resolved.hostname  # asyncssh reads another address: it gets all options from here
                if resolved.get("hostkeyalias"):
                    options["host_key_alias"] = resolved.get("hostkeyalias")
            user, where, key_name = resolved.user, resolved.port, resolved.key_name
            options |= {"username": user, "port": where, "family": resolved.family}
            if bind := resolved.get("bindaddress"):
                options["local_addr"] = (bind, 0)
            if (agent := resolved.agent) is not None:
                options["agent_path"] = agent
            own_keys = resolved.get("identitiesonly") == "yes"
            alive = (resolved.count("serveraliveinterval"), resolved.count("serveralivecountmax"))
            keys = resolved.all("identityfile")
            jumps, proxy = resolved.jumps, resolved.proxy_command
            known = resolved.known_hosts() or self._known_hosts
        for option, value in zip(("keepalive_interval", "keepalive_count_max"), alive, strict=True):
            if value:
                options[option] = value
        if keys:
            # ssh skips an IdentityFile that is missing, encrypted or not a key; asyncssh would fail
            only = bool(files) and bool(config.get("IdentitiesOnly"))  # then public keys select keys of the agent
            options["client_keys"] = [key for key in keys if _is_key(os.path.expanduser(key), public=only)]
            options["ignore_encrypted"] = True
            if own_keys:
                found = (resolve.public_key(os.path.expanduser(key)) for key in keys)
                options["agent_identities"] = [key for key in found if key] or [b""]  # asyncssh reads [] as all keys
        # Through a shell, as in ssh: asyncssh would split the command at spaces, without regard to quotes.
        options["proxy_command"] = None if proxy is None or jumps else ["/bin/sh", "-c", f"exec {proxy}"]
        host = SshHost(name, options=options, jumps=jumps, files=files, known=self._known(known))
        host.user, host.port, host.key_name = user, where, key_name
        return host

    def _known_files(self, config: SSHConfig) -> list[str]:
        own = _texts(config.get("UserKnownHostsFile"))
        files = own + _texts(config.get("GlobalKnownHostsFile")) if own else self._known_hosts
        return [os.path.expanduser(file) for file in files]

    def _known(self, files: list[str]) -> AsyncsshKnownHosts:
        key = tuple((file, os.stat(file).st_mtime if os.path.exists(file) else 0.0) for file in files)
        if key not in self._cache:
            self._cache[key] = AsyncsshKnownHosts(files)
        return self._cache[key]


def _is_key(path: str, *, public: bool) -> bool:
    """Return whether asyncssh can use an IdentityFile, judged by its text; ``public``: a public key counts, too.

    Decoding the key would take too long here, once a host: 0.2 s for RSA of 4096 bits.
    """
    try:
        return b"PRIVATE KEY-----" in read(path, KEY_MAX) or public
    except OSError:
        return False


def _text(value: object) -> str | None:
    return None if value is None or str(value).lower() == "none" else str(value)


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []
