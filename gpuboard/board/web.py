"""The board in a browser: a server on this machine's loopback that starts a board for each connection (extra ``web``).

textual-serve brings the terminal for the page (xterm.js and its font; nothing comes from elsewhere). Its own server is
not used: that one asks nobody who he is and runs a shell command. What goes over the wire is what textual's WebDriver
and textual-serve's script speak: packets ``D`` (terminal data), ``M`` (JSON) and ``P`` of a type, four bytes of length
and the payload on the pipes; binary messages for data and JSON lists for the rest on the websocket.

The only importer of aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from gpuboard.board import webpage
from gpuboard.board.webguard import COOKIE, Guard
from gpuboard.errors import GpuboardError
from gpuboard.model.text import clean

MOST_BOARDS = 8  # each is a process of 60 to 100 MB with connections to every node
_END_S = 0.5  # for a board to end in order before it is killed
_BEAT_S = 3.0
_LONGEST = 16 << 20  # bytes of one packet: a whole screen is less than 1 MB
_TITLE = "gpuboard"
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Server:
    """Serves boards until it is told to stop. ``log`` gets a line for every connection, never the token.

    Raises GpuboardError where textual-serve is missing.
    """

    def __init__(
        self, guard: Guard, command: Sequence[str], env: Mapping[str, str], log: Callable[[str], object]
    ) -> None:
        self._guard = guard
        self._command = list(command)
        self._env = dict(env)
        self._log = log
        self._assets = _assets()
        self._boards: set[_Board] = set()
        self._last = 0

    async def serve(self, listener: socket.socket) -> int:
        """Serve on ``listener`` until SIGINT, SIGTERM or SIGHUP arrives; return which, with every board ended."""
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def stop(number: int) -> None:
            if not stopped.done():
                stopped.set_result(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays ignored
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        try:
            return await stopped
        finally:
            await asyncio.gather(*(board.stop() for board in self._boards))
            await runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._admit])
        app.on_response_prepare.append(_add_headers)
        path = self._guard.path
        app.add_routes(
            [
                web.get(f"{path}/", self._page),
                web.get(f"{path}/board.css", _style),
                web.get(f"{path}/board.js", _script),
                web.get(f"{path}/ws", self._websocket),
                web.static(f"{path}/static", self._assets),
            ]
        )
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Let nobody pass who is not known; a token becomes a cookie."""
        guard = self._guard
        if not guard.is_our_host(request.headers.get("Host")):
            return self._refuse(request, "this is not the name and port that it is served under")
        if request.path == "/" and "token" in request.query:
            if not guard.knows_token(request.query["token"]):
                return self._refuse(request, "that is not the token: open the URL that `gpuboard serve` printed")
            return self._welcome(request)
        if not guard.knows_cookie(request.cookies.get(COOKIE)):
            return self._refuse(request, "no valid token: open the URL that `gpuboard serve` printed")
        response: web.StreamResponse = await handler(request)
        return response

    def _welcome(self, request: web.Request) -> web.Response:
        """Answer with the cookie, and lead to the page without the token in its address."""
        page = f"{self._guard.path}/"
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # from a link in another site's page: a redirect would still count as that site's, and the browser would
            # hold the cookie back; what a page of ours leads to does not
            response = _words(200, "Opening the board …", link=page)
        else:
            response = web.Response(status=303, headers={"Location": page})
        response.set_cookie(
            COOKIE, self._guard.cookie, path=page, httponly=True, samesite="Strict", secure=self._guard.secure
        )
        return response

    def _refuse(self, request: web.Request, why: str) -> web.Response:
        self._log(f"refused {request.method} from {_origin_words(request)}: {why}")
        return _words(403, why)

    async def _page(self, request: web.Request) -> web.Response:
        if len(self._boards) >= MOST_BOARDS:
            return _words(503, f"{MOST_BOARDS} boards are open already: close one of them, then reload this page.")
        size = request.query.get("fontsize", "")
        font_size = min(max(int(size), 6), 60) if size.isdecimal() and len(size) < 4 else 15
        return web.Response(text=webpage.board(_TITLE, font_size), content_type="text/html")

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        if not self._guard.is_our_origin(request.headers.get("Origin"), request.headers.get("Host")):
            return self._refuse(request, "the page that asks is not the board's own")
        if len(self._boards) >= MOST_BOARDS:
            return _words(503, f"{MOST_BOARDS} boards are open already")
        size = _size(request.query.get("width"), request.query.get("height"))
        websocket = web.WebSocketResponse(heartbeat=15, max_msg_size=1 << 20)
        board = _Board()
        self._boards.add(board)
        self._last += 1
        name, began = f"board {self._last}", time.monotonic()
        try:
            await websocket.prepare(request)
            await board.start(self._command, self._env, size)
            self._log(f"{name} opened from {_origin_words(request)}, {size[0]}x{size[1]}; open: {len(self._boards)}")
            await board.run(websocket)
        finally:
            await board.stop()
            self._boards.discard(board)
            said = "".join(f"\n    {line}" for line in board.said)
            self._log(f"{name} closed after {time.monotonic() - began:.0f} s; open: {len(self._boards)}{said}")
            with contextlib.suppress(ConnectionError):
                await websocket.close()
        return websocket


