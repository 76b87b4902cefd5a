"""The demo's board: a simulated cluster that lives, under the real board; nothing of it is left when it is closed."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuboard import paths
from gpuboard.agent.claims import store as claims
from gpuboard.cli.context import Context
from gpuboard.config import StateSettings
from gpuboard.errors import GpuboardError, UsageError

if TYPE_CHECKING:
    from gpuboard.board.core import Core
    from gpuboard.config import Settings

STATE = StateSettings(idle_after="45s")  # a person looks at a demo for a few minutes
_TRAINING = "-m gpuboard.demo_train --steps 3000 --pause 0.1"
_GRACE_S = 2.0  # for runs that still go on when the board is closed
_END_S = 15.0  # and until they must have ended


def run(context: Context) -> int:
    """Open the board on the living cluster; return 0 when nothing was left behind. Raises UsageError."""
    if why := cannot_open(context):
        raise UsageError(f"no board here: {why}; `gpuboard demo` tells the same story in words")
    from gpuboard.board.app import BoardApp  # 250 ms: only for the board
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    core = make(context.settings, context.env)
    guard = terminal.Guard(leave_s=_END_S + 5.0)  # the board is gone at once; what it started is ended first
    app = BoardApp(core, guard)
    gc.calm()
    try:
        app.run()
    finally:
        guard.restored(app.return_code or 0)
        core.close()
        left = end(core)
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        words = f"not everything was released: {', '.join(left)}" if left else _ENDED
        print(f"gpuboard demo: {words}", flush=True)
    return 1 if left else app.return_code or 0


def cannot_open(context: Context) -> str | None:
    """Return why no board can be opened here, or None."""
    if not context.stdout_is_tty:
        return "stdout is no terminal"
    from gpuboard.board.terminal import guard as terminal

    return terminal.cannot_draw(context.env)


_ENDED = "everything is released; nothing of the demo is left running."


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a demo.

    Its runs, leases and view are kept in a folder of its own (``<state>/demo``): the user's own are left alone.
    """
    return {
        **env,
        "XDG_STATE_HOME": str(paths.state_dir(env) / "demo"),
        "VIRTUAL_ENV": sys.prefix,  # ranks run where PyTorch was installed for the demo
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns, once a rank, where the machine's own address has no name
    }


def make(settings: Settings, env: Mapping[str, str], *, seed: int = 7, epoch: float | None = None) -> Core:
    """Return the core of a demo's board.

    What demos left that were killed is released.
    """
    from gpuboard.board.core import Core
    from gpuboard.board.dialogs.launch_process import LaunchForm
    from gpuboard.cluster.simulated import living_nodes

    nodes = living_nodes(settings.claims_dir, seed=seed, epoch=epoch)
    _sweep(settings.claims_dir)
    core = Core(nodes, msgspec.structs.replace(settings, state=STATE, cluster="demo"), environment(env))
    core.starter.last = LaunchForm(_TRAINING, os.getcwd(), device="cpu", keep=False)  # what the dialog begins with
    return core


def end(core: Core) -> list[str]:
    """End the runs and release the leases of a demo's board that was closed; return in words what could not be.

    Leases are released in the folder of claims itself: their node may be one that hangs.
    """
    from gpuboard.keeper import client as keeper

    left = _end_runs(core)
    [prefix] = {f"SIM-{node.simulate['cluster']}-" for node in core.nodes.values() if node.simulate}
    found, _ = claims.Folder(core.settings.claims_dir, prefix).read()
    for lease in sorted({one["lease"] for one in found if one["uid"] == os.geteuid()}):
        with contextlib.suppress(keeper.KeeperError, OSError):  # it finds out by itself at its next look
            keeper.forget(lease, core.env)
        left += _drop(core.settings.claims_dir, lease)
    return left


def _end_runs(core: Core) -> list[str]:
    from gpuboard.launch import control, run_folder

    going = [started for started in core.starter.started if not started.over]
    until = time.monotonic() + _END_S
    for started in going:
        try:
            folder = run_folder.runs_dir(core.env) / started.run
            control.ask(folder, control.ControlRequest("stop", _GRACE_S, "the demo's board was closed"))
        except (GpuboardError, OSError):
            started.cancel()  # it has not come so far as to have a run
    while any(not started.over for started in going) and time.monotonic() < until:
        time.sleep(0.05)
    return [f"run {started.run} (pid {started.process.pid})" for started in going if not started.over]


def _drop(claims_dir: str, lease: str) -> list[str]:
    try:
        claims.handle("release", {"lease": lease}, claims.Folder(claims_dir, "SIM-demo-"))
    except claims.Refuse as refused:
        if refused.kind != "not-found":
            return [f"lease {lease}: {refused.message}"]
    return []


def _sweep(claims_dir: str) -> None:
    """Release what demos of ours left that were killed: their UUIDs hold a pid that is no more."""
    found, _ = claims.Folder(claims_dir, f"SIM-demo-{os.getuid()}-").read()
    for one in found:
        match = re.match(rf"SIM-demo-{os.getuid()}-(\d+)-", one["uuid"])
        if match and one["uid"] == os.geteuid() and not Path(f"/proc/{match[1]}").exists():
            _drop(claims_dir, one["lease"])
