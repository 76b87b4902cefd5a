"""A host's configuration from ssh itself (`ssh -G`), cached until a configuration file changes.

No library reads all of ssh_config: asyncssh takes the files of an Include in the folder's order (ssh: sorted) and,
before 2.24, ignored what followed an Include that ended in a block for another host; paramiko ignores Include.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuboard import files, paths
from gpuboard.model.text import clean
from gpuboard.model.units import is_whole
from gpuboard.transport.base import TransportError
from gpuboard.transport.command import run
from gpuboard.transport.ssh import errors

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_USER_CONFIG = "~/.ssh/config"
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")  # printed by ssh -G where nothing is set
_JUMPS_MAX = 8
_CLOSE_S = 1.0  # a query is killed within 0.05 s
DEPTH_MAX = 16  # of Include, as in OpenSSH's readconf.c
FILES_MAX = 4096  # in all: files that include one another twice would be read 2^16 times
_CACHED_MAX = 10_000  # hosts in the cache file
# The keys that are cached, of about a hundred in an answer.
_KEYS = (
    "addressfamily", "bindaddress", "controlmaster", "controlpath", "controlpersist", "forkafterauthentication",
    "globalknownhostsfile", "hostkeyalias", "hostname", "identitiesonly", "identityagent", "identityfile",
    "pkcs11provider", "port", "proxycommand", "proxyjump", "remotecommand", "serveralivecountmax",
    "serveraliveinterval", "sessiontype", "stdinnull", "user", "userknownhostsfile",
)  # fmt: skip
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_OPENSSH_KEY = b"openssh-key-v1\0"  # PROTOCOL.key: then cipher, KDF, its options, the number of keys, the public key
# With one of these the configuration of a host can change without a file that changes.
_VARIABLE = re.compile(
    r"^\s*(match\b.*\b(exec|localnetwork)\b|canonicalizehostname\b)|\$\{", re.IGNORECASE | re.MULTILINE
)


class Resolved:
    """One host's configuration. Values are those of ssh -G, which leaves tokens (%h …) in some of them."""

    def __init__(self, spec: str, values: dict[str, list[str]]) -> None:
        self.spec = spec
        self.values = values
        self.spec_user, self.name, self.spec_port = split(spec)
        self.hostname = _first(values, "hostname") or self.name
        self.user = _first(values, "user") or local_user()
        self.port = self.count("port") or 22
        self.jumps = parse_jumps(_first(values, "proxyjump"))

    def get(self, key: str) -> str | None:
        """Return the first value of ``key`` (in lower case), tokens expanded; None when it is not set or ``none``."""
        value = _first(self.values, key)
        return None if value is None or value.lower() == "none" else self.expand(value)

    def all(self, key: str) -> list[str]:
        """Return the values of ``key``, tokens and ``~`` expanded."""
        return [os.path.expanduser(self.expand(value)) for value in self.values.get(key, ())]

    @property
    def key_name(self) -> str:
        """The host's name in known_hosts."""
        return self.get("hostkeyalias") or self.hostname

    def count(self, key: str) -> int:
        """Return the number that ``key`` is set to; 0 if it is not a number."""
        value = _first(self.values, key) or ""
        return int(value) if is_whole(value) else 0

    def known_hosts(self) -> list[str] | None:
        """Return the known_hosts files that ssh_config names; None where it sets no UserKnownHostsFile."""
        own = self.all("userknownhostsfile")
        if not own or own == [os.path.expanduser(file) for file in _USER_KNOWN_HOSTS]:
            return None
        return own + self.all("globalknownhostsfile")

    @property
    def proxy_command(self) -> str | None:
        """The ProxyCommand, or None. ProxyJump takes precedence."""
        return None if self.jumps else self.get("proxycommand")

    @property
    def family(self) -> int:
        """The family of the addresses that AddressFamily permits."""
        return _FAMILIES.get(self.get("addressfamily") or "", socket.AF_UNSPEC)

    @property
    def agent(self) -> str | None:
        """The socket of ssh-agent, empty for none; None where IdentityAgent leaves it to SSH_AUTH_SOCK."""
        value = _first(self.values, "identityagent")
        if value is None or value == "SSH_AUTH_SOCK":
            return None
        return "" if value == "none" else os.path.expanduser(os.path.expandvars(self.expand(value)))

    def expand(self, text: str) -> str:
        """Return ``text`` with ssh's tokens (ssh_config(5), TOKENS) replaced; unknown ones stay."""
        here = os.uname().nodename
        tokens = {
            "%": "%", "d": os.path.expanduser("~"), "h": self.hostname, "i": str(os.getuid()), "l": here,
            "L": here.partition(".")[0], "n": self.name, "p": str(self.port), "r": self.user, "u": local_user(),
        }  # fmt: skip
        tokens["k"] = _first(self.values, "hostkeyalias") or self.name
        return re.sub("%(.)", lambda found: tokens.get(found[1], found[0]), text)


