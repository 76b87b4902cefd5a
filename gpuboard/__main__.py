"""Where every command starts. Knows of `allocate` and `env` what must hold before anything else is imported.

* Shells evaluate their output, so whatever goes wrong here or later, also a failing import or ctrl-C, stdout gets
  lines that leave no GPU visible and make ``eval`` return the exit code.
* Their time is NVML's: the agent of this machine is started first, and argparse, msgspec and all else load meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and collections.abc would load before the agent starts
    from collections.abc import Mapping

_EVALUATED = ("allocate", "env")  # a shell evaluates their output
_LOCAL = ("allocate", "env", "run", "board", None)  # likely to ask this machine's agent; None: `gpuboard` alone
_BOARD = (None, "board")  # the interpreter's own end takes 100 ms then, 300 where the machine is busy


def main() -> int:
    """Run the command that sys.argv asks for and return its exit code."""
    _fill_streams()
    argv = sys.argv[1:]
    command = _command(argv)
    if command not in _EVALUATED:
        try:
            if command in _LOCAL:
                _prestart(argv)
            _mind_interrupts()
            if command in _BOARD:
                gc.disable()  # until all is imported (board/terminal/gc.py)
                _load_msgspec()
            from gpuboard.cli.main import main as front_door

            code = front_door(argv)
        except KeyboardInterrupt:
            code = 130
        if command in _BOARD:
            _leave(code)
        return code
    code, words = 1, ""
    gc.disable()  # 10 ms: everything that is created until the command's own code runs is there to stay
    try:
        _prestart(argv)
        _mind_interrupts(1, 15)
        _load_msgspec()
        from gpuboard.cli.main import main as front_door

        code = front_door(argv)
    except KeyboardInterrupt:
        code, words = 130, "interrupted"
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        _say(f"gpuboard: {words}")
    if code:
        _fail_closed(argv, code, words)
    _leave(code)
    raise AssertionError("_leave does not return")


def _mind_interrupts(*more: int) -> None:
    """Let SIGINT, and the signals ``more``, raise KeyboardInterrupt, but never in the middle of an import.

    msgspec 0.22 crashes (SIGSEGV) when the creation of a class of its is cut short.
    """
    import signal
    from types import FrameType

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                signal.setitimer(signal.ITIMER_REAL, 0.005)  # look again then
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for number in (signal.SIGINT, *more):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup's stays ignored
            signal.signal(number, interrupt)


def _fill_streams() -> None:
    """Make stdin, stdout and stderr usable where the caller closed them, or where they cannot hold every character.

    Else the next pipe or socket would become stdout. A closed stdout is open for reading only: whoever prints fails.
    """
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is not in use: this one
            os.set_inheritable(fd, True)
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # in a locale without UTF-8 a `?` is better than no table


def _load_msgspec() -> None:
    """Import msgspec without typing_extensions, which it asks first for what typing itself has: 6 ms."""
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # makes the import fail, as if not installed
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def _command(argv: list[str]) -> str | None:
    """Return the command's name in ``argv`` (cli.main.split is the judge; this one must not import it)."""
    words = iter(argv)
    for word in words:
        if word in {"--nodes", "--config"}:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _prestart(argv: list[str]) -> None:
    """Start this machine's agent when it is likely to be asked; one too many ends by itself when we do."""
    if not {"-h", "--help", "-V", "--version"}.isdisjoint(argv):
        return
    if _names_others(argv, os.environ):
        return
    from gpuboard.transport.spawn import prestart

    try:
        prestart()
    except OSError:
        return  # the transport will say what is wrong when it is needed


def _names_others(argv: list[str], env: Mapping[str, str]) -> bool:
    """Tell whether the command line, the environment or a config file names nodes and does not mention this one."""
    said = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--nodes"]
    said += [word[8:] for word in argv if word.startswith("--nodes=")]
    if not said and not env.get("GPUBOARD_LEASE"):
        said = [env["GPUBOARD_NODES"]] if env.get("GPUBOARD_NODES") else []
    if not said:
        from gpuboard import files

        home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '')}/.config"
        for path in (env.get("GPUBOARD_CONFIG") or f"{home}/gpuboard/config.toml", "/etc/gpuboard/config.toml"):
            try:
                lines = files.read(path, files.CONFIG_MAX).decode("utf-8", "replace").splitlines()
            except OSError:
                continue  # most have none; one that cannot be read is reported when it is loaded
            said += [line for line in lines if line.lstrip().startswith("nodes")]
    name = os.uname().nodename.partition(".")[0]
    return bool(said) and not any(name in text or "localhost" in text for text in said)


def _fail_closed(argv: list[str], code: int, words: str) -> None:
    """Write the lines for the shell that evaluates us, or ``words`` as JSON unless they are "" (said already)."""
    form = "shell"
    try:
        from gpuboard.leases.output.shell import fail_closed, said_format

        said = said_format(argv)
        if said is None:
            from gpuboard.keeper.holder import evaluator_kind

            said = evaluator_kind()
        form = said
        text = fail_closed(form, code)
        if form == "json" and words:
            import json

            error = {"code": code, "message": words, "gpus": [], "nearest": ""}
            text = json.dumps({"schema": 1, "error": error}) + "\n"
    except BaseException:
        text = f"export CUDA_VISIBLE_DEVICES=''; unset GPUBOARD_LEASE; (exit {code})\n" if form == "shell" else ""
    try:
        os.write(1, text.encode())
    except OSError:
        return  # nobody reads


def _say(words: str) -> None:
    try:
        os.write(2, words.encode("utf-8", "replace") + b"\n")
    except OSError:
        return


def _leave(code: int) -> None:
    """End at once: the interpreter's own end takes 10 ms, and nothing here has to be cleaned up by it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
