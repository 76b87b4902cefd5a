"""Listening sockets of the board in a browser: a loopback port, or a private unix socket."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gpuboard.errors import GpuboardError


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on a loopback port; 0: any free one. Raises GpuboardError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # a flood must not fill the queue before it is read
    except OSError as error:
        listener.close()
        raise GpuboardError(
            f"cannot listen on port {port} of {host}: {(error.strerror or str(error)).lower()}; "
            "choose another with --port N, or any free one with --port 0"
        ) from error
    return listener


def listen_at(path: Path) -> socket.socket:
    """Return a unix socket of mode 0600 at ``path``, in place of an ended server's. Raises GpuboardError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # private from its creation
    try:
        if _is_left_over(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(1024)  # a flood must not fill the queue before it is read
    except OSError as error:
        listener.close()
        taken = "; another server or file is there, choose another path" if error.errno == errno.EADDRINUSE else ""
        raise GpuboardError(f"cannot listen on {path}: {(error.strerror or str(error)).lower()}{taken}") from error
    finally:
        os.umask(mask)
    return listener


def _is_left_over(path: Path) -> bool:
    """Return whether ``path`` is a socket of our own without a listener."""
    if not path.is_socket() or path.lstat().st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
