"""What ssh itself makes of a host's name: `ssh -G`, remembered while the configuration files stay as they are.

No other reading of ssh_config is whole: asyncssh takes the files of an Include in the folder's order (ssh: sorted) and,
before 2.24, lost what followed one that ended in a block for another host; paramiko knows no Include at all.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
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
from gpuboard.transport.ssh import errors

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_USER_CONFIG = "~/.ssh/config"
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")  # what ssh -G says where nothing is set
_JUMPS_MAX = 8
_DEPTH_MAX = 16  # of Include, as in OpenSSH's readconf.c
_FILES_MAX = 4096  # in all: files that include one another twice would be read 2^16 times
_LOOK_S = 1.0  # how often the files are looked at for changes
_KEPT_MAX = 10_000  # hosts in the file of answers
# What is remembered of an answer of a hundred keys.
_KEPT = (
    "addressfamily", "bindaddress", "controlmaster", "controlpath", "controlpersist", "forkafterauthentication",
    "globalknownhostsfile", "hostkeyalias", "hostname", "identitiesonly", "identityagent", "identityfile",
    "pkcs11provider", "port", "proxycommand", "proxyjump", "remotecommand", "serveralivecountmax",
    "serveraliveinterval", "sessiontype", "stdinnull", "user", "userknownhostsfile",
)  # fmt: skip
# With one of these the same name can mean something else next time.
_UNSTEADY = re.compile(
    r"^\s*(match\b.*\b(exec|localnetwork)\b|canonicalizehostname\b)|\$\{", re.IGNORECASE | re.MULTILINE
)


class Resolved:
    """One host as ssh sees it. Values are ssh's own, with tokens (%h …) where ssh leaves them."""

    def __init__(self, spec: str, values: dict[str, list[str]]) -> None:
        self.spec = spec
        self.values = values
        self.spec_user, self.name, self.spec_port = split(spec)
        self.hostname = _first(values, "hostname") or self.name
        self.user = _first(values, "user") or _login()
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
        """What known_hosts is asked for."""
        return self.get("hostkeyalias") or self.hostname

    def count(self, key: str) -> int:
        """Return the number that ``key`` is set to, 0 where it is not one."""
        value = _first(self.values, key) or ""
        return int(value) if is_whole(value) else 0

    def known_hosts(self) -> list[str] | None:
        """Return the known_hosts files that ssh_config names; None where it names none for the user."""
        own = self.all("userknownhostsfile")
        if not own or own == [os.path.expanduser(file) for file in _USER_KNOWN_HOSTS]:
            return None
        return own + self.all("globalknownhostsfile")

    @property
    def proxy_command(self) -> str | None:
        """The command in place of a connection, None without one. A jump host goes before it."""
        return None if self.jumps else self.get("proxycommand")

    def expand(self, text: str) -> str:
        """Return ``text`` with ssh's tokens (ssh_config(5), TOKENS) replaced; unknown ones stay."""
        here = os.uname().nodename
        tokens = {
            "%": "%", "d": os.path.expanduser("~"), "h": self.hostname, "i": str(os.getuid()), "l": here,
            "L": here.partition(".")[0], "n": self.name, "p": str(self.port), "r": self.user, "u": _login(),
        }  # fmt: skip
        tokens["k"] = _first(self.values, "hostkeyalias") or self.name
        return re.sub("%(.)", lambda found: tokens.get(found[1], found[0]), text)


