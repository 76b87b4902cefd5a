"""Ending a run from outside its terminal: through its head, which counts the grace down and empties every node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpuboard.errors import GpuboardError
from gpuboard.launch import run_folder
from gpuboard.launch.control import ControlRequest, ask


def ask_to_stop(
    env: Mapping[str, str], view: run_folder.RunView, grace_s: float | None, reason: str = ""
) -> run_folder.RunView:
    """Ask the head of a run to end it; return the run as it is then: ``view``, or how it has ended meanwhile.

    ``grace_s`` None: the time from SIGTERM to SIGKILL that launch was given. Raises GpuboardError when the head is on
    another host or does not answer.
    """
    if view.state in run_folder.FINAL:
        return view
    if run_folder.alive(view.head) is None:
        raise GpuboardError(f"run {view.id} is led from {view.head.host}; run `gpuboard stop {view.id}` there")
    try:
        ask(Path(view.folder), ControlRequest("stop", grace_s, reason))
    except GpuboardError:
        now = run_folder.find_run(env, view.id)
        if now.state not in run_folder.FINAL:
            raise
        return now  # it has ended in this very moment
    return view