class Resolver:
    """Runs ``ssh -G`` for hosts. ``ssh_config``: the user's file; if not ~/.ssh/config, it replaces the system's, too.

    ``cache``: a file that keeps the answers for later processes. ``check_s``: between two checks of the files for
    changes. May be used from any thread.
    """

    def __init__(
        self, ssh_config: str, *, cache: Path | None = None, timeout_s: float = 10.0, check_s: float = 1.0
    ) -> None:
        self.files, self.flags = config_files(ssh_config)
        self._cache = cache
        self._timeout_s = timeout_s
        self._check_s = check_s
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0  # queries
        self._closed = threading.Event()
        self._checked_at = 0.0
        self._state = ""  # identifies the files that the answers were read from
        self._cacheable = True
        self._answers: dict[str, dict[str, list[str]]] = {}
        self._new = False
        self._plain = True  # no Include in effect and no Match: every library reads it like ssh

    def get(self, spec: str) -> Resolved:
        """Return the configuration of ``[user@]host[:port]`` (also ``ssh://…``). Raises TransportError."""
        with self._lock:
            self._refresh()
            state, cacheable, known = self._state, self._cacheable, self._answers.get(spec)
        if known is None:
            known = self._query(spec)
            with self._lock:
                if cacheable and state == self._state:
                    self._answers[spec] = known
                    self._new = True
        return Resolved(spec, known)

    def plain(self) -> bool:
        """Return whether the configuration has neither an Include in effect nor a Match."""
        with self._lock:
            self._refresh()
            return self._plain

    def save(self) -> None:
        """Write new answers to the cache file. Where it cannot be written, later processes run ssh again."""
        with self._lock:
            if self._cache is None or not self._new or len(self._answers) > _CACHED_MAX:
                return
            text = json.dumps({"state": self._state, "hosts": self._answers})
            self._new = False
        with suppress(OSError):
            paths.make_private(self._cache.parent)
            files.write_private(self._cache, text.encode())

    def close(self) -> None:
        """Kill running queries, with all that a `Match exec` has started, and save the answers."""
        self._closed.set()
        with self._idle:
            self._idle.wait_for(lambda: not self._running, _CLOSE_S)
        self.save()

    def _refresh(self) -> None:
        """Check whether the files have changed; if so, forget the answers."""
        now = time.monotonic()
        if self._checked_at and now - self._checked_at < self._check_s:
            return
        self._checked_at = now
        seen: list[object] = [self.flags, local_user(), os.uname().nodename, _stamp(_ssh())]
        self._cacheable = self._plain = True
        for number, file in enumerate(self.files):
            for path, text in _read(file, include_folder(file)):
                seen += [path, _stamp(path)]
                self._cacheable = self._cacheable and not _VARIABLE.search(text)
                self._plain = self._plain and path == file and not re.search(r"^\s*match\b", text, re.I | re.M)
            seen.append(number)
        state = json.dumps(seen)
        if state != self._state:
            first = not self._state
            self._state, self._answers, self._new = state, {}, False
            if first and self._cacheable:
                self._answers = self._load()

    def _load(self) -> dict[str, dict[str, list[str]]]:
        """Return the answers in the cache file, if no configuration file has changed since."""
        if self._cache is None:
            return {}
        try:
            found: Any = json.loads(self._cache.read_bytes())
            return dict(found["hosts"]) if found["state"] == self._state else {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _query(self, spec: str) -> dict[str, list[str]]:
        user, name, port = split(spec)
        target = [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ()), "--", name]
        with self._idle:
            self._running += 1
        try:
            ran = run([_ssh(), *self.flags, "-G", *target], os.environ, self._timeout_s, stopped=self._closed)
        except OSError as error:
            raise errors.by_error(error) from None
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()
        if not ran.ended:
            words = f"`ssh -G {clean(spec, 64)}` did not respond within {self._timeout_s:.0f} s"
            raise TransportError("resolve", words, "does a `Match exec` of your ssh_config hang?")
        if "No user exists for uid" in ran.err:
            raise _no_user()
        if ran.code:
            lines = [clean(line) for line in ran.err.splitlines() if line.strip()]
            reason = next((line for line in lines if "terminating" not in line and "Pseudo-term" not in line), "")
            words = f"ssh_config: {reason or f'`ssh -G` exited with code {ran.code}'}"
            raise TransportError("resolve", words, "correct the file that `ssh_config` names")
        values: dict[str, list[str]] = {}
        for line in ran.out.splitlines():
            key, _, value = line.partition(" ")
            if key in _KEYS:
                several = key in {"userknownhostsfile", "globalknownhostsfile"}  # ssh prints them in one line, unquoted
                values.setdefault(key, []).extend(value.split() if several else [value])
        return values


