"""`gpuboard serve --web`: who is let in, what is started and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from gpuboard.board.web.auth import COOKIE, RequestGuard, new_token
from gpuboard.board.web.listen import listen
from gpuboard.board.web.server import MOST_BOARDS, Server
from tests.integration.here import Here
from tests.integration.serving import Serving
from tests.waiting import Stopwatch, alive, until

Visit = Callable[[aiohttp.ClientSession, str, str], Awaitable[None]]  # of base and page


@pytest.fixture
def serving(here: Here) -> Iterator[Serving]:
    """One that serves on a port of its own."""
    server = Serving(here, "--port", "0")
    yield server
    if server.process.poll() is None:
        server.stop()


UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip


def test_access_needs_token_correct_host_and_own_page(serving: Serving) -> None:
    page, cookie = serving.enter()
    paths = [page, f"{page}board.js", f"{page}static/js/textual.js", f"{page}ws", "/", "/favicon.ico", "/nothing"]
    for path in paths:
        assert serving.get(path)[0] == 403
        assert serving.get(path, Cookie=f"{COOKIE}=wrong")[0] == 403
        assert serving.get(path, Cookie=f"{COOKIE}={serving.token}")[0] == 403
    assert serving.get(f"{page}ws", Origin=serving.base, **UPGRADE)[0] == 403
    for token in ("", "wrong", serving.token[:-1], serving.token + "x"):
        assert serving.get(f"/?token={token}")[0] == 403
    for host in ("evil.example.org", "evil.example.org:80", "127.0.0.1", "127.0.0.1:1", ""):
        assert serving.get(page, Cookie=cookie, Host=host)[0] == 403
        assert serving.get(f"/?token={serving.token}", Host=host)[0] == 403
    for origin in ("http://evil.example.org", "http://127.0.0.1:1", "null", f"https://{serving.host}"):
        assert serving.get(f"{page}ws", Cookie=cookie, Origin=origin, **UPGRADE)[0] == 403
    assert serving.get(f"{page}ws", Cookie=cookie, **UPGRADE)[0] == 403
    assert serving.boards() == []
    assert serving.get(page, Cookie=cookie)[0] == 200
    assert serving.get(f"{page}static/js/textual.js", Cookie=cookie)[0] == 200
    assert serving.get(f"{page}static/../../server.py", Cookie=cookie)[0] == 404
    assert serving.get(f"{page}static/", Cookie=cookie)[0] in {403, 404}
    assert serving.get("/", Cookie=cookie)[0] == 404


def test_the_token_becomes_a_cookie_and_shows_up_nowhere(serving: Serving) -> None:
    status, headers, text = serving.get(f"/?token={serving.token}")
    page = headers["location"]
    assert (status, text) == (303, "")
    assert "token" not in page
    value, *attributes = headers["set-cookie"].split("; ")
    assert sorted(attributes) == ["HttpOnly", f"Path={page}", "SameSite=Strict"]
    assert serving.token not in headers["set-cookie"]
    status, headers, text = serving.get(page, Cookie=value)
    assert serving.token not in text + str(headers)
    assert "http" not in text.lower().replace("http-equiv", "")  # nothing is loaded from elsewhere
    policy = headers.pop("content-security-policy")
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    wanted = {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff", "x-frame-options": "DENY"}
    assert wanted.items() <= headers.items()
    assert wanted.items() <= serving.get("/nothing")[1].items()  # on every answer
    # from a link in a page of another site, the way on is a page of our own: a redirect would lose the cookie
    status, headers, text = serving.get(f"/?token={serving.token}", Sec_Fetch_Site="cross-site")
    assert (status, f"url={page}" in text, "set-cookie" in headers) == (200, True, True)
    environ = Path(f"/proc/{serving.process.pid}/environ").read_text()
    command = Path(f"/proc/{serving.process.pid}/cmdline").read_text()
    serving.stop()
    assert serving.token not in environ + command + "".join(serving.said)
    until(lambda: any("refused GET from 127.0.0.1" in line for line in serving.said), "that is said")


@contextlib.asynccontextmanager
async def opened(serving: Serving) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Open a board as its page does."""
    page, cookie = serving.enter()
    async with aiohttp.ClientSession(headers={"Cookie": cookie}) as session:
        address = f"{serving.base.replace('http', 'ws')}{page}ws?width=100&height=30"
        async with session.ws_connect(address, origin=serving.base) as websocket:
            yield websocket


async def seen(websocket: aiohttp.ClientWebSocketResponse, words: bytes) -> None:
    """Read what the board draws until ``words`` are in it; gives up after 60 s."""
    text = b""
    async with asyncio.timeout(60):
        while words not in text:
            message = await websocket.receive()
            assert message.type in {aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT}, (message, text)
            if message.type is aiohttp.WSMsgType.BINARY:
                text += message.data


