"""The user's ssh configuration of a host, for asyncssh: jump hosts, keys, known hosts.

asyncssh reads the configuration itself, of each host the blocks that may concern it. Only where there is an Include or
a Match, `ssh -G` decides (reasons: resolve.py): it takes 8 ms a host, and a login through asyncssh 3 to 5 ms.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from asyncssh import SSHClientConnectionOptions
from asyncssh.config import SSHClientConfig, SSHConfig
from asyncssh.known_hosts import SSHKnownHosts

from gpuboard.files import KEY_MAX, KNOWN_HOSTS_MAX, SSH_CONFIG_MAX, read
from gpuboard.transport.ssh import resolve

_CIPHER = "aes128-gcm@openssh.com"  # 0.10 ms of CPU a poll; asyncssh's default takes 0.17
_BLOCK = re.compile(r"\s*(host|match|include)(?:\s*=|\s)(.*)", re.IGNORECASE)
_LINE_END = re.compile(r"\r\n?|\n")  # as in a file opened as text; str.splitlines knows more
_PATTERN = re.compile(r"[^\w.:%@\s-]")  # without it, a Host line has names alone
_CHECK_S = 1.0  # between two readings of the files


class SshHost:
    """How to log in to one host, and what its login showed."""

    def __init__(
        self,
        name: str,
        *,
        options: dict[str, Any],
        jumps: tuple[str, ...],
        config: SSHConfig | ConfigText | None,
        known: AsyncsshKnownHosts,
    ) -> None:
        """``config``: as read, or to be read by asyncssh; None: ``options`` are all that it needs to know."""
        self.name = name
        self.options = options  # for asyncssh.connect
        self.jumps = jumps
        self._config = config
        self.known_hosts = known.hosts
        self.known_files = known.files
        self.offered: str | None = None  # the key of a server that could not be verified
        self.needs_user = False  # whether the server asks for a password or a code
        self.banner = ""  # the server's messages during the login
        self.user: str = options.get("username") or ""
        self.key_name: str = name  # its name in known_hosts
        self.port = 22

    @contextlib.contextmanager
    def configuration(self) -> Iterator[dict[str, Any]]:
        """Provide further arguments for asyncssh.connect: the user's configuration. They are valid in the block."""
        if self._config is None:
            yield {"config": None}
        elif isinstance(self._config, SSHConfig):
            yield {"options": _AsRead(self._config)}
        else:
            with self._config.files() as files:
                yield {"config": files}

    def key_is_known(self) -> bool:
        """Return whether known_hosts has any key for this host: then a key that it lacks is a changed one."""
        found = self.known_hosts.match(self.key_name, "", None if self.port == 22 else self.port)
        return any(found[:2])


class _AsRead(SSHClientConnectionOptions):
    """Options of a connection whose configuration has been read: asyncssh takes 2 ms a host to read it again."""

    def __init__(self, config: SSHConfig) -> None:
        self.kwargs = {}  # with ``config`` all that asyncssh takes from it
        self.config = cast(SSHClientConfig, config)


class ConfigText:
    """The part of the configuration that may concern one host, for asyncssh, which reads files."""

    def __init__(self, text: str, files: Sequence[str]) -> None:
        """``files``: the whole configuration, for systems without files in memory."""
        self._text = text
        self._files = files

    @contextlib.contextmanager
    def files(self) -> Iterator[Sequence[str]]:
        """Provide the text as a file, whose name is valid within the block."""
        try:
            number = os.memfd_create("ssh_config")
        except (AttributeError, OSError):  # macOS; Linux before 3.17
            yield self._files
            return
        with open(number, "w", encoding="utf-8") as file:
            file.write(self._text)
            file.flush()
            name = f"/proc/self/fd/{number}"
            yield [name] if os.path.exists(name) else self._files