def cache_file() -> Path:
    """Return the file that keeps ssh's answers for later processes."""
    return paths.state_dir(os.environ) / "ssh-config.json"


def available() -> bool:
    """Return whether there is an ssh program on PATH."""
    return shutil.which("ssh") is not None


def config_files(ssh_config: str) -> tuple[list[str], list[str]]:
    """Return the files to read, the user's first, and ssh's flags; as with ``ssh -F``, another file replaces both."""
    user = os.path.expanduser(ssh_config)
    if user != os.path.expanduser(_USER_CONFIG):
        return [user], ["-F", user]
    return [file for file in (user, SYSTEM_CONFIG) if os.access(file, os.R_OK)], []


def split(spec: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of ``[user@]host[:port]`` or ``ssh://…``; an IPv6 address may stand in brackets."""
    username, at, rest = spec.removeprefix("ssh://").rstrip("/").rpartition("@")
    name, colon, port = rest.rpartition(":")
    if colon and is_whole(port) and (":" not in name or name.endswith("]")):
        return username if at else None, name.strip("[]"), int(port)
    return username if at else None, rest.strip("[]"), None


def parse_jumps(value: str | None) -> tuple[str, ...]:
    """Return the hosts that a ProxyJump names, the first one first."""
    return () if value is None or value.lower() == "none" else tuple(hop.strip() for hop in value.split(","))


def public_key(file: str) -> bytes | None:
    """Return the public key of an IdentityFile as ssh finds it: in the file, in ``file.pub``, beside a private key."""
    for path in (file, f"{file}.pub"):
        with suppress(OSError, ValueError, IndexError):
            text = files.read(path, files.KEY_MAX)
            if b"PRIVATE KEY-----" not in text:
                return base64.b64decode(text.split()[1])
    with suppress(OSError, ValueError, IndexError):
        data = base64.b64decode(files.read(file, files.KEY_MAX).split(b"-----")[2])
        if data.startswith(_OPENSSH_KEY):
            at = len(_OPENSSH_KEY)
            for _ in range(3):
                at += 4 + int.from_bytes(data[at : at + 4], "big")
            size = int.from_bytes(data[at + 4 : at + 8], "big")
            return data[at + 8 : at + 8 + size] or None
    return None


def jump_chain(name: str, jumps: tuple[str, ...], jumps_of: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """Return all jump hosts on the path to ``name``, in order, including those that the first one's ProxyJump adds.

    Raises TransportError for a cycle.
    """
    chain = jumps
    for _ in range(_JUMPS_MAX):
        before = jumps_of(chain[0]) if chain else ()
        if not before:
            return chain
        chain = before + chain
    raise TransportError("resolve", f"ssh: ProxyJump of {name} is a loop", "check your ssh_config")


def _read(file: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield a configuration file and those it includes, each with its text; ``folder``: base of relative names."""
    waiting = [(file, 0)]
    for _ in range(FILES_MAX):
        if not waiting:
            return
        path, depth = waiting.pop()
        try:
            text = files.read(path, files.SSH_CONFIG_MAX).decode("utf-8", "replace")
        except OSError:
            continue
        yield path, text
        if depth < DEPTH_MAX:
            waiting += [(inner, depth + 1) for inner in reversed(list(included(text, folder)))]


def include_folder(file: str) -> str:
    """Return the base folder of relative names in an Include in ``file`` (ssh_config(5))."""
    return "/etc/ssh" if file == SYSTEM_CONFIG else "~/.ssh"


def included(text: str, folder: str = "~/.ssh") -> Iterator[str]:
    """Yield the files that a configuration includes; ``folder``: base of relative names."""
    for line in re.findall(r"^\s*include(?:\s*=\s*|\s+)(.*)$", text, re.IGNORECASE | re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # ssh reports the unbalanced quote
        for word in words:
            yield from files.included(word, folder)


def _stamp(path: str) -> Sequence[int]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


@functools.cache
def local_user() -> str:
    """Return the name of this process's uid, as ssh does; $LOGNAME or $USER for a uid without one (in a container).

    Raises TransportError where those are not set either.
    """
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    if name := os.environ.get("LOGNAME") or os.environ.get("USER"):
        return name
    raise _no_user()


def _no_user() -> TransportError:
    words = f"ssh: uid {os.getuid()} has no user name on this machine"
    return TransportError("resolve", words, "add one to /etc/passwd")


def _ssh() -> str:
    return shutil.which("ssh") or "ssh"


def _first(values: dict[str, list[str]], key: str) -> str | None:
    found = values.get(key)
    return found[0] if found else None
