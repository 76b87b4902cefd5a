"""`gpuboard serve --web` beside clients without the token: slow, silent, garbled, many. Real server, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from gpuboard.board.web.auth import COOKIE
from gpuboard.board.web.clients import Log
from tests.integration.here import Here
from tests.integration.serving import Serving
from tests.waiting import until

FILES = 256  # open files that the server may have
FLOOD = 400  # connections of a kind, well above that
LOG_LIMIT = 8192  # bytes on stderr, whatever clients do

Connect = Callable[[], socket.socket]
# What the server does with a request or a page once it is read: it is the same on both.
on_the_port = pytest.mark.parametrize("serving", ["port"], indirect=True)
on_the_socket = pytest.mark.parametrize("serving", ["socket"], indirect=True)


def test_a_kind_of_line_is_written_once_a_minute_and_the_rest_is_counted() -> None:
    now, lines = 0.0, list[str]()
    log = Log(lines.append, lambda: now)
    for second in range(150):
        now = float(second)
        log.limited("refused", f"refused at {second}")
    log.limited("full", "full")
    log.line("opened")
    more = " (59 more like this in the last 60 s)"
    assert lines == ["refused at 0", f"refused at 60{more}", f"refused at 120{more}", "full", "opened"]


@pytest.fixture(params=["port", "socket"])
def serving(request: pytest.FixtureRequest, here: Here) -> Iterator[Serving]:
    """A server with few file descriptors, on a port and on a unix socket."""
    where = ["--port", "0"] if request.param == "port" else ["--socket", str(here.folder / "board.socket")]
    server = Serving(here, *where, before=["prlimit", f"--nofile={FILES}:{FILES}"])
    yield server
    if server.process.poll() is None:
        server.stop()
    log = "".join(server.said)
    assert "Traceback" not in log
    assert len(log) < LOG_LIMIT


@pytest.fixture
def connect(serving: Serving, here: Here) -> Connect:
    """Connect to the server; gives up after 5 s."""
    path = here.folder / "board.socket"
    name, _, port = serving.host.partition(":")

    def open_one() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX if path.exists() else socket.AF_INET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        try:
            connection.connect(str(path) if path.exists() else (name, int(port)))
        except BlockingIOError:
            raise TimeoutError("the server accepts no connections") from None
        connection.settimeout(5)
        return connection

    return open_one


def ask(connect: Connect, request: str | bytes) -> bytes:
    """Send ``request`` and read until the server closes; each part comes within 5 s."""
    with connect() as connection:
        connection.sendall(request if isinstance(request, bytes) else request.encode("utf-8", "surrogateescape"))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := received(connection):
                answer += data
        return answer


def received(connection: socket.socket) -> bytes:
    """Return what comes next; b"" at the end. A busy machine has more time than 5 s."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    until(lambda: waiting.poll(500), "the server answers", timeout_s=5)
    return connection.recv(65536)


def get(serving: Serving, path: str, *headers: str) -> str:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {serving.host}", "Connection: close", *headers, "", ""])


def log_in(serving: Serving, connect: Connect) -> tuple[str, str]:
    """Come in with the token, as a browser does; return the page's path and the cookie."""
    answer = ask(connect, get(serving, f"/?token={serving.token}")).decode()
    assert " 303 " in answer, answer
    page = re.search(r"Location: (\S+)", answer)
    cookie = re.search(r"Set-Cookie: ([^;]+)", answer)
    assert page
    assert cookie
    assert b" 200 OK" in ask(connect, get(serving, page[1], f"Cookie: {cookie[1]}"))
    return page[1], cookie[1]


def flood(connect: Connect, data: bytes, number: int = FLOOD) -> list[socket.socket]:
    """Open connections that send ``data`` and stay; fewer where the server takes no more."""
    standing: list[socket.socket] = []
    for _ in range(number):
        try:
            standing.append(connect())
            standing[-1].sendall(data)
        except TimeoutError:
            break
        except (BrokenPipeError, ConnectionResetError):
            continue
    return standing