def test_a_board_ends_with_its_page(serving: Serving) -> None:
    async def visit() -> int:
        async with opened(serving) as websocket:
            await websocket.send_json(["resize", {"width": 10**9, "height": "x"}])  # a page that lies changes nothing
            await websocket.send_str("no json")
            return 0

    async def look() -> int:
        async with opened(serving) as websocket:
            await seen(websocket, b"H100")
            (board,) = serving.boards()
            environ = Path(f"/proc/{board}/environ").read_text()
            assert serving.token not in environ + Path(f"/proc/{board}/cmdline").read_text()
            return board

    asyncio.run(visit())
    until(lambda: serving.boards() == [], "the board of a page that lies ends")
    board = asyncio.run(look())
    until(lambda: not alive(board), "the board ends with its page")
    until(lambda: any("board 2 closed" in line for line in serving.said), "its end is told")
    until(lambda: any("board 2 opened from 127.0.0.1, 100x30" in line for line in serving.said), "so was its beginning")


@pytest.mark.parametrize(
    ("number", "code", "begun"),
    [
        (signal.SIGINT, 130, True),
        (signal.SIGTERM, 0, False),
        (signal.SIGHUP, 0, False),
        (signal.SIGKILL, -9, True),
        (signal.SIGKILL, -9, False),
    ],
)
def test_boards_end_with_the_server(serving: Serving, number: int, code: int, begun: bool) -> None:
    async def visit() -> int:
        async with opened(serving) as websocket:
            if begun:
                await seen(websocket, b"H100")
            (board,) = await asyncio.to_thread(until, serving.boards, "a board starts")
            serving.process.send_signal(number)
            await asyncio.to_thread(until, lambda: serving.process.poll() is not None, "the server ends", 2.0)
            return board

    board = asyncio.run(visit())
    until(lambda: not alive(board), "the board ends")
    assert serving.process.returncode == code


def test_nohup_outlives_the_terminal(here: Here) -> None:
    serving = Serving(here, "--port", "0", before=["env", "--ignore-signal=HUP"])
    serving.process.send_signal(signal.SIGHUP)
    assert serving.get("/")[0] == 403
    assert serving.stop() == 130


def test_a_log_that_cannot_be_written_stops_no_board(here: Here) -> None:
    """As on a full disk, and on a terminal that has been closed."""
    serving = Serving(here, "--port", "0", before=["sh", "-c", 'exec "$@" 2>/dev/full', "sh"])

    async def look() -> None:
        async with opened(serving) as websocket:
            await seen(websocket, b"H100")

    try:
        assert serving.get("/")[0] == 403
        asyncio.run(look())
    finally:
        assert serving.stop() == 130


async def serve_here(command: list[str], said: list[str], visit: Visit) -> None:
    """Serve boards made by ``command`` in this process, ``visit`` them with a cookie, and stop."""
    guard = RequestGuard(new_token(), None)
    with listen(0) as listener:
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(Server(guard, command, {}, said.append).serve(listener))
        async with aiohttp.ClientSession(headers={"Cookie": f"{COOKIE}={guard.cookie}"}) as session:
            await visit(session, base, f"{base}{guard.path}/")
            ending = Stopwatch()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == signal.SIGTERM
            assert ending.stop() < 3.0


def test_boards_that_do_not_end_are_killed_and_the_ninth_is_refused() -> None:
    stubborn = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    said: list[str] = []
    pages: list[aiohttp.ClientWebSocketResponse] = []

    async def visit(session: aiohttp.ClientSession, base: str, page: str) -> None:
        pages.extend([await session.ws_connect(f"{page}ws", origin=base) for _ in range(MOST_BOARDS)])
        while len(said) < MOST_BOARDS:
            await asyncio.sleep(0.01)
        async with session.get(page) as answer:
            assert answer.status == 503
            assert f"{MOST_BOARDS} boards are open already" in await answer.text()
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(f"{page}ws", origin=base)
        assert caught.value.status == 503

    asyncio.run(serve_here(stubborn, said, visit))
    assert sum("closed" in line for line in said) == MOST_BOARDS


def test_a_board_that_fails_reports_the_reason_in_page_and_log() -> None:
    fails = [sys.executable, "-S", "-c", r"import sys; sys.exit('\x1b[31mno such \x1b]0;thing\nat all')"]
    said: list[str] = []

    async def visit(session: aiohttp.ClientSession, base: str, page: str) -> None:
        async with session.ws_connect(f"{page}ws", origin=base) as websocket:
            assert (await websocket.receive(60)).json() == ["log", "here"]
            shown = (await websocket.receive(60)).data.decode()
            assert shown.splitlines()[1:] == ["no such ]0;thing", "at all"]
            assert (await websocket.receive(60)).type is aiohttp.WSMsgType.CLOSE
        while len(said) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(serve_here(fails, said, visit))
    assert said[1].splitlines()[1:] == ["    no such ]0;thing", "    at all"]


_REACHES_OUT = """
import sys
from pathlib import Path
from textual.app import App
from gpuboard.board.web.driver import BrowserDriver

class Reaches(App):
    def on_mount(self):
        for url in ("javascript:alert(1)", "file:///etc/passwd", "https://example.org/"):
            self.open_url(url)
        self.copy_to_clipboard("copied")
        self.deliver_text(__import__("io").StringIO("kept"), save_directory=sys.argv[1], save_filename="saved.txt")

Reaches(driver_class=BrowserDriver).run(size=(80, 24))
"""


