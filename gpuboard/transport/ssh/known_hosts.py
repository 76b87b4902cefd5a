"""known_hosts as sshd(8) describes it: is this the key of that host? For paramiko.

paramiko's own HostKeys ignores patterns and negation, keeps one key per type and host, and fails on a file with a
@revoked or @cert-authority line (5.1).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuboard import files
from gpuboard.model.text import like


class _Line(NamedTuple):
    marker: str  # "", "@revoked" or "@cert-authority"
    names: str
    kind: str  # ssh-ed25519 …
    key: bytes


class KnownHosts:
    """Several known_hosts files as one list. Malformed lines are skipped, as in ssh."""

    def __init__(self, files: Sequence[str]) -> None:
        self._lines = [line for file in files for line in _read(file)]

    def kinds(self, name: str, port: int) -> list[str]:
        """Return the types of the known keys of ``name``: those to request from the server."""
        return list(dict.fromkeys(line.kind for line in self._matching(name, port) if not line.marker))

    def judge(self, name: str, port: int, key: bytes) -> str:
        """Return ``known``, ``unknown``, ``changed`` or ``revoked`` for the public key that a server presented.

        Keys of certificate authorities are ignored: they sign certificates, which paramiko does not check.
        """
        found = list(self._matching(name, port))
        if any(line.key == key and line.marker == "@revoked" for line in found):
            return "revoked"
        keys = [line.key for line in found if not line.marker]
        if key in keys:
            return "known"
        return "changed" if keys else "unknown"

    def _matching(self, name: str, port: int) -> Iterator[_Line]:
        target = (name if port == 22 else f"[{name}]:{port}").lower()
        return (line for line in self._lines if _fits(line.names, target))


def _read(file: str) -> Iterator[_Line]:
    try:
        text = files.read(os.path.expanduser(file), files.KNOWN_HOSTS_MAX).decode("utf-8", "replace")
    except OSError:
        return  # no such file: it lists no host
    for line in text.splitlines():
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            yield _Line(marker, words[0], words[1], base64.b64decode(words[2], validate=True))
        except binascii.Error:
            continue


def _fits(names: str, target: str) -> bool:
    if names.startswith("|1|"):
        return _hashed(names, target)
    return like(target, names.lower().split(","))


def _hashed(names: str, target: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in names.split("|")[2:4])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.new(salt, target.encode(), hashlib.sha1).digest(), digest)
