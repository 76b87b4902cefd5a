"""`gpuboard serve --web`: serve the board to browsers, on this machine's loopback addresses only."""

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
from gpuboard.cli.options import path, whole
from gpuboard.cli.stderr import show
from gpuboard.errors import GpuboardError, UsageError

NAME = "serve"
HELP = "serve the board to web browsers"

_PORT = 8000
_ROOT = Path(__file__).resolve().parents[3]  # the folder that contains the package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--web", action="store_true", help="serve the board over HTTP (required)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--port", type=whole(0, 65535), help=f"TCP port; 0: any free port; default: {_PORT}")
    where.add_argument(
        "--socket", metavar="PATH", type=path, help="listen on a unix socket of mode 0600 instead of a TCP port"
    )
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 or ::1; default: 127.0.0.1")
    parser.add_argument("--token-file", metavar="FILE", type=path, help="file of the access token, created if "
                        "missing; default: a new token at every start")  # fmt: skip
    parser.add_argument(
        "--public-url", metavar="URL", help="URL under which your proxy serves the board: https://gpu.example.org"
    )
    parser.epilog = (
        "examples:\n  gpuboard serve --web\n  gpuboard serve --web --port 8010 --nodes 'gpu[01-03]'\n\n"
        "Open the printed URL; it contains the access token. On another machine, forward\n"
        "the port first:\n"
        "  ssh -L 8000:127.0.0.1:8000 login1\n"
        "Anyone with the token can act as you. Each page runs its own board, which ends\n"
        "when the page closes."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Serve until stopped; return the exit code."""
    port = _PORT if args.port is None else args.port
    host = _loopback(args.host, port)
    context.nodes()  # report configuration errors here rather than on each page
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
        print(_banner(base, shown, args.socket.absolute() if args.socket else port), flush=True)
        try:
            number = asyncio.run(server.serve(listener))
        finally:
            if args.socket is not None:
                args.socket.unlink(missing_ok=True)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _loopback(host: str, port: int) -> str:
    """Return the address to listen on. Raises UsageError for an address that other machines can reach."""
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if host not in {"127.0.0.1", "::1"}:
        raise UsageError(f"--host {host}: must be 127.0.0.1 or ::1\n  {_forward(port)}")
    return host


def _forward(target: object) -> str:
    """Return the ssh command that forwards the port (int) or unix socket ``target`` to another machine."""
    port, there = (target, f"127.0.0.1:{target}") if isinstance(target, int) else (_PORT, target)
    return f"from another machine: ssh -L {port}:{there} {socket.gethostname()}"


def _banner(base: str, token: str, target: object) -> str:
    """Return the lines printed at the start: the URL, and how to reach it from other machines."""
    return (
        f"{base}/?token={token}\n  {_forward(target)}\n  anyone with this URL can act as you; ctrl-c stops the server"
    )


def _command(context: Context) -> list[str]:
    """Return the command line of one board, with the interpreter, package, config and nodes of this process."""
    # -P instead of -m: never import gpuboard from the working directory, which another user may control
    boot = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from gpuboard.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", boot, "board"]
    for nodeset in context.nodesets:
        command += ["--nodes", nodeset]
    if context.config_file is not None:
        command += ["--config", str(context.config_file)]
    return command


def _log(message: str) -> None:
    show(f"{time.strftime('%H:%M:%S')} {message}")
