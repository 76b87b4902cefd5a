"""The keys of the filter of runs (pure)."""

from __future__ import annotations

import time

from gpuboard.board.filter.language import Language
from gpuboard.board.filter.matchers import named, place, quantity, word
from gpuboard.launch.runs.folder import RunState, lived_s, places
from gpuboard.launch.runs.index import RunEntry
from gpuboard.model.units import parse_duration, parse_number

_STATES: tuple[RunState, ...] = ("preflight", "starting", "running", "stalled", "failed", "done", "stopped")
RUNS: Language[[RunEntry]] = Language(
    {
        "state": word(_STATES, lambda entry: (entry.view.state,)),
        "run": named("a run's id, run:r3f9", lambda entry: (entry.view.id,), offered=False),
        "node": place(lambda entry: [rank.node for rank in entry.view.ranks]),
        "lease": named("a lease's id, lease:k3f9", lambda entry: (entry.view.lease,)),
        "target": named("a part of the command, target:train.py", lambda entry: (entry.view.target,), begins=False,
                        offered=False),
        "code": quantity("the exit code", lambda entry: entry.view.exit_code, parse_number, "code>0", sign=">"),
        "age": quantity("how long ago it started", lambda entry: lived_s(entry.view, time.time()), parse_duration,
                        "age<1d", sign="<", cost=2),
        "ranks": quantity("how many ranks", lambda entry: len(entry.view.ranks), parse_number, "ranks>8", sign=">"),
    },
    lambda entry: (entry.view.id, entry.view.state, entry.view.lease, entry.view.target, places(entry.view),
                   *(verdict.text for verdict in entry.view.verdicts)),
    {"id": "run", "command": "target", "script": "target", "exit": "code", "nodes": "node"},
)  # fmt: skip