def closed(connection: socket.socket) -> bool:
    """Tell whether the server has closed a connection, reading what it sent."""
    connection.setblocking(False)
    try:
        return connection.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def rss(pid: int) -> int:
    """Return a process's resident memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


def test_slow_clients_without_the_token_block_no_user(serving: Serving, connect: Connect) -> None:
    standing = []
    half_a_head = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    half_a_body = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
    for data in (half_a_head, b"", half_a_body):
        standing += flood(connect, data)
        log_in(serving, connect)
    until(lambda: sum(map(closed, standing)) == len(standing), "each is closed at its deadline")
    close_all(standing)


def test_responses_that_are_not_read_are_dropped(serving: Serving, connect: Connect) -> None:
    pipelined = f"GET /nothing HTTP/1.1\r\nHost: {serving.host}\r\n\r\n".encode() * 100
    standing = flood(connect, pipelined, 50)
    descriptors = Path(f"/proc/{serving.process.pid}/fd")
    until(lambda: len(list(descriptors.iterdir())) < 20, "no connection is left")
    log_in(serving, connect)
    close_all(standing)


@on_the_socket
def test_a_head_without_end_costs_no_memory(serving: Serving, connect: Connect) -> None:
    log_in(serving, connect)
    before = rss(serving.process.pid)
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: %s\r\n" % (k, b"x" * 8000) for k in range(125))
    standing = flood(connect, head, 60)
    log_in(serving, connect)
    assert rss(serving.process.pid) - before < 30 << 20
    close_all(standing)


@on_the_port
def test_refused_and_garbled_requests_are_a_few_lines_in_the_log(serving: Serving, connect: Connect) -> None:
    began = time.monotonic()
    for number in range(200):
        assert b" 403 " in ask(connect, get(serving, f"/{number}"))
        assert b" 400 " in ask(connect, b"\x16\x03\x01\0\xee garbage\r\n\r\n")
    log_in(serving, connect)
    serving.stop()
    minutes = int(time.monotonic() - began) // 60  # a kind of line is written again after each
    log = "".join(serving.said)
    assert 1 <= log.count("refused GET") <= 1 + minutes
    assert len(serving.said) < 10 + 2 * minutes


def test_odd_names_and_targets_are_refused_with_a_reason(serving: Serving, connect: Connect) -> None:
    token = serving.token
    port = serving.host.rpartition(":")[2]
    hosts = [
        f"127.0.0.1:{'9' * 5000}", f"127.0.0.1:{'0' * 5000}{port}", "127.0.0.1:٨٠٠٠",
        "127.0.0.1:²", "127.0.0.1:-1", "[::1", "[::1]x", f"[::1]]:{port}", "[", "]", f"x@127.0.0.1:{port}",
        f"127.0.0.1:{port}@evil.example.org", f"127.0.0.1\x7f:{port}", f"127.0.0.1:{port}, evil.example.org",
        f"127.0.0.1:{port}:{port}", "", ":", f":{port}", f"127.0.0.1.:{port}", f"\udcff:{port}", "x" * 8000,
    ]  # fmt: skip
    for host in hosts:
        answer = ask(connect, f"GET /?token={token} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        assert re.match(rb"HTTP/1.[01] 40[03] ", answer), (host, answer)
    nul = ask(connect, f"GET /?token={token} HTTP/1.1\r\nHost: 127.0.0.1\0:{port}\r\n\r\n")
    assert b" 400 " in nul
    requests = [
        f"GET /?token={token} HTTP/1.1\r\n\r\n",
        f"GET /?token={token} HTTP/1.1\r\nHost: {serving.host}\r\nHost: evil.example.org\r\n\r\n",
        f"GET /?token={token} HTTP/1.1\r\nHost: evil.example.org\r\nHost: {serving.host}\r\n\r\n",
        f"GET http://evil.example.org/?token={token} HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"GET http://{serving.host}/?token={token} HTTP/1.1\r\nHost: evil.example.org\r\n\r\n",
        f"GET http://[/?token={token} HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"GET http://x:{'9' * 5000}/?token={token} HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"CONNECT {serving.host} HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"OPTIONS * HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"GET /?token=%ff%ed%a0%80 HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f"GET /?token=\udcff\udced HTTP/1.1\r\nHost: {serving.host}\r\n\r\n",
        f'GET / HTTP/1.1\r\nHost: {serving.host}\r\nCookie: {COOKIE}=\udcff; =; ;;"\r\n\r\n',
        f"GET / HTTP/1.1\r\nHost: {serving.host}\r\nContent-Length: {'9' * 5000}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: {serving.host}\r\nTransfer-Encoding: chunked\r\n\r\n{'f' * 5000}\r\n",
        f"GET / HTTP/{'9' * 5000}.1\r\nHost: {serving.host}\r\n\r\n",
    ]
    for request in requests:
        answer = ask(connect, request)
        assert re.match(rb"HTTP/1.[01] 4[0-9][0-9] ", answer), (request[:200], answer)
    page, cookie = log_in(serving, connect)
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    for origin in (f"http://127.0.0.1:{'9' * 5000}", "http://[", "http://[::1", "\udcff", "null", ""):
        answer = ask(connect, get(serving, f"{page}ws", f"Cookie: {cookie}", f"Origin: {origin}", *upgrade))
        assert b" 403 " in answer, (origin, answer)
    assert serving.boards() == []


@on_the_socket
async def test_a_page_that_sends_odd_messages_ends_its_own_board(serving: Serving, connect: Connect) -> None:
    page, cookie = log_in(serving, connect)
    for message in ("[" * 500_000, '["ping",' * 100_000, f'["resize",{{"width":{"9" * 5000},"height":1}}]'):
        async with (
            aiohttp.ClientSession(connector=connector(connect), headers={"Cookie": cookie}) as session,
            session.ws_connect(f"{serving.base}{page}ws", origin=serving.base) as websocket,
            asyncio.timeout(60),
        ):
            await websocket.send_str(message)
            async for _ in websocket:
                continue
        until(lambda: serving.boards() == [], f"its board ends: {message[:20]}")


def connector(connect: Connect) -> aiohttp.BaseConnector:
    """Return what aiohttp's client connects to the server's socket with."""
    with connect() as connection:
        return aiohttp.UnixConnector(connection.getpeername())


@on_the_port
def test_a_page_that_answers_no_ping_ends_with_its_board(serving: Serving, connect: Connect) -> None:
    page, cookie = log_in(serving, connect)
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    head = get(serving, f"{page}ws", f"Cookie: {cookie}", f"Origin: {serving.base}", *upgrade)
    with connect() as connection:
        connection.sendall(head.replace("Connection: close", "Connection: Upgrade").encode())
        until(serving.boards, "its board starts")
        until(lambda: serving.boards() == [], "its board ends", 60)


def test_a_board_that_cannot_start_reports_the_reason(here: Here) -> None:
    serving = Serving(here, "--port", "0")
    page, cookie = serving.enter()

    async def visit() -> object:
        async with (
            aiohttp.ClientSession(headers={"Cookie": cookie}) as session,
            session.ws_connect(f"{serving.base}{page}ws", origin=serving.base) as websocket,
        ):
            return [message.data async for message in websocket]

    used = len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir()))
    resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE, (used + 2, 4096))
    assert "cannot start a board: Too many open files" in str(asyncio.run(visit()))
    resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE, (4096, 4096))
    assert serving.get(page, Cookie=cookie)[0] == 200
    serving.stop()
    assert "Traceback" not in "".join(serving.said)