class _Board:
    """One board: a process of ours, and the connection of the browser that sees it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self.said: list[str] = []  # its last lines on stderr, cleaned

    async def start(self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int]) -> None:
        """Start the process with a terminal of ``size`` (columns, rows)."""
        own = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
        if not locale.lower().replace("-", "").endswith("utf8"):
            own["LC_ALL"] = "C.UTF-8"  # of a service without a locale; the browser has Unicode anyway
        self._process = await asyncio.create_subprocess_exec(
            *command, "--browser", *map(str, size), stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**env, **own},
            start_new_session=True,  # ctrl-c in the server's terminal is the server's
        )  # fmt: skip

    async def run(self, websocket: web.WebSocketResponse) -> None:
        """Carry input and output until one side ends."""
        assert self._process is not None
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
            with contextlib.suppress(ConnectionError):  # it failed: its words stand where it was, off the other screen
                await websocket.send_bytes("\r\n".join(["\x1b[?1049l\x1b[0m\x1b[2J\x1b[H", *self.said]).encode())

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
                        columns, rows = _size(str(width), str(height))
                        await self._tell({"type": "resize", "width": columns, "height": rows})
                    case ["ping", said]:
                        await websocket.send_json(["pong", said])
                    case ["focus" | "blur" as what, *_]:
                        await self._tell({"type": what})
            except (ValueError, ConnectionError):
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


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on a port of this machine's loopback; 0: any free one. Raises GpuboardError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(64)
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
        listener.listen(64)
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


def _assets() -> Path:
    """Return the folder of textual-serve's script, style and fonts. Raises GpuboardError when there is none."""
    spec = find_spec("textual_serve")
    folder = Path(spec.origin).parent / "static" if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / "js" / "textual.js").is_file():
        raise GpuboardError("textual-serve is not installed, or not as expected: pip install 'gpuboard[web]'")
    return folder


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(webpage.HEADERS)
    if response.status in {200, 206, 304} and "/static/" in request.path:
        response.headers["Cache-Control"] = "private, no-cache"  # kept, and asked about each time


async def _style(_: web.Request) -> web.Response:
    return web.Response(text=webpage.STYLE, content_type="text/css")


async def _script(_: web.Request) -> web.Response:
    return web.Response(text=webpage.SCRIPT, content_type="text/javascript")


def _words(status: int, text: str, link: str = "") -> web.Response:
    return web.Response(status=status, text=webpage.words(_TITLE, text, link), content_type="text/html")


def _size(width: str | None, height: str | None) -> tuple[int, int]:
    """Return columns and rows that a browser said, within reason; 80x24 for what is no number."""
    said = [int(text) if text and text.isdecimal() and len(text) < 6 else usual for text, usual in (
        (width, 80), (height, 24),
    )]  # fmt: skip
    return min(max(said[0], 20), 500), min(max(said[1], 5), 300)


def _origin_words(request: web.Request) -> str:
    return request.remote or "the socket"
