"""Dispatch: imports the module of the command in argv alone, maps errors to messages and exit codes.

Importing every command would take longer than the whole start-up budget of `allocate`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from gpuboard import __version__
from gpuboard.cli.commands import COMMANDS, GROUPS, is_evaluated, meant, split
from gpuboard.cli.context import Context
from gpuboard.cli.options import Parser, add_common
from gpuboard.cli.stderr import report
from gpuboard.errors import GpuboardError, Interrupted, Refused, UsageError
from gpuboard.model.text import clean, quoted

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # writing; to stdout where the error names no file

_SUMMARY = """\
See every GPU of every node and why it is or is not free, reserve GPUs, and
start distributed PyTorch on them. Without a command, gpuboard opens
the board, or prints the status where stdout is not a terminal."""

_EPILOG = """\
in scripts:
  export CUDA_VISIBLE_DEVICES=; eval "$(gpuboard allocate --n 4)" || exit

exit codes: 0 done, 1 error, 2 usage error, 3 the request can never be met,
  4 not free now, 5 no such lease or not yours, 6 no node could be reached,
  7 preflight failed, 130 interrupted. `run` and `launch` exit with the code
  of the command or the ranks that they started.

`gpuboard COMMAND --help` describes each command."""


class CommandModule(Protocol):
    """The interface of a command's module."""

    NAME: str
    HELP: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments, and an example as the epilog."""

    @staticmethod
    def run(args: argparse.Namespace, context: Context) -> int:
        """Run the command; return its exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv`` (without the program's name); return its exit code, never raise."""
    try:
        code = _dispatch(list(argv))
        sys.stdout.flush()
    except GpuboardError as error:
        report("\n  ".join([str(error), *_notes(error)]))
        code = error.exit_code
        _refuse_as_json(argv, error)
    except KeyboardInterrupt as error:
        for note in _notes(error):
            report(note)
        code = 128 + signal.SIGINT
        _refuse_as_json(argv, Interrupted("interrupted"))
    except BrokenPipeError:
        _drop_stdout()
        code = 128 + signal.SIGPIPE  # the reader has left: exit without a message, as other tools do
    except SystemExit as error:  # argparse's --help
        code = error.code if isinstance(error.code, int) else 0
    except Exception as error:
        _refuse_as_json(argv, GpuboardError(f"{type(error).__name__}: {error}"))
        code = _unexpected(error)
    return code


def _notes(error: BaseException) -> list[str]:
    """Return the notes on an error: what the failed operation could not clean up (Allocator)."""
    return getattr(error, "__notes__", [])


def _refuse_as_json(argv: Sequence[str], error: GpuboardError) -> None:
    """Print the error as JSON where `allocate` or `env` was called for JSON."""
    from gpuboard.leases.output.shell import requested_format

    if is_evaluated(list(argv)) and requested_format(argv) == "json":
        from gpuboard.cli.stdout import write_json
        from gpuboard.leases.output.formats import error_of

        refusal = error.refusal if isinstance(error, Refused) else None
        with contextlib.suppress(OSError, ValueError):
            write_json(error_of(error.exit_code, str(error), refusal))
            sys.stdout.flush()


def load(name: str, argv: Sequence[str] = ()) -> CommandModule:
    """Import the module of one command. Raises UsageError with a remedy for an unknown one, which ``argv`` has."""
    if name not in COMMANDS:
        raise UsageError(f"{quoted(name)} is not a command; {_remedy(name, argv)}")
    return cast(CommandModule, importlib.import_module(f"gpuboard.cli.{COMMANDS[name]}.{name}"))


def _remedy(name: str, argv: Sequence[str]) -> str:
    if near := meant(name):
        return f"did you mean `gpuboard {near}`?"
    option = argv[argv.index(name) - 1] if name in argv[1:] else ""
    if option.startswith("--") and "=" not in option:  # then it is the value of an option that only a command takes
        command = next((word for word in argv if word in COMMANDS), "COMMAND")
        return f"options follow the command: gpuboard {command} {clean(f'{option} {name}', 80)}"
    return f"commands are: {', '.join(COMMANDS)}"


def parser_of(command: CommandModule) -> Parser:
    """Return the parser of one command."""
    parser = Parser(f"gpuboard {command.NAME}", command.HELP)
    command.add_arguments(parser)
    add_common(parser)
    return parser


def _dispatch(argv: list[str]) -> int:
    name, rest = split(argv)
    if name is None or name == "help":
        if name == "help" and rest:
            name, rest = rest[0], ["--help"]
        elif name == "help" or "-h" in rest or "--help" in rest:
            print(_help())
            return 0
        elif "--version" in rest or "-V" in rest:
            print(f"gpuboard {__version__}")
            return 0
    command = load("board" if name is None else name, argv)
    args = _read(command, rest)
    context = Context(argv)
    context.nodesets = args.nodes or []
    if args.config is not None:
        context.config_file = Path(args.config)
    if command.NAME not in {"board", *GROUPS["setup"]}:  # the board does it beside the UI: a hung keeper takes 3 s
        recover_leases(context)
    return command.run(args, context)


def _read(command: CommandModule, words: list[str]) -> argparse.Namespace:
    """Return a command's arguments. Raises UsageError and writes it to the command's status file, if one is named."""
    parser = parser_of(command)
    try:
        return parser.read(words)
    except UsageError:
        from gpuboard.cli.status_file import OPTION, outcome_of, recorded

        if file := parser.value_of(OPTION, words):
            with recorded(outcome_of(command.NAME), file):
                raise
        raise


def recover_leases(context: Context) -> None:
    """Start a keeper if leases need one, and print the messages about lost leases."""
    from gpuboard.keeper import client as keeper

    for message in keeper.recover(context.env):
        report(message)


def _help() -> str:
    shown = ["usage: gpuboard [COMMAND] [--nodes NODESET] [--config FILE] …", "", _SUMMARY]
    for group, names in GROUPS.items():
        shown.append(f"\n{group}:")
        shown += [f"  {name:<10}{load(name).HELP.splitlines()[0]}" for name in names]
    return "\n".join([*shown, "", _EPILOG])


def _unexpected(error: Exception) -> int:
    """Print what to report, and with GPUBOARD_DEBUG=1 the traceback; return the exit code."""
    if os.environ.get("GPUBOARD_DEBUG"):
        import traceback

        traceback.print_exc()
    if isinstance(error, OSError) and error.errno is not None and error.__traceback__ is not None:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.EMFILE:
            where = f": the limit is {os.sysconf('SC_OPEN_MAX')}; raise it with `ulimit -n`"
        if not error.filename and (error.errno in _FULL or _stdout_failed()):
            report(f"cannot write to stdout: {error.strerror}")
        else:
            report(f"{error.strerror}{where}; set GPUBOARD_DEBUG=1 to see the traceback")
        _drop_stdout()
        return 1
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else "?"
    report(
        f"this is a bug: {type(error).__name__} at {where}: {error}\n  please report it with this line, the output of "
        f"the same command under GPUBOARD_DEBUG=1, and gpuboard {__version__} on Python {sys.version.split()[0]}"
    )
    return 1


def _stdout_failed() -> bool:
    """Return whether writing to stdout fails, and so caused the error."""
    try:
        sys.stdout.flush()
        os.write(1, b"")  # fails without anything left to flush, too: for a closed one, and one whose terminal is gone
    except (OSError, ValueError):
        return True
    return False


def _drop_stdout() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
