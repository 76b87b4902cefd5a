"""Role ``runs``: serves a client that looks at runs and other jobs of this user on this node.

The calls are in docs/launch-protocol.md.
"""

import errno
import json
import os
import socket
import time

from gpuboard.agent import proc
from gpuboard.agent.event_loop import IN, Loop
from gpuboard.agent.launch import CallRefused
from gpuboard.agent.launch.watch import inspection, signs
from gpuboard.agent.launch.watch.forked import Looks
from gpuboard.agent.runs import files, jobs

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, Optional

    from gpuboard.agent.protocol import AgentChannel

_LATER = object()  # value of a call whose reply follows
_CONTROL_S = 5.0  # for a head to reply, where the client gives no other time
_CONTROL_NAME = "control.sock"
_REPLY_LIMIT = 64 * 1024 * 1024  # bytes: stacks of all ranks
_REAP_S = 0.2  # after an inspection, until its process has ended


def run(channel: "AgentChannel", config: "Dict[str, Any]") -> None:
    """Serve until the connection ends. ``config``: ``silence_s`` as for role ``node``."""
    _Server(channel, config).serve()


class _Server:
    def __init__(self, channel: "AgentChannel", config: "Dict[str, Any]") -> None:
        self._channel = channel
        self._loop = Loop()
        self._silence_s: "Optional[float]" = config.get("silence_s")
        self._received_at = time.monotonic()
        self._calls: "Dict[str, Callable[[int, Dict[str, Any]], Any]]" = {
            "list": lambda _id, args: files.listed(args.get("after")),
            "state": self._state,
            "sizes": lambda _id, args: {"sizes": files.sizes(args.get("run"), args.get("files"))},
            "read": lambda _id, args: {"pieces": files.pieces(args.get("run"), args.get("offsets"))},
            "control": self._control,
            "jobs": self._jobs,
            "inspect": self._inspect,
            "py-spy": self._take_pyspy,
        }
        self._looks = Looks(self._loop)
        self._pyspy: "Optional[str]" = inspection.pyspy(None, None)

    def serve(self) -> None:
        from gpuboard.agent.node import hello  # late, as in that module

        channel = self._channel
        self._loop.watch(channel.fd_in, IN, self._read_calls)
        self._loop.watch(channel.fd_noise, IN, channel.pass_noise)
        if self._silence_s:
            self._loop.after(self._silence_s, self._check_client)
        channel.send(hello(proc.user_name(os.getuid())))
        self._read_calls()  # calls may have arrived in the same read as the start line
        channel.serve(self._loop)

    def _check_client(self) -> None:
        assert self._silence_s is not None
        left_s = self._received_at + self._silence_s - time.monotonic()
        if left_s <= 0:
            self._channel.closed = True
        else:
            self._loop.after(left_s, self._check_client)

    def _read_calls(self) -> None:
        for message in self._channel.read_available():
            self._received_at = time.monotonic()
            if message.get("t") == "call":
                self._answer(int(message["id"]), str(message.get("op")), message.get("args") or {})

    def _answer(self, call: int, op: str, args: "Dict[str, Any]") -> None:
        handler = self._calls.get(op)
        try:
            if handler is None:
                raise CallRefused("unknown-op", "this agent has no call %r" % op)
            value = handler(call, args)
        except CallRefused as error:
            self._channel.refuse(call, error.kind, str(error), error.detail)
        except OSError as error:
            words = "%s: %s" % (error.filename, error.strerror) if error.filename else str(error)
            kind = "no-run" if error.errno == errno.ENOENT else "system"
            self._channel.refuse(call, kind, words)
        else:
            if value is not _LATER:
                self._channel.reply(call, value)

    def _state(self, _call: int, args: "Dict[str, Any]") -> "Any":
        files.folder(args.get("run"))
        return {"folder": files.base(), "run": files.state(str(args["run"]))}

    def _control(self, call: int, args: "Dict[str, Any]") -> "Any":
        folder = files.folder(args.get("run"))
        line = json.dumps(args.get("request")).encode("ascii")

        def done(reply: "Optional[bytes]", why: str) -> None:
            if reply is None:
                self._channel.refuse(call, "no-head", why)
            else:
                self._channel.reply(call, {"reply": files.pack(reply)})

        _ask_head(self._loop, folder, line, float(args.get("timeout_s") or _CONTROL_S), done)
        return _LATER

    def _jobs(self, _call: int, args: "Dict[str, Any]") -> "Any":
        found = jobs.find(args.get("pid"))
        return {"jobs": found, "pyspy": self._pyspy is not None, "ptrace_scope": proc.ptrace_scope()}

    def _inspect(self, call: int, args: "Dict[str, Any]") -> "Any":
        """Inspect processes given as pairs of a number, which stands for a rank, and a pid."""
        ranks = [(int(rank), int(pid), "") for rank, pid in args.get("ranks") or []]
        seen = signs.Signs(lambda _kind, _data: None)
        for rank, pid, _ in ranks:
            seen.follow(rank, pid)
        seen.sample()

        def done(result: "Dict[str, Any]") -> None:
            for item in result["ranks"]:
                cpu, moved_bytes = seen.recent(item["rank"])
                item.update(cpu=round(cpu, 3), moved_bytes=moved_bytes)
            self._channel.reply(call, result)
            self._loop.after(_REAP_S, _reap)

        def look() -> None:
            seen.sample()
            self._looks.start(lambda: inspection.inspect(ranks, self._pyspy), done)

        self._loop.after(signs.INTERVAL_S, look)  # py-spy pauses the ranks: their use of the CPU is measured before
        return _LATER

    def _take_pyspy(self, _call: int, args: "Dict[str, Any]") -> "Any":
        self._pyspy = inspection.pyspy(args.get("path"), args.get("data"))
        return {}


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _ask_head(
    loop: "Loop", folder: str, line: bytes, timeout_s: float, done: "Callable[[Optional[bytes], str], None]"
) -> None:
    """Send ``line`` to the head of the run in ``folder``; call ``done`` once, with its reply or None and the reason."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.setblocking(False)
    try:
        # A short path: an address has at most 108 bytes (unix(7)).
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            client.connect("/proc/self/fd/%d/%s" % (fd, _CONTROL_NAME))
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
