"""`gpuboard launch --detach`: what the command prints when its run has been detached."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cli.status_file import outcome_of
from gpuboard.cli.stderr import report
from gpuboard.cli.stdout import write_json
from gpuboard.keeper.logind import run_reapers
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.runs.folder import RunView, places
from gpuboard.model.decoding import from_json

if TYPE_CHECKING:
    from gpuboard.launch.detached.process import WaitingCommand
    from gpuboard.launch.head import Head


class _Message(msgspec.Struct, frozen=True):
    run: RunView
    checks: list[Check]


def detached_message(head: Head) -> bytes:
    """Return what a detaching head sends to its command: one line."""
    return msgspec.json.encode(_Message(head.view(), head.checks))


def detached_run(message: str) -> RunView:
    """Return the run of such a line."""
    return from_json(message, _Message).run


def await_detached(command: WaitingCommand, context: Context, *, as_json: bool) -> int:
    """Print how to follow the run once it is detached; return the exit code, of a launch that ended before its own."""
    message = command.wait()
    if isinstance(message, int):
        return message
    found = from_json(message, _Message)
    try:
        command.admit_interrupts()
        _show(found, as_json=as_json)
        for warning in run_reapers(context.env, os.geteuid()):
            report(warning)
    except KeyboardInterrupt:
        report(f"run {found.run.id} is detached and goes on; `gpuboard stop {found.run.id}` stops it")
        raise
    return 0


def _show(found: _Message, *, as_json: bool) -> None:
    if as_json:
        outcome = outcome_of("launch") | {"exit_code": 0} | msgspec.to_builtins(found)
        write_json(outcome)
    else:
        run = found.run
        print(f"run {run.id} is detached; ranks on {places(run)}; its head is pid {run.head.pid} on {run.head.host}")
        print(f"  gpuboard attach {run.id}    its output, until it ends")
        print(f"  gpuboard logs -f {run.id}   the output of its ranks from the start")
        print(f"  gpuboard stop {run.id}      stop it")
    sys.stdout.flush()