class Resolver:
    """Asks ssh about hosts. ``ssh_config``: the user's file; another than ssh's own replaces the system's, too.

    ``kept``: a file in which answers outlive this process. May be used from any thread.
    """

    def __init__(self, ssh_config: str, *, kept: Path | None = None, timeout_s: float = 10.0) -> None:
        self.files, self.flags = config_files(ssh_config)
        self._kept = kept
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._looked = 0.0
        self._state = ""  # what the answers were true for
        self._steady = True
        self._known: dict[str, dict[str, list[str]]] = {}
        self._new = False
        self.plain = True  # no Include in effect and no Match: any reader understands it

    def get(self, spec: str) -> Resolved:
        """Return what ``[user@]host[:port]`` (also ``ssh://…``) means. Raises TransportError (``resolve``)."""
        with self._lock:
            self._look()
            state, steady, known = self._state, self._steady, self._known.get(spec)
        if known is None:
            known = self._ask(spec)
            with self._lock:
                if steady and state == self._state:
                    self._known[spec] = known
                    self._new = True
        return Resolved(spec, known)

    def look(self) -> bool:
        """Return whether the configuration has neither an Include in effect nor a Match."""
        with self._lock:
            self._look()
            return self.plain

    def save(self) -> None:
        """Write down what is new, for the next process. A folder that cannot be written costs just the time."""
        with self._lock:
            if self._kept is None or not self._new or len(self._known) > _KEPT_MAX:
                return
            text = json.dumps({"state": self._state, "hosts": self._known})
            self._new = False
        beside = self._kept.with_name(f"{self._kept.name}.{os.getpid()}")
        try:
            paths.make_private(self._kept.parent)
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
            beside.replace(self._kept)
        except OSError:
            with suppress(OSError):
                beside.unlink()

    def _look(self) -> None:
        """See whether the files have changed; what was known is forgotten then."""
        now = time.monotonic()
        if self._looked and now - self._looked < _LOOK_S:
            return
        self._looked = now
        seen: list[object] = [self.flags, _login(), os.uname().nodename, _stamp(_ssh())]
        self._steady = self.plain = True
        for number, file in enumerate(self.files):
            for path, text in _read(file, include_folder(file)):
                seen += [path, _stamp(path)]
                self._steady = self._steady and not _UNSTEADY.search(text)
                self.plain = self.plain and path == file and not re.search(r"^\s*match\b", text, re.I | re.M)
            seen.append(number)
        state = json.dumps(seen)
        if state != self._state:
            first = not self._state
            self._state, self._known, self._new = state, {}, False
            if first and self._steady:
                self._known = self._recall()

    def _recall(self) -> dict[str, dict[str, list[str]]]:
        """Return the answers that an earlier process has written down, if they are still true."""
        if self._kept is None:
            return {}
        try:
            found: Any = json.loads(self._kept.read_bytes())
            return dict(found["hosts"]) if found["state"] == self._state else {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _ask(self, spec: str) -> dict[str, list[str]]:
        user, name, port = split(spec)
        target = [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ()), "--", name]
        try:
            done = subprocess.run(
                [_ssh(), *self.flags, "-G", *target],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=self._timeout_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            words = f"`ssh -G {clean(spec, 64)}` has not answered for {self._timeout_s:.0f} s"
            raise TransportError("resolve", words, "does a `Match exec` of your ssh_config hang?") from None
        except OSError as error:
            raise errors.by_error(error) from None
        if done.returncode:
            lines = [clean(line) for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
            said = next((line for line in lines if "terminating" not in line and "Pseudo-term" not in line), "")
            words = f"ssh_config: {said or f'`ssh -G` ended with exit code {done.returncode}'}"
            raise TransportError("resolve", words, "correct the file that `ssh_config` names")
        values: dict[str, list[str]] = {}
        for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
            key, _, value = line.partition(" ")
            if key in _KEPT:
                several = key in {"userknownhostsfile", "globalknownhostsfile"}  # ssh prints them in one line, unquoted
                values.setdefault(key, []).extend(value.split() if several else [value])
        return values


def kept_answers() -> Path:
    """Return the file in which answers outlive a process."""
    return paths.state_dir(os.environ) / "ssh-config.json"


def available() -> bool:
    """Return whether there is an ssh to ask."""
    return shutil.which("ssh") is not None


def config_files(ssh_config: str) -> tuple[list[str], list[str]]:
    """Return the files to read, the user's first, and ssh's flags for it: as with ``ssh -F``, one replaces both."""
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


def whole_chain(name: str, jumps: tuple[str, ...], jumps_of: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """Return all hosts to go through, the first one first: that one's own ProxyJump counts, too.

    Raises TransportError for a circle.
    """
    chain = jumps
    for _ in range(_JUMPS_MAX):
        before = jumps_of(chain[0]) if chain else ()
        if not before:
            return chain
        chain = before + chain
    raise TransportError("resolve", f"ssh: ProxyJump of {name} goes in circles", "check your ssh_config")


def _read(file: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield a configuration file and those it includes, each with its text. ``folder``: where relative names lie."""
    waiting = [(file, 0)]
    for _ in range(_FILES_MAX):
        if not waiting:
            return
        path, depth = waiting.pop()
        try:
            text = files.read(path, files.SSH_CONFIG_MAX).decode("utf-8", "replace")
        except OSError:
            continue
        yield path, text
        if depth < _DEPTH_MAX:
            waiting += [(inner, depth + 1) for inner in reversed(list(included(text, folder)))]


def include_folder(file: str) -> str:
    """Return where relative names of an Include in ``file`` lie (ssh_config(5))."""
    return "/etc/ssh" if file == SYSTEM_CONFIG else "~/.ssh"


def included(text: str, folder: str = "~/.ssh") -> Iterator[str]:
    """Yield the files that a configuration includes; relative names lie in ``folder``."""
    for line in re.findall(r"^\s*include(?:\s*=\s*|\s+)(.*)$", text, re.IGNORECASE | re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # ssh will complain of the quote
        for word in words:
            yield from files.included(word, folder)


def _stamp(path: str) -> Sequence[int]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


@functools.cache
def _login() -> str:
    return getpass.getuser()


def _ssh() -> str:
    return shutil.which("ssh") or "ssh"


def _first(values: dict[str, list[str]], key: str) -> str | None:
    found = values.get(key)
    return found[0] if found else None
