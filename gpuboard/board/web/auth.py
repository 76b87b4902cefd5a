"""Access control of the board in a browser: token, cookie, Host and Origin. Pure except for the token's file.

Every user of a machine can connect to 127.0.0.1, and every web page open in the browser can make it connect. The token
keeps other users out. Host and Origin keep other pages out: a page whose name was rebound to 127.0.0.1 (DNS rebinding)
sends its own name as Host, any other page sends its own Origin.

A cookie is sent to every port of its host. On a shared machine another port may be another user's, so the cookie is
bound to a secret path. Cookie and path are derived from the token and do not reveal it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from urllib.parse import urlsplit

from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.text import quoted

COOKIE = "gpuboard"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LEAST = 24  # characters of a user-supplied token: 144 bits if random
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")
_PORT = re.compile(r"[0-9]{1,5}")


class RequestGuard:
    """Decides about requests. ``port`` None: a unix socket, which users forward from a port of their choice."""

    def __init__(self, token: str, port: int | None, public_url: str | None = None) -> None:
        self._token = token.encode()
        self._port = port
        self._public = public_url
        self._public_host = None if public_url is None else urlsplit(public_url).netloc
        self.path = f"/{self._derived('path')}"
        self.cookie = self._derived("cookie")

    @property
    def secure(self) -> bool:
        """Whether browsers reach us only through TLS."""
        return self._public is not None and self._public.startswith("https:")

    def _derived(self, purpose: str) -> str:
        digest = hmac.digest(self._token, purpose.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:18]).decode()

    def knows_token(self, token: str) -> bool:
        """Compare a token with ours in constant time."""
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token)

    def knows_cookie(self, value: str | None) -> bool:
        """Compare a cookie's value with ours in constant time."""
        return value is not None and hmac.compare_digest(value.encode("utf-8", "surrogateescape"), self.cookie.encode())

    def is_our_host(self, host: str | None) -> bool:
        """Return whether a Host header names us: a loopback name with our port, or the public URL's host."""
        host = (host or "").lower()
        if self._public_host is not None and host == self._public_host:
            return True
        name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not colon:
            name, port = host, "80"
        return name in LOOPBACK and (
            _PORT.fullmatch(port) is not None if self._port is None else port == str(self._port)
        )

    def is_our_origin(self, origin: str | None, host: str | None) -> bool:
        """Return whether a websocket was opened by our own page, which always sends an Origin."""
        return origin is not None and origin.lower() in (f"http://{host}".lower(), self._public)


def check_public_url(text: str) -> str:
    """Return scheme and host of the URL of a proxy in front of us. Raises UsageError for anything else."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises ValueError, like urlsplit for an unclosed bracket
    except ValueError as error:
        raise UsageError(f"--public-url {quoted(text)}: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc:
        raise UsageError(f"--public-url {quoted(text)}: not a URL like https://gpu.example.org")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise UsageError(f"--public-url {quoted(text)}: only scheme, host and port; the board is served at the root")
    return f"{parts.scheme}://{parts.netloc}".lower()


def new_token() -> str:
    """Return a random token: 256 bits."""
    return secrets.token_urlsafe(32)


def token_of(file: Path) -> str:
    """Return the token in a private file; a missing file is created. Raises GpuboardError when others can read it, when
    it is not ours, or when it contains no valid token."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        pass  # the usual case: it is read below
    except OSError as error:
        raise GpuboardError(f"cannot create {file}: {error.strerror}") from error
    else:
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as new:
                new.write(new_token() + "\n")
        except OSError as error:
            file.unlink(missing_ok=True)  # the next start would refuse an empty one
            raise GpuboardError(f"cannot write {file}: {error.strerror}") from error
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise GpuboardError(f"cannot read {file}: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise GpuboardError(f"{file}: not a regular file; name a file of the token, or a new one")
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise GpuboardError(
                f"{file}: the token file must belong to you and be private (it has mode "
                f"{stat.S_IMODE(facts.st_mode):04o}, owner {facts.st_uid}): chmod 600 {file}"
            )
        token = os.read(descriptor, 4096).decode("utf-8", "replace").strip()
    finally:
        os.close(descriptor)
    if len(token) < _LEAST or not _TOKEN.fullmatch(token):
        raise GpuboardError(
            f"{file}: a token needs at least {_LEAST} letters, digits or -_.~ on one line; "
            "remove the file to create a new token"
        )
    return token
