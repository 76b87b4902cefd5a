"""Role ``head``: starts the head of a detached run on this node, and relays lines between it and the command.

The head is a process of the node's own gpuboard, in a session of its own. The end of the connection is the end of its
standard input; once it has left the pipes, it outlives this agent.
"""

import json
import os
import shutil
import subprocess

from gpuboard.agent.event_loop import IN, OUT, Loop
from gpuboard.agent.launch.supervisor import hello

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional

    from gpuboard.agent.protocol import AgentChannel

_CHECK_S = 20.0  # for an interpreter on a cold network home to print its version


def run(channel: "AgentChannel", config: "Dict[str, Any]") -> None:
    """Serve one head until the connection ends. ``config``: ``version``, ``python`` and ``path`` of the command."""
    _Relay(channel, config).serve()


class _Relay:
    def __init__(self, channel: "AgentChannel", config: "Dict[str, Any]") -> None:
        self._channel = channel
        self._config = config
        self._loop = Loop()
        self._head: "Optional[subprocess.Popen[bytes]]" = None
        self._to_head = bytearray()
        self._from_head = b""

    def serve(self) -> None:
        channel = self._channel
        self._loop.watch(channel.fd_in, IN, self._read_calls)
        self._loop.watch(channel.fd_noise, IN, channel.pass_noise)  # the head's messages, on stderr
        channel.send(hello())
        self._read_calls()  # calls may have arrived in the same read as the start line
        channel.serve(self._loop)

    def _read_calls(self) -> None:
        for message in self._channel.read_available():
            if message.get("t") == "call":
                self._call(message["id"], message.get("op"), message.get("args") or {})

    def _call(self, call_id: int, op: "Any", args: "Dict[str, Any]") -> None:
        if op == "start":
            failures: "List[str]" = []
            for prefix in _candidates(self._config):
                why = _unusable(prefix, self._config["version"])
                if not why:
                    self._start(prefix)
                    self._channel.reply(call_id, {})
                    return
                failures.append("%s: %s" % (prefix[0], why))
            self._channel.refuse(call_id, "no-gpuboard", "; ".join(failures))
        elif op == "line" and self._head is not None:
            self._to_head += json.dumps(args).encode() + b"\n"
            self._write()
            self._channel.reply(call_id, {})
        else:
            self._channel.refuse(call_id, "usage", "no call %r" % (op,))

    def _start(self, prefix: "List[str]") -> None:
        self._head = subprocess.Popen(
            prefix + ["launch", "--head"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._head.stdin is not None and self._head.stdout is not None
        os.set_blocking(self._head.stdin.fileno(), False)
        self._loop.watch(self._head.stdout.fileno(), IN, self._read_head)

    def _write(self) -> None:
        assert self._head is not None and self._head.stdin is not None
        fd = self._head.stdin.fileno()
        try:
            while self._to_head:
                del self._to_head[: os.write(fd, bytes(self._to_head[:65536]))]
        except BlockingIOError:
            self._loop.watch(fd, OUT, self._write)
            return
        except OSError:
            self._to_head = bytearray()  # it has closed its end, or has ended: reported by the end of its stdout
        self._loop.unwatch(fd)

    def _read_head(self) -> None:
        assert self._head is not None and self._head.stdout is not None
        data = os.read(self._head.stdout.fileno(), 65536)
        *lines, self._from_head = (self._from_head + data).split(b"\n")
        for line in lines:
            self._channel.event("head", json.loads(line.decode("utf-8")))
        if not data:
            self._loop.unwatch(self._head.stdout.fileno())
            for _ in range(16):  # what a pipe holds: messages of a head that has just ended
                self._channel.pass_noise()
            self._channel.event("head", {"kind": "closed"})


def _candidates(config: "Dict[str, Any]") -> "List[List[str]]":
    """Return command lines that may start the command's version of gpuboard: its interpreter, PATH's gpuboard."""
    boot = "import sys; sys.path += %r; from gpuboard.__main__ import main; sys.exit(main())" % (config["path"],)
    installed = shutil.which("gpuboard") or "gpuboard"
    return [[config["python"], "-I", "-S", "-c", boot], [installed]]


def _unusable(prefix: "List[str]", version: str) -> str:
    """Return why this does not start that version; "" if it does."""
    try:
        done = subprocess.run(
            prefix + ["--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_CHECK_S,
            check=False,
        )
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except subprocess.TimeoutExpired:
        return "no answer to --version within %.0f s" % _CHECK_S
    printed = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 0 and printed == "gpuboard %s" % version:
        return ""
    last = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
    return printed or last or "exit code %d" % done.returncode
