"""The demo's board: the real board on a simulated cluster, with everything released when it closes."""

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
from gpuboard.config import Settings, StateSettings
from gpuboard.errors import GpuboardError, UsageError

if TYPE_CHECKING:
    from gpuboard.board.core import Core

STATE = StateSettings(idle_after="45s")  # the default, 15m, is longer than a demo
_TRAINING = "-m gpuboard.demo_train --steps 3000 --pause 0.1"
_GRACE_S = 2.0  # SIGTERM to SIGKILL, for runs that are active when the board closes
_END_S = 15.0  # deadline for the end of those runs


def run(context: Context) -> int:
    """Open the board on the simulated cluster; return 0 when everything was released. Raises UsageError."""
    if why := cannot_open(context):
        raise UsageError(f"cannot open the board: {why}; `gpuboard demo` shows the same steps as text")
    from gpuboard.board.app import BoardApp  # 250 ms: only for the board
    from gpuboard.board.terminal import gc
    from gpuboard.board.terminal import guard as terminal

    core = make(context.settings, context.env)
    guard = terminal.Guard(leave_s=_END_S + 5.0)  # time for ending its runs after the board has closed
    app = BoardApp(core, guard)
    gc.calm(len(core.nodes))
    try:
        app.run()
    finally:
        guard.restored(app.return_code or 0)
        core.close()
        left = end(core)
    with contextlib.suppress(OSError):  # the terminal may be closed
        result = f"not everything was released: {', '.join(left)}" if left else _ENDED
        print(f"gpuboard demo: {result}", flush=True)
    return 1 if left else app.return_code or 0


def cannot_open(context: Context) -> str | None:
    """Return why the board cannot be opened here, or None."""
    if not context.stdout_is_tty:
        return "stdout is not a terminal"
    from gpuboard.board.terminal import guard as terminal

    return terminal.cannot_draw(context.env)


_ENDED = "everything is released; no process of the demo is left."


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a demo.

    Its runs, leases and preferences are kept in ``<state>/demo``, apart from the user's.
    """
    return {
        **env,
        "XDG_STATE_HOME": str(paths.state_dir(env) / "demo"),
        "VIRTUAL_ENV": sys.prefix,  # ranks use the interpreter that has PyTorch for the demo
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise each rank warns where the host name does not resolve
    }


def make(settings: Settings, env: Mapping[str, str], *, epoch: float | None = None) -> Core:
    """Return the core of a demo's board, after releasing the leases of killed demos."""
    from gpuboard.board.core import Core
    from gpuboard.board.dialogs.launch_process import LaunchForm
    from gpuboard.cluster.simulated import living_nodes

    nodes = living_nodes(settings.claims_dir, epoch=epoch)
    _release_orphaned(settings.claims_dir)
    core = Core(nodes, msgspec.structs.replace(settings, state=STATE, cluster="demo"), environment(env))
    core.starter.last = LaunchForm(_TRAINING, os.getcwd(), device="cpu", keep=False)  # default of the launch dialog
    return core


def end(core: Core) -> list[str]:
    """End the runs and release the leases of a closed demo board; return a description of each failure.

    Claims are removed from the folder directly, as their simulated node may be one that hangs.
    """
    from gpuboard.keeper import client as keeper

    left = _end_runs(core)
    [prefix] = {f"SIM-{node.simulate['cluster']}-" for node in core.nodes.values() if node.simulate}
    found, _ = claims.Folder(core.settings.claims_dir, prefix).read()
    for lease in sorted({one["lease"] for one in found if one["uid"] == os.geteuid()}):
        with contextlib.suppress(keeper.KeeperError, OSError):  # the keeper notices at its next heartbeat
            keeper.forget(lease, core.env)
        left += _drop(core.settings.claims_dir, lease)
    return left


def _end_runs(core: Core) -> list[str]:
    from gpuboard.launch.runs import control
    from gpuboard.launch.runs import folder as run_folder

    going = [started for started in core.starter.started if not started.over]
    until = time.monotonic() + _END_S
    for started in going:
        try:
            folder = run_folder.runs_dir(core.env) / started.run
            control.ask(folder, control.ControlRequest("stop", _GRACE_S, "the demo's board was closed"))
        except (GpuboardError, OSError):
            started.cancel()  # it has not created its run yet
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


def _release_orphaned(claims_dir: str) -> None:
    """Release the leases of this user's killed demos: the pid in their GPU UUIDs no longer exists."""
    found, _ = claims.Folder(claims_dir, f"SIM-demo-{os.getuid()}-").read()
    for one in found:
        match = re.match(rf"SIM-demo-{os.getuid()}-(\d+)-", one["uuid"])
        if match and one["uid"] == os.geteuid() and not Path(f"/proc/{match[1]}").exists():
            _drop(claims_dir, one["lease"])
