"""The control socket in a run's folder: requests of other processes to its head.

One JSON line each way: ``{"op": "stop", "grace_s": …, "reason": …}``, ``{"op": "state"}``, ``{"op": "explain"}``
or ``{"op": "signal", "signal": …}`` (USR1, USR2, TERM).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gpuboard.errors import GpuboardError
from gpuboard.model.decoding import from_json

_NAME = "control.sock"
_RETRY_S = 0.2  # after which a client is accepted that could not be before
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)  # to the ranks, when a client asks for it


class ControlRequest(msgspec.Struct, frozen=True):
    """One request. ``grace_s`` None: that of the run. ``reason``: who stops the run and why; the run prints it."""

    op: str
    grace_s: float | None = None
    reason: str = ""
    signal: int = 0  # to be forwarded to the ranks


class ControlServer:
    """Listens until closed; calls ``handle`` in a thread for each client and sends what that returns."""

    def __init__(self, folder: Path, handle: Callable[[ControlRequest], object]) -> None:
        """Raises OSError when there can be no socket in the folder."""
        self._folder = folder
        self.handle = handle
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(folder) as path:
            self._socket.bind(path)
        self._socket.listen(8)
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()
        with contextlib.suppress(OSError):
            (self._folder / _NAME).unlink()

    def _serve(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:  # closed, or too many open files: the client waits until there are fewer
                time.sleep(_RETRY_S)
                continue
            # Each in its own thread: an explanation takes seconds, and a request to stop must not wait for it.
            try:
                threading.Thread(target=self._answer, args=(client,), name="control-client", daemon=True).start()
            except RuntimeError:  # the user's limit of processes is reached
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, msgspec.DecodeError):
            client.settimeout(2.0)  # the folder is private, but a client may hang
            request = from_json(client.makefile("rb").readline(), ControlRequest)
            client.sendall(msgspec.json.encode(self.handle(request)) + b"\n")


def ask(folder: Path, request: ControlRequest, timeout_s: float = 5.0) -> object:
    """Send a request to the head of the run in ``folder`` and return its reply. Raises GpuboardError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, _short(folder) as path:
            client.settimeout(timeout_s)
            client.connect(path)
            client.sendall(msgspec.json.encode(request) + b"\n")
            reply: object = from_json(client.makefile("rb").readline())
            return reply
    except (OSError, msgspec.DecodeError) as error:
        raise GpuboardError(
            f"{folder / _NAME}: `gpuboard launch` did not respond: {error}; `gpuboard runs` shows its state"
        ) from error


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of the socket: an address has at most 108 bytes (unix(7)), a path in a home may have more."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_NAME}"
    finally:
        os.close(fd)
