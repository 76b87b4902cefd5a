"""The keys of the filter of runs (pure)."""

from __future__ import annotations

import time

from gpuboard.board.filter.language import Key, Language
from gpuboard.board.filter.matchers import nodes, number, one_of, text
from gpuboard.launch.runs.folder import RunState, lived_s, places
from gpuboard.launch.runs.index import RunEntry
from gpuboard.model.units import parse_duration, parse_number


def _age(entry: RunEntry) -> float | None:
    return lived_s(entry.view, time.time())


_STATES: tuple[RunState, ...] = ("preflight", "starting", "running", "stalled", "failed", "done", "stopped")
RUNS: Language[[RunEntry]] = Language(
    {
        "state": Key(f"one of {', '.join(_STATES)}", 1, one_of(_STATES, lambda entry: (entry.view.state,)),
                     words=_STATES),
        "run": Key("a run's id, run:r3f9", 1, text(lambda entry: (entry.view.id,), begins=True)),
        "node": Key("a node or nodeset, node:gpu[01-04]", 2, nodes(lambda entry: [r.node for r in entry.view.ranks]),
                    offers=lambda entry: [rank.node for rank in entry.view.ranks]),
        "lease": Key("a lease's id, lease:k3f9", 1, text(lambda entry: (entry.view.lease,), begins=True),
                     offers=lambda entry: (entry.view.lease,)),
        "target": Key("a part of the command, target:train.py", 1, text(lambda entry: (entry.view.target,))),
        "code": Key("the exit code, code>0", 1, number(lambda entry: entry.view.exit_code, parse_number, "code>0"),
                    sign=">"),
        "age": Key("how long ago it started, age<1d", 2, number(_age, parse_duration, "age<1d"), sign="<"),
        "ranks": Key("how many ranks, ranks>8", 1,
                     number(lambda entry: len(entry.view.ranks), parse_number, "ranks>8"), sign=">"),
    },
    lambda entry: (entry.view.id, entry.view.state, entry.view.lease, entry.view.target, places(entry.view),
                   *(verdict.text for verdict in entry.view.verdicts)),
    {"id": "run", "command": "target", "script": "target", "exit": "code", "nodes": "node"},
)  # fmt: skip
