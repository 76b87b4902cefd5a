"""Where the board in a browser is served: a port of this machine's loopback, or a unix socket closed to others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gpuboard.errors import GpuboardError


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on a port of this machine's loopback; 0: any free one. Raises GpuboardError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # a flood must not fill the queue before it is read
    except OSError as error:
        listener.close()
        raise GpuboardError(
            f"port {port} of {host} cannot be served on: {(error.strerror or str(error)).lower()}; "
            "--port N takes another one, --port 0 any that is free"
        ) from error
    return listener


def listen_at(path: Path) -> socket.socket:
    """Return a unix socket of mode 0600 that listens at ``path``; one that nobody serves any more is replaced.

    Raises GpuboardError.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # closed to others from its first moment on
    try:
        if _is_left_over(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(1024)  # a flood must not fill the queue before it is read
    except OSError as error:
        listener.close()
        raise GpuboardError(f"{path} cannot be served on: {(error.strerror or str(error)).lower()}") from error
    finally:
        os.umask(mask)
    return listener


def _is_left_over(path: Path) -> bool:
    """Return whether ``path`` is a socket of ours that nobody listens on."""
    if not path.is_socket() or path.lstat().st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
