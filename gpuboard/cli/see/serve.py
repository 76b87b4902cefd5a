"""`gpuboard serve --web`: the board in a browser, on this machine's loopback alone."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

from gpuboard.cli.context import Context
from gpuboard.cli.options import whole
from gpuboard.errors import GpuboardError, UsageError

NAME = "serve"
HELP = "the board in a browser"

_PORT = 8000
_ROOT = Path(__file__).resolve().parents[3]  # where gpuboard is imported from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--web", action="store_true", help="serve the board to browsers")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--port", type=whole(0, 65535), help=f"the port on 127.0.0.1; 0: any free one; default {_PORT}")
    where.add_argument(
        "--socket", metavar="PATH", type=Path, help="a unix socket, closed to others, in place of a port"
    )
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 or ::1; nothing else is served on")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="keep the token there; made if it is missing")
    parser.add_argument(
        "--public-url", metavar="URL", help="where a proxy of yours shows it, e.g. https://gpu.example.org"
    )
    parser.epilog = (
        "examples:\n  gpuboard serve --web\n  gpuboard serve --web --port 8010 --nodes 'gpu[01-03]'\n\n"
        "Open the URL that is printed: the token in it is what lets you in. From another machine, forward the port:\n"
        "  ssh -L 8000:127.0.0.1:8000 login1\n"
        "Whoever has the token acts as you. Each page has a board of its own, which ends with the page."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Serve until stopped; return the exit code."""
    port = _PORT if args.port is None else args.port
    host = _loopback(args.host, port)
    context.nodes()  # what is wrong with the configuration is said here, not on each page
    try:
        from gpuboard.board.web import auth, listen
        from gpuboard.board.web import server as web  # aiohttp: 200 ms, and in the extra `web`
    except ModuleNotFoundError as error:
        raise GpuboardError(f"{error.name} is not installed: pip install 'gpuboard[web]'") from error
    public = None if args.public_url is None else auth.check_public_url(args.public_url)
    token = auth.new_token() if args.token_file is None else auth.token_of(args.token_file)
    listener = listen.listen_at(args.socket) if args.socket else listen.listen(port, host)
    with listener:
        if args.socket is None:
            port = listener.getsockname()[1]
        guard = auth.RequestGuard(token, None if args.socket else port, public)
        server = web.Server(guard, _command(context), context.env, _log)
        shown = token if args.token_file is None else f"$(cat {shlex.quote(str(args.token_file.absolute()))})"
        base = public or f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(_words(base, shown, args.socket.absolute() if args.socket else port), flush=True)
        try:
            number = asyncio.run(server.serve(listener))
        finally:
            if args.socket is not None:
                args.socket.unlink(missing_ok=True)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _loopback(host: str, port: int) -> str:
    """Return the address to listen on. Raises UsageError for any that others could reach."""
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if host not in {"127.0.0.1", "::1"}:
        raise UsageError(f"--host {host}: the board is served on 127.0.0.1 and ::1 alone\n  {_forward(port)}")
    return host


def _forward(target: object) -> str:
    """Return how a person at another machine reaches a port of ours, or a unix socket."""
    port, there = (target, f"127.0.0.1:{target}") if isinstance(target, int) else (_PORT, target)
    return f"from another machine: ssh -L {port}:{there} {socket.gethostname()}"


def _words(base: str, token: str, target: object) -> str:
    """Return what is printed at the start: the URL, and how to reach it from elsewhere."""
    return f"{base}/?token={token}\n  {_forward(target)}\n  whoever has this URL acts as you; ctrl-c ends it"


def _command(context: Context) -> list[str]:
    """Return the command line of one board: this interpreter, this gpuboard, this configuration, these nodes."""
    # -P and not -m: the folder that we stand in, which may be anybody's, must not be where gpuboard is looked for
    boot = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from gpuboard.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", boot, "board"]
    for nodeset in context.said:
        command += ["--nodes", nodeset]
    if context.config_file is not None:
        command += ["--config", str(context.config_file)]
    return command


def _log(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)
