"""One board in a browser: a process of ours, and what is carried between it and the page's websocket.

Packets on the pipes are those of textual's WebDriver: a type (``D`` terminal data, ``M`` JSON, ``P`` files), four bytes
of length, the payload. On the websocket data are binary messages, all else JSON lists, as in textual-serve's script.
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

_END_S = 0.5  # for a board to end in order before it is killed
_BEAT_S = 3.0
_LONGEST = 16 << 20  # bytes of one packet: a whole screen is less than 1 MB
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class WebBoard:
    """One board: a process of ours, and the connection of the browser that sees it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self.said: list[str] = []  # its last lines on stderr, cleaned

    async def start(self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int]) -> None:
        """Start the process with a terminal of ``size`` (columns, rows). Where it cannot start, ``run`` shows why."""
        own = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
        if not locale.lower().replace("-", "").endswith("utf8"):
            own["LC_ALL"] = "C.UTF-8"  # of a service without a locale; the browser has Unicode anyway
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, "--browser", *map(str, size), stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**env, **own},
                start_new_session=True,  # ctrl-c in the server's terminal is the server's
            )  # fmt: skip
        except OSError as error:  # no process, memory or file descriptor is left
            self.said = [f"a board cannot be started: {error.strerror}"]

    async def run(self, websocket: web.WebSocketResponse) -> None:
        """Carry input and output until one side ends."""
        if self._process is None:
            await self._show_last_words(websocket)
            return
        reader = asyncio.create_task(self._listen(websocket))
        writer = asyncio.create_task(self._show(websocket))
        pulse = asyncio.create_task(_beat(websocket))
        errors = asyncio.create_task(self._read_errors())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer, pulse):
                task.cancel()
            await self.stop()
            await asyncio.wait({errors}, timeout=_END_S)
            errors.cancel()
        if self._process.returncode and self.said and not websocket.closed:
            await self._show_last_words(websocket)

    async def stop(self) -> None:
        """End the process; takes half a second at most. Its connections, agents and all, end with it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # Process.terminate may take its exit code from the one that waits for it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
                return

    async def _show_last_words(self, websocket: web.WebSocketResponse) -> None:
        """It failed: its words stand where it was, off the other screen."""
        with contextlib.suppress(ConnectionError):
            await websocket.send_bytes("\r\n".join(["\x1b[?1049l\x1b[0m\x1b[2J\x1b[H", *self.said]).encode())

    async def _show(self, websocket: web.WebSocketResponse) -> None:
        """Pass the board's output to the browser until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        stdout = self._process.stdout
        try:
            await stdout.readuntil(b"__GANGLION__\n")  # what stands before it was printed by whatever was imported
            while True:
                kind = await stdout.readexactly(1)
                length = int.from_bytes(await stdout.readexactly(4), "big")
                if length > _LONGEST:
                    return
                payload = await stdout.readexactly(length)
                if kind == b"D":
                    await websocket.send_bytes(payload)
                elif kind == b"M":
                    said = json.loads(payload)
                    if said["type"] == "exit":
                        return
                    if said["type"] == "open_url":
                        await websocket.send_json(["open_url", {"url": said["url"], "new_tab": True}])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return

    async def _listen(self, websocket: web.WebSocketResponse) -> None:
        """Pass what the browser sends to the board until the connection ends."""
        async for message in websocket:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                match json.loads(message.data):
                    case ["stdin", str(text)]:
                        await self._send(b"D", text.encode("utf-8", "replace"))
                    case ["resize", {"width": width, "height": height}]:
                        columns, rows = terminal_size(str(width), str(height))
                        await self._tell({"type": "resize", "width": columns, "height": rows})
                    case ["ping", said]:
                        await websocket.send_json(["pong", said])
                    case ["focus" | "blur" as what, *_]:
                        await self._tell({"type": what})
            except (ValueError, RecursionError, ConnectionError):
                return

    async def _tell(self, message: dict[str, object]) -> None:
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
        while said := await self._process.stderr.read(4096):
            last = (last + said)[-4096:]
            lines = _COLOUR.sub("", last.decode("utf-8", "replace")).splitlines()
            self.said = [clean(line, 200) for line in lines if line.strip()]


async def _beat(websocket: web.WebSocketResponse) -> None:
    """Show the page that we are there: without this, a board that has nothing to draw looks like a dead connection."""
    with contextlib.suppress(ConnectionError):
        while True:
            await websocket.send_json(["log", "here"])
            await asyncio.sleep(_BEAT_S)


def terminal_size(width: str | None, height: str | None) -> tuple[int, int]:
    """Return columns and rows that a browser said, within reason; 80x24 for what is no number."""
    said = [int(text) if text and text.isdecimal() and len(text) < 6 else usual for text, usual in (
        (width, 80), (height, 24),
    )]  # fmt: skip
    return min(max(said[0], 20), 500), min(max(said[1], 5), 300)
