"""Entry point of every command, with two guarantees for `allocate` and `env` that hold before other imports.

* Shells evaluate their output. On every failure, including a failed import and ctrl-C, stdout gets lines that hide all
  GPUs and make ``eval`` return the exit code.
* NVML takes most of their time: the local agent starts first, and argparse, msgspec and the rest load meanwhile.
"""

from __future__ import annotations

import gc
import io
import os
import sys

from gpuboard.cli.commands import is_evaluated, split

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing and collections.abc would delay the agent
    from collections.abc import Mapping
    from typing import NoReturn

_LOCAL = ("run", "board", None)  # likely to use the local agent, as `allocate` is; None: `gpuboard` without command
_BOARD = (None, "board")
# New objects before a pass of the cycle collector: more than imports and 256 connections create. They leave little to
# collect, and passes while they are made take 30 ms.
_NEW_MOST = 200_000


def main() -> NoReturn:
    """Run the command in sys.argv and exit with its code."""
    _open_missing_streams()
    argv = sys.argv[1:]
    if not is_evaluated(argv):
        command = split(argv)[0]
        try:
            if command in _LOCAL:
                _prestart_agent(argv)
            _handle_interrupts()
            if command in _BOARD:
                gc.disable()  # until all is imported (board/terminal/gc.py)
            else:
                gc.set_threshold(_NEW_MOST, 20, 20)
            _load_msgspec()
            from gpuboard.cli.main import main as run_command

            _exit_now(run_command(argv))  # here: an interrupt while the command returns is raised by the next call
        except KeyboardInterrupt:  # the command has flushed its output, or was interrupted before: a flush may block
            os._exit(130)
    code, message = 1, ""
    stdout = os.dup(1)  # for the shell that evaluates: the command may point stdout at /dev/null after an error
    gc.disable()  # 10 of 160 ms: everything that is created until the command's own code runs is there to stay
    try:
        _prestart_agent(argv)
        _handle_interrupts(1, 15)
        _load_msgspec()
        from gpuboard.cli.main import main as run_command

        code = run_command(argv)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        _print_error(f"gpuboard: {message}")
    if code:
        _fail_closed(stdout, argv, code, message)
    _exit_now(code)


def _handle_interrupts(*more: int) -> None:
    """Raise KeyboardInterrupt on SIGINT and the signals ``more``, but never during an import.

    msgspec 0.22 crashes (SIGSEGV) when the creation of a Struct class is interrupted.
    """
    import signal
    from types import FrameType

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                signal.setitimer(signal.ITIMER_REAL, 0.005)  # retry after 5 ms
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for number in (signal.SIGINT, *more):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup: stays ignored
            signal.signal(number, interrupt)


def _open_missing_streams() -> None:
    """Open standard streams that the caller closed, and let stdout replace characters that its encoding lacks.

    Otherwise the next pipe or socket would become stdout. A closed stdout is opened read-only, so that printing fails.
    """
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, mode)  # open() returns the lowest free number, which is fd
            os.set_inheritable(fd, True)
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8")
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):  # unbuffered; loses the rest of a short write
        sys.stdout = os.fdopen(1, "w", 1, encoding=sys.stdout.encoding, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a locale without UTF-8 prints `?`


def _load_msgspec() -> None:
    """Import msgspec with typing_extensions hidden, whose names it finds in typing: 10 of 160 ms of `allocate`.

    A later import of typing_extensions finds it.
    """
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # makes the import fail, as if not installed
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def _prestart_agent(argv: list[str]) -> None:
    """Start the local agent when the command is likely to use it; an unused one ends with this process."""
    if not {"-h", "--help", "-V", "--version"}.isdisjoint(argv):
        return
    if _names_other_nodes(argv, os.environ):
        return
    from gpuboard.transport.spawn import prestart

    try:
        prestart()
    except OSError:
        return  # the transport reports the error when it needs the agent


def _names_other_nodes(argv: list[str], env: Mapping[str, str]) -> bool:
    """Return whether command line, environment or config file name nodes and this machine is not among them."""
    nodesets = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--nodes"]
    nodesets += [word[8:] for word in argv if word.startswith("--nodes=")]
    if not nodesets and not env.get("GPUBOARD_LEASE"):
        nodesets = [env["GPUBOARD_NODES"]] if env.get("GPUBOARD_NODES") else []
    if not nodesets:
        from gpuboard import files

        home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '')}/.config"
        for path in (env.get("GPUBOARD_CONFIG") or f"{home}/gpuboard/config.toml", "/etc/gpuboard/config.toml"):
            try:
                with files.open_regular(path) as file:  # a pipe can be read only once, by loading the settings
                    lines = file.read(files.CONFIG_MAX).decode("utf-8", "replace").splitlines()
            except OSError:
                continue  # usually absent; loading the settings reports one that cannot be read
            nodesets += [line for line in lines if line.lstrip().startswith("nodes")]
    name = os.uname().nodename.partition(".")[0]
    return bool(nodesets) and not any(name in text or "localhost" in text for text in nodesets)


def _fail_closed(stdout: int, argv: list[str], code: int, message: str) -> None:
    """Write the lines for the evaluating shell to ``stdout``.

    For JSON: ``message``, or nothing where that is "" (already written). One more interrupt must not prevent them.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    form = "shell"
    try:
        from gpuboard.leases.output.shell import fail_closed, requested_format

        requested = requested_format(argv)
        if requested is None:
            from gpuboard.keeper.holder import evaluator_kind

            requested = evaluator_kind()
        form = requested
        text = fail_closed(form, code)
        if form == "json" and message:
            import json

            error = {"code": code, "message": message, "gpus": [], "nearest": ""}
            text = json.dumps({"schema": 1, "error": error}) + "\n"
    except BaseException:
        text = f"export CUDA_VISIBLE_DEVICES=''; unset GPUBOARD_LEASE; (exit {code})\n" if form == "shell" else ""
    try:
        os.write(stdout, text.encode())
    except OSError:
        return  # the reader has closed the pipe


def _print_error(message: str) -> None:
    try:
        os.write(2, message.encode("utf-8", "replace") + b"\n")
    except OSError:
        return


def _exit_now(code: int) -> NoReturn:
    """Flush and exit without the interpreter's cleanup, which frees nothing that matters here.

    It takes 10 ms, 40 where asyncssh is loaded, and 100 after the board. One more interrupt exits at once: the
    interpreter would end itself by the signal, and flush again into a pipe that may have no reader.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM):
        if callable(signal.getsignal(number)):
            signal.signal(number, lambda *_: os._exit(code or 130))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


if __name__ == "__main__":
    main()
