"""What the ranks of a run are doing now, as its head reports it."""

from __future__ import annotations

import msgspec

from gpuboard.errors import GpuboardError
from gpuboard.launch.runs.access import RunAccess
from gpuboard.launch.runs.control import ControlRequest
from gpuboard.launch.runs.folder import FINAL, RunView
from gpuboard.launch.stalls.verdict import Explanation
from gpuboard.model.decoding import convert
from gpuboard.model.text import clean

_WAIT_S = 15.0  # for the head, which asks all nodes


def explain_run(run: RunAccess) -> Explanation:
    """Return what a run's head finds when it inspects all ranks; the verdicts of a run that has ended.

    Takes seconds. Raises GpuboardError if the head cannot be reached or does not answer.
    """
    view = run.view()
    if view.state in FINAL:
        return _ended(view)
    try:
        answer = run.ask(ControlRequest("explain"), _WAIT_S)
    except GpuboardError:
        view = run.view()
        if view.state not in FINAL:
            raise
        return _ended(view)  # during the inspection
    try:
        return convert(answer, Explanation)
    except msgspec.ValidationError as error:
        why = answer.get("error") if isinstance(answer, dict) else error
        raise GpuboardError(f"run {view.id}: {why}") from error


def _ended(view: RunView) -> Explanation:
    lines = []
    for verdict in view.verdicts:
        earlier = f"attempt {verdict.attempt}: " if verdict.attempt != view.attempt else ""
        lines += [earlier + verdict.text, *verdict.evidence.splitlines()]
    return Explanation([clean(line, 600) for line in lines], None, "", [])
