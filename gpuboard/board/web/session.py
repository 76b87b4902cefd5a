"""One board in a browser: its process, and the relay between its pipes and the page's websocket.

Packets on the pipes are those of textual's WebDriver: a type (``D`` terminal data, ``M`` JSON, ``P`` files), four bytes
of length, the payload. On the websocket, terminal data are binary messages and all else is JSON lists, as in
textual-serve's script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence

from aiohttp import WSMsgType, web

from gpuboard.model.text import clean

_END_S = 0.5  # from SIGTERM to SIGKILL
_BEAT_S = 3.0
_LONGEST = 16 << 20  # bytes of one packet: a whole screen is less than 1 MB
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class WebBoard:
    """One board: its process and the browser's connection."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self.errors: list[str] = []  # its last lines on stderr, cleaned

    async def start(self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int]) -> None:
        """Start the process with a terminal of ``size`` (columns, rows). If that fails, ``run`` shows why."""
        own = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
        if not locale.lower().replace("-", "").endswith("utf8"):
            own["LC_ALL"] = "C.UTF-8"  # for a service without a locale; browsers support Unicode
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, "--browser", *map(str, size), stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**env, **own},
                start_new_session=True,  # ctrl-C in the server's terminal is for the server only
            )  # fmt: skip
        except OSError as error:  # no free process, memory or file descriptor
            self.errors = [f"cannot start a board: {error.strerror}"]

    async def run(self, websocket: web.WebSocketResponse) -> None:
        """Relay input and output until one side ends."""
        if self._process is None:
            await self._show_errors(websocket)
            return
        reader = asyncio.create_task(self._listen(websocket))
        writer = asyncio.create_task(self._show(websocket))
        pulse = asyncio.create_task(_send_heartbeats(websocket))
        errors = asyncio.create_task(self._read_errors())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer, pulse):
                task.cancel()
            await self.stop()
            await asyncio.wait({errors}, timeout=_END_S)
            errors.cancel()
        if self._process.returncode and self.errors and not websocket.closed:
            await self._show_errors(websocket)

    async def stop(self) -> None:
        """End the process within a second; its connections and agents end with it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # Process.terminate may reap the process before the waiter does
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
                return

    async def _show_errors(self, websocket: web.WebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError):
            await websocket.send_bytes("\r\n".join(["\x1b[?1049l\x1b[0m\x1b[2J\x1b[H", *self.errors]).encode())

    async def _show(self, websocket: web.WebSocketResponse) -> None:
        """Relay the board's output to the browser until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        stdout = self._process.stdout
        try:
            await stdout.readuntil(b"__GANGLION__\n")  # output before it is from imported modules
            while True:
                kind = await stdout.readexactly(1)
                length = int.from_bytes(await stdout.readexactly(4), "big")
                if length > _LONGEST:
                    return
                payload = await stdout.readexactly(length)
                if kind == b"D":
                    await websocket.send_bytes(payload)
                elif kind == b"M":
                    message = json.loads(payload)
                    if message["type"] == "exit":
                        return
                    if message["type"] == "open_url":
                        await websocket.send_json(["open_url", {"url": message["url"], "new_tab": True}])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return

    async def _listen(self, websocket: web.WebSocketResponse) -> None:
        """Relay the browser's messages to the board until the connection ends."""
        async for message in websocket:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                match json.loads(message.data):
                    case ["stdin", str(text)]:
                        await self._send(b"D", text.encode("utf-8", "replace"))
                    case ["resize", {"width": width, "height": height}]:
                        columns, rows = terminal_size(str(width), str(height))
                        await self._send_json({"type": "resize", "width": columns, "height": rows})
                    case ["ping", value]:
                        await websocket.send_json(["pong", value])
                    case ["focus" | "blur" as what, *_]:
                        await self._send_json({"type": what})
            except (ValueError, RecursionError, ConnectionError):
                return

    async def _send_json(self, message: dict[str, object]) -> None:
        await self._send(b"M", json.dumps(message).encode())

    async def _send(self, kind: bytes, payload: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(kind + len(payload).to_bytes(4, "big") + payload)
        await self._process.stdin.drain()

    async def _read_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        last = b""
        while chunk := await self._process.stderr.read(4096):
            last = (last + chunk)[-4096:]
            lines = _COLOUR.sub("", last.decode("utf-8", "replace")).splitlines()
            self.errors = [clean(line, 200) for line in lines if line.strip()]


async def _send_heartbeats(websocket: web.WebSocketResponse) -> None:
    """Send heartbeats, so that the page can distinguish an idle board from a dead connection."""
    with contextlib.suppress(ConnectionError):
        while True:
            await websocket.send_json(["log", "here"])
            await asyncio.sleep(_BEAT_S)


def terminal_size(width: str | None, height: str | None) -> tuple[int, int]:
    """Return columns and rows from a browser, clamped; 80 and 24 for text that is not a number."""
    size = [int(text) if text and text.isdecimal() and len(text) < 6 else default for text, default in (
        (width, 80), (height, 24),
    )]  # fmt: skip
    return min(max(size[0], 20), 500), min(max(size[1], 5), 300)
