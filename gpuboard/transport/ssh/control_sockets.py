"""Shared connections of the system's ssh (ControlMaster): where their sockets are, which are alive, how they end.

<folder>/<16 hex digits>      a connection that ends 10 s after its last session, or when gpuboard stops it
<folder>/<16 hex digits>p     one that needed a password or a code: it ends after a minute
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterable, Mapping

from gpuboard import paths
from gpuboard.transport.command import Command

PERSIST_S, TYPED_PERSIST_S = 10, 60
_STOP_S = 30.0
_ANSWER_S = 5.0  # of a process on a busy machine
# sun_path has 108 bytes with its NUL, and ssh first binds the socket under its name with 17 characters appended.
_LONGEST = 107 - 17 - len("/0123456789abcdefp")


def socket_folder(env: Mapping[str, str]) -> str | None:
    """Return a folder private to the user for sockets, created if necessary; None where no path is short enough.

    XDG_RUNTIME_DIR is not used: a keeper started by another login must find the same folder.
    """
    user = os.geteuid()
    for folder in (f"/run/user/{user}/gpuboard", str(paths.state_dir(env) / "ssh"), f"/tmp/gpuboard-ssh-{user}"):
        if len(os.fsencode(folder)) <= _LONGEST and _private(folder):
            return folder
    return None


def alive(path: str | None) -> bool:
    """Return whether a connection is shared at ``path``."""
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a stopped process must not block this one
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue of connections is full
        except OSError:
            return False
    return True


def answers(path: str | None, timeout_s: float = _ANSWER_S) -> bool:
    """Return whether the process that shares a connection at ``path`` works; one that is ending may still listen.

    ssh greets every client (PROTOCOL.mux of OpenSSH, "Connection setup"). Waits at most ``timeout_s``.
    """
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(path)
            return bool(probe.recv(1))
        except OSError:
            return False


def stop(socket_paths: Iterable[str]) -> None:
    """Make connections refuse new sessions and end with their last one. Does not wait."""
    found = [path for path in socket_paths if os.path.exists(path)]
    ssh = shutil.which("ssh")
    if not found or ssh is None:
        return
    script = 'for socket do "$0" -F none -S "$socket" -O stop gpuboard; done </dev/null >/dev/null 2>&1'
    command = Command(["/bin/sh", "-c", script, ssh, *found], os.environ)
    threading.Thread(target=command.wait, args=(_STOP_S,), daemon=True).start()  # else it remains a zombie


def _private(folder: str) -> bool:
    try:
        if folder.startswith("/run/user/") and os.stat(os.path.dirname(folder)).st_uid != os.geteuid():
            return False
        paths.make_private(folder)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_mode & 0o077:
            os.chmod(folder, 0o700)
        _bind_once(f"{folder}/{os.getpid()}-{threading.get_native_id()}")
    except OSError:
        return False
    return True


def _bind_once(path: str) -> None:
    """Create a socket and remove it. Raises OSError on a full disk or a file system without sockets.

    ssh would fail there instead of connecting without sharing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind(path)
        os.unlink(path)