def test_a_board_opens_web_pages_alone_and_saves_its_files_here(tmp_path: Path) -> None:
    said: list[str] = []

    async def visit(session: aiohttp.ClientSession, base: str, page: str) -> None:
        text = b""
        messages: list[object] = []
        async with session.ws_connect(f"{page}ws", origin=base) as websocket, asyncio.timeout(60):
            await websocket.send_json(["ping", "7"])
            while b"\x1b]52;c;Y29waWVk\x07" not in text or len(messages) < 2:
                message = await websocket.receive()
                if message.type is aiohttp.WSMsgType.TEXT:
                    messages += [said for said in [message.json()] if said != ["log", "here"]]
                else:
                    text += message.data
            assert sorted(messages, key=str) == [
                ["open_url", {"url": "https://example.org/", "new_tab": True}],
                ["pong", "7"],
            ]
            await asyncio.to_thread(until, (tmp_path / "saved.txt").exists, "the file is saved")
            async with session.get(f"{base}/download/anything") as answer:
                assert answer.status == 404

    asyncio.run(serve_here([sys.executable, "-c", _REACHES_OUT, str(tmp_path)], said, visit))
    assert (tmp_path / "saved.txt").read_text() == "kept"


def test_it_serves_on_loopback_only_and_shows_how_to_forward(here: Here) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "gpu01"):
        done = here.run("serve", "--web", "--host", host)
        assert done.returncode == 2
        assert f"ssh -L 8000:127.0.0.1:8000 {socket.gethostname()}" in done.stderr
        assert done.stdout == ""


def test_a_port_in_use_is_named(here: Here) -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        done = here.run("serve", "--web", "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on port {port} of 127.0.0.1: address already in use" in done.stderr
    assert done.stdout == ""


def test_without_the_extra_it_shows_what_to_install(here: Here, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError('gone', name='aiohttp')")
    done = here.run("serve", "--web", "--port", "0", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "aiohttp is not installed: pip install 'gpuboard[web]'" in done.stderr


def test_errors_in_the_configuration_are_reported_at_once(here: Here) -> None:
    here.config("nodes = 7\n")
    done = here.run("serve", "--web", "--port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nodes" in done.stderr


def test_a_token_file_is_not_printed(here: Here) -> None:
    file = here.folder / "token"
    server = Serving(here, "--port", "0", "--token-file", str(file))
    try:
        assert server.token == f"$(cat {file})"
        assert server.get(f"/?token={file.read_text().strip()}")[0] == 303
    finally:
        server.stop()
    file.chmod(0o644)
    done = here.run("serve", "--web", "--port", "0", "--token-file", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"chmod 600 {file}" in done.stderr


def _ask_socket(path: Path, request: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Say ``request`` to a unix socket in a process of ``user``; returns what was answered."""
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.sendall(sys.argv[2].encode()); print(s.recv(200).decode())"
    )
    become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    python = "/usr/bin/python3" if user is not None else sys.executable  # ours may lie where others cannot go
    return subprocess.run([*become, python, "-c", program, str(path), request], capture_output=True, text=True)


async def _visit_socket(path: Path, token: str) -> None:
    """Open a board through a socket, as a browser does behind `ssh -L 9000:PATH`."""
    base = "http://localhost:9000"
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), cookie_jar=jar) as session:
        async with session.get(f"{base}/?token={token}") as answer:
            assert (answer.status, answer.url.query_string) == (200, "")
            page = str(answer.url)
        async with session.ws_connect(f"{page}ws", origin=base) as websocket:
            await seen(websocket, b"H100")


def test_a_unix_socket_is_closed_to_others_and_goes_with_the_server(here: Here) -> None:
    for folder in (here.folder, *here.folder.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)  # so that it is the socket itself that keeps others out
    path = here.folder / "board.socket"
    left = socket.socket(socket.AF_UNIX)  # what a killed server leaves behind
    left.bind(str(path))
    left.close()
    server = Serving(here, "--socket", str(path))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"ssh -L 8000:{path} " in server.hint
        ask = "GET /{} HTTP/1.1\r\nHost: {}\r\n\r\n"
        assert " 403 " in _ask_socket(path, ask.format("", "localhost:9000")).stdout
        assert " 303 " in _ask_socket(path, ask.format(f"?token={server.token}", "localhost:9000")).stdout
        assert " 403 " in _ask_socket(path, ask.format(f"?token={server.token}", "evil.example.org")).stdout
        if os.geteuid() == 0:
            other = _ask_socket(path, ask.format("", "localhost:9000"), user=65534)
            assert "PermissionError" in other.stderr, other
        asyncio.run(_visit_socket(path, server.token))
        second = here.run("serve", "--web", "--socket", str(path))
        assert (second.returncode, second.stdout) == (1, "")
        assert f"cannot listen on {path}: address already in use" in second.stderr
    finally:
        server.stop()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_other_users_cannot_read_the_token_from_the_process(serving: Serving) -> None:
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for name in ("environ", "fd/1", "mem"):
        file = f"/proc/{serving.process.pid}/{name}"
        done = subprocess.run([*become, "cat", file], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Permission denied" in done.stderr