class Blocks:
    """The blocks of ssh_config files, by the hosts that they name.

    asyncssh takes 15 µs of CPU a line and reads all of them twice a host: with a block for each of 200 nodes 40 ms a
    node, in place of 2. May be used from any thread.
    """

    def __init__(self, files: Sequence[str]) -> None:
        """``files``: in order of precedence."""
        self._files = files
        self._lock = threading.Lock()
        self._read_at = -_CHECK_S
        self._count = 0  # files read
        self._blocks: list[str] = []
        self._general: list[int] = []  # blocks that may concern any host
        self._named: defaultdict[str, list[int]] = defaultdict(list)  # the others by a host's name in lower case

    def of(self, name: str) -> ConfigText:
        """Return the blocks that may concern the host ``name``, in their order. Raises OSError."""
        with self._lock:
            if time.monotonic() - self._read_at >= _CHECK_S:
                self._refresh()
            chosen = sorted({*self._general, *self._named.get(name.lower(), ())})
            return ConfigText("".join(self._blocks[number] for number in chosen), self._files)

    def _refresh(self) -> None:
        self._count, self._blocks, self._general, self._named = 0, [], [], defaultdict(list)
        for file in self._files:
            self._add_file(file, resolve.include_folder(file))
        self._read_at = time.monotonic()

    def _add_file(self, file: str, folder: str, depth: int = 0) -> None:
        """Add the blocks of a file, with those of the files that it includes for all hosts. Raises OSError."""
        self._count += 1
        text = read(file, SSH_CONFIG_MAX).decode("utf-8", "replace")
        names: Sequence[str] = ()
        lines = ["Host *"]
        for_all = True
        for line in _LINE_END.split(text):
            found = _BLOCK.match(line)
            if found is None:
                lines.append(line)
            elif found[1].lower() != "include":
                self._add(names, lines)
                general = found[1].lower() == "match" or _PATTERN.search(found[2])
                names, lines, for_all = () if general else found[2].lower().split(), [line], False
            elif for_all and depth < resolve.DEPTH_MAX and self._count < resolve.FILES_MAX:
                self._add(names, lines)
                for inner in resolve.included(line, folder):
                    with contextlib.suppress(OSError):
                        self._add_file(inner, folder, depth + 1)
                names, lines = (), ["Host *"]
            else:
                lines.append(line)  # asyncssh reads what it names
        self._add(names, lines)

    def _add(self, names: Sequence[str], lines: Sequence[str]) -> None:
        """Add a block for the hosts ``names``; none: it may concern any."""
        for numbers in [self._named[name] for name in names] or [self._general]:
            numbers.append(len(self._blocks))
        self._blocks.append("\n".join(lines) + "\n")


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
        self._blocks = Blocks(self._files)
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
        part = self._blocks.of(name)
        rest: SSHConfig | ConfigText | None = part
        asked = (local_user, username or (), name, port or ())
        try:
            with part.files() as files:
                config = SSHClientConfig.load(None, files, False, False, False, *asked)
            if not config.has_match_final() and not config.get("CanonicalizeHostname"):
                rest = config  # else asyncssh reads it again when it knows the host's final name
        except ValueError:
            whole = [] if resolved is not None else self._files  # for the line's number in the message
            config = SSHClientConfig.load(None, whole, False, False, False, *asked)
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
                rest, name = None, resolved.hostname  # asyncssh reads another address: it gets all options from here
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
            only = rest is not None and bool(config.get("IdentitiesOnly"))  # then public keys select keys of the agent
            options["client_keys"] = [key for key in keys if _is_key(os.path.expanduser(key), public=only)]
            options["ignore_encrypted"] = True
            if own_keys:
                found = (resolve.public_key(os.path.expanduser(key)) for key in keys)
                options["agent_identities"] = [key for key in found if key] or [b""]  # asyncssh reads [] as all keys
        # Through a shell, as in ssh: asyncssh would split the command at spaces, without regard to quotes.
        options["proxy_command"] = None if proxy is None or jumps else ["/bin/sh", "-c", f"exec {proxy}"]
        host = SshHost(name, options=options, jumps=jumps, config=rest, known=self._known(known))
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
