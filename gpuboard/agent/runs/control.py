"""One request to the control socket of a run, and its reply, without blocking the loop."""

import os
import socket

from gpuboard.agent.event_loop import IN

MYPY = False
if MYPY:
    from typing import Callable, Optional

    from gpuboard.agent.event_loop import Loop

_NAME = "control.sock"
_REPLY_LIMIT = 64 * 1024 * 1024  # bytes: stacks of all ranks


def ask(
    loop: "Loop", folder: str, line: bytes, timeout_s: float, done: "Callable[[Optional[bytes], str], None]"
) -> None:
    """Send ``line`` to the head of the run in ``folder``; call ``done`` once, with its reply or None and the reason."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.setblocking(False)
    try:
        # A short path: an address has at most 108 bytes (unix(7)).
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            client.connect("/proc/self/fd/%d/%s" % (fd, _NAME))
        finally:
            os.close(fd)
        if client.send(line + b"\n") <= len(line):
            raise OSError("the request is too long")
    except OSError as error:
        client.close()
        done(None, str(error.strerror or error))
        return
    received = bytearray()

    def finish(reply: "Optional[bytes]", why: str = "") -> None:
        loop.unwatch(client.fileno())
        loop.cancel(timer)
        client.close()
        done(reply, why)

    def read() -> None:
        try:
            data = client.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            finish(None, str(error.strerror))
            return
        received.extend(data)
        if data.endswith(b"\n"):
            finish(bytes(received))
        elif not data or len(received) > _REPLY_LIMIT:
            finish(None, "it closed the connection" if not data else "its reply is too long")

    timer = loop.after(timeout_s, lambda: finish(None, "no reply within %.0f s" % timeout_s))
    loop.watch(client.fileno(), IN, read)
