"""The board in a browser: a server on this machine's loopback that starts a board for each connection (extra ``web``).

textual-serve provides the terminal for the page (xterm.js and its font; nothing is loaded from elsewhere);
web/session.py speaks its script's protocol. Its server is not subclassed: every method that handles a request or a
process would be overridden, because it authenticates no one, runs a shell command, accepts packets and terminals of
any size, serves files that the program chose, and waits without a limit for the program to end.

This module, web/clients.py and web/session.py are the only importers of aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, web

from gpuboard.board.web import page as webpage
from gpuboard.board.web.auth import COOKIE, RequestGuard
from gpuboard.board.web.clients import Clients, Log, LogHandler, WebClient
from gpuboard.board.web.session import WebBoard, terminal_size
from gpuboard.errors import GpuboardError

MOST_BOARDS = 8  # each is a process of 60 to 100 MB with connections to every node
_TITLE = "gpuboard"


class Server:
    """Serves boards until a signal. ``log`` gets a line for every board and for refusals, never the token.

    Raises GpuboardError where textual-serve is missing.
    """

    def __init__(
        self, guard: RequestGuard, command: Sequence[str], env: Mapping[str, str], log: Callable[[str], object]
    ) -> None:
        self._guard = guard
        self._command = list(command)
        self._env = dict(env)
        self._log = Log(log)
        self._assets = _assets()
        self._boards: set[WebBoard] = set()
        self._last = 0
        self._stopping = False

    async def serve(self, listener: socket.socket) -> int:
        """Serve on ``listener`` until SIGINT, SIGTERM or SIGHUP arrives; return which, with every board ended."""
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def stop(number: int) -> None:
            if not stopped.done():
                stopped.set_result(number)

        def failed(accepting: asyncio.Task[None]) -> None:
            error = None if accepting.cancelled() else accepting.exception()
            if error is not None and not stopped.done():
                stopped.set_exception(error)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        handler = LogHandler(self._log)
        libraries = [logging.getLogger(name) for name in ("aiohttp", "asyncio")]
        for library in libraries:
            library.addHandler(handler)
        runner = web.AppRunner(self._application(), shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        accepting = asyncio.create_task(Clients(runner.server, self._log).accept(listener))
        accepting.add_done_callback(failed)
        try:
            return await stopped
        finally:
            self._stopping = True
            accepting.cancel()
            await asyncio.gather(*(board.stop() for board in self._boards))
            await runner.cleanup()
            for library in libraries:
                library.removeHandler(handler)

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
        """Refuse a foreign Host, no token or cookie, a websocket's foreign Origin; exchange a token for the cookie."""
        guard = self._guard
        if not guard.is_our_host(request.headers.get("Host")) or not request.raw_path.startswith("/"):
            return self._refuse(request, "unknown host name or port")
        if request.path == "/" and "token" in request.query:
            if not guard.knows_token(request.query["token"]):
                return self._refuse(request, "wrong token: open the URL that `gpuboard serve` printed")
            _admit_client(request)
            return self._welcome(request)
        if not guard.knows_cookie(request.cookies.get(COOKIE)):
            return self._refuse(request, "no valid token: open the URL that `gpuboard serve` printed")
        is_websocket = request.path.endswith("/ws") or "Upgrade" in request.headers
        if is_websocket and not guard.is_our_origin(request.headers.get("Origin"), request.headers.get("Host")):
            return self._refuse(request, "the websocket's Origin is not the board's own page")
        _admit_client(request)
        response: web.StreamResponse = await handler(request)
        return response

    def _welcome(self, request: web.Request) -> web.Response:
        """Set the cookie and redirect to the page, whose address has no token."""
        page = f"{self._guard.path}/"
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # A link on another site's page: after a redirect the browser still treats the request as cross-site and
            # withholds the Strict cookie; after a page of our own it does not.
            response = _words(200, "Opening the board …", link=page)
        else:
            response = web.Response(status=303, headers={"Location": page})
        response.set_cookie(
            COOKIE, self._guard.cookie, path=page, httponly=True, samesite="Strict", secure=self._guard.secure
        )
        return response

    def _refuse(self, request: web.Request, why: str) -> web.Response:
        self._log.limited(why, f"refused {request.method} from {_origin_words(request)}: {why}")
        response = _words(403, why)
        response.force_close()  # one request per connection without the token
        return response

    async def _page(self, request: web.Request) -> web.Response:
        if len(self._boards) >= MOST_BOARDS:
            return _words(503, f"{MOST_BOARDS} boards are open already: close one, then reload this page.")
        size = request.query.get("fontsize", "")
        font_size = min(max(int(size), 6), 60) if size.isdecimal() and len(size) < 4 else 15
        return web.Response(text=webpage.board(_TITLE, font_size), content_type="text/html")

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        if len(self._boards) >= MOST_BOARDS:
            return _words(503, f"{MOST_BOARDS} boards are open already")
        size = terminal_size(request.query.get("width"), request.query.get("height"))
        websocket = web.WebSocketResponse(heartbeat=15, max_msg_size=1 << 20)
        board = WebBoard()
        self._boards.add(board)
        self._last += 1
        name, began = f"board {self._last}", time.monotonic()
        try:
            await websocket.prepare(request)
            await board.start(self._command, self._env, size)
            self._log.line(
                f"{name} opened from {_origin_words(request)}, {size[0]}x{size[1]}; open: {len(self._boards)}"
            )
            await board.run(websocket)
        finally:
            await board.stop()
            self._boards.discard(board)
            errors = "".join(f"\n    {line}" for line in board.errors)
            self._log.line(f"{name} closed after {time.monotonic() - began:.0f} s; open: {len(self._boards)}{errors}")
            with contextlib.suppress(ConnectionError):
                await websocket.close(code=WSCloseCode.GOING_AWAY if self._stopping else webpage.ENDED)
        return websocket


def _assets() -> Path:
    """Return the folder of textual-serve's script, style and fonts. Raises GpuboardError if it is missing."""
    spec = find_spec("textual_serve")
    folder = Path(spec.origin).parent / "static" if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / "js" / "textual.js").is_file():
        raise GpuboardError("textual-serve is not installed or incomplete: pip install 'gpuboard[web]'")
    return folder


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(webpage.HEADERS)
    if response.status in {200, 206, 304} and "/static/" in request.path:
        response.headers["Cache-Control"] = "private, no-cache"  # cached, and revalidated each time


async def _style(_: web.Request) -> web.Response:
    return web.Response(text=webpage.STYLE, content_type="text/css")


async def _script(_: web.Request) -> web.Response:
    return web.Response(text=webpage.SCRIPT, content_type="text/javascript")


def _words(status: int, text: str, link: str = "") -> web.Response:
    return web.Response(status=status, text=webpage.words(_TITLE, text, link), content_type="text/html")


def _admit_client(request: web.Request) -> None:
    assert isinstance(request.protocol, WebClient)
    request.protocol.admit()


def _origin_words(request: web.Request) -> str:
    return request.remote or "the socket"
