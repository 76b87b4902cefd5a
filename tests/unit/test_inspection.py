"""What an inspection reads in a trace of torch's flight recorder."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from gpuboard.agent.launch.rank.recorder import called
from gpuboard.agent.launch.watch import pace
from gpuboard.agent.launch.watch.inspection import _clause, _collectives, _variables, process_groups

# As torch 2.13 writes them with gloo: after a send, a receive and a broadcast that waits. op_id and pg_status count
# transfers too, which have no entries.
ENTRY = {
    "process_group": ["0", "default_pg"],
    "pg_id": 0,
    "is_p2p": False,
    "input_dtypes": ["Float"],
    "state": "scheduled",
    "time_created_ns": 5_000_000,
}
TRACE = {
    "entries": [
        {
            **ENTRY,
            "collective_seq_id": 1,
            "op_id": 1,
            "profiling_name": "gloo:barrier",
            "input_sizes": [],
            "retired": True,
        },
        {
            **ENTRY,
            "collective_seq_id": 2,
            "op_id": 4,
            "profiling_name": "gloo:broadcast",
            "input_sizes": [[8]],
            "retired": False,
        },
    ],
    "pg_status": {"0": {"last_completed_collective": "1", "last_enqueued_collective": "4"}},
}


def test_collectives_are_numbered_without_sends_and_receives() -> None:
    """Ranks of a pipeline have different numbers of those, and would seem to be behind each other."""
    (found,) = process_groups(TRACE)
    assert (found["name"], found["enqueued"], found["completed"]) == ("0", 2, 1)
    assert [entry["seq"] for entry in found["recent"]] == [1, 2]


# As torch 2.13 writes them with NCCL: an all_reduce, two of them at once, which wait, and a send. The operations of a
# coalesced one have no state of their own.
NCCL_ENTRY = {**ENTRY, "input_sizes": [[4]], "retired": False}
NCCL = {
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {**NCCL_ENTRY, "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "completed"},
        {**NCCL_ENTRY, "collective_seq_id": 2, "profiling_name": "nccl:all_reduce"},
        {**NCCL_ENTRY, "collective_seq_id": 2, "profiling_name": "nccl:all_reduce"},
        {**NCCL_ENTRY, "collective_seq_id": 2, "profiling_name": "nccl:coalesced", "input_sizes": []},
        {
            **NCCL_ENTRY,
            "process_group": ["1", "pipeline"],
            "pg_id": 1,
            "is_p2p": True,
            "collective_seq_id": 0,
            "profiling_name": "nccl:send 0->1",
        },
    ],
}  # fmt: skip


class Recorders:
    """A worker server like torch's: a trace for each handler, 404 for others."""

    def __init__(self, path: Path, traces: dict[str, object]) -> None:
        self.path = str(path)
        self._traces = traces
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            with client:
                handler = client.recv(4096).split()[1].decode().rpartition("/")[2]
                found = self._traces.get(handler)
                status = "404 Not Found" if found is None else "200 OK"
                client.sendall(f"HTTP/1.0 {status}\r\n\r\n{json.dumps(found)}".encode())


@pytest.mark.parametrize(
    ("traces", "groups"),
    [
        ({"fr_trace_json": TRACE}, [("0", 2, 1)]),
        ({"fr_trace_json": {"version": "2.10"}, "dump_nccl_trace_json": NCCL}, [("0", 2, 1)]),
        ({"fr_trace_json": TRACE, "dump_nccl_trace_json": NCCL}, [("0 (gloo)", 2, 1), ("0", 2, 1)]),
        ({"dump_nccl_trace_json": NCCL}, [("0", 2, 1)]),
        ({"fr_trace_json": {"version": "2.10", "entries": []}}, None),
        ({"fr_trace_json": ["another format"]}, None),
        ({}, None),
    ],
)
def test_the_collectives_of_gloo_and_nccl_are_read(
    tmp_path: Path, traces: dict[str, object], groups: list[tuple[str, int, int]] | None
) -> None:
    server = Recorders(tmp_path / "socket", traces)
    found = _collectives(os.getpid(), server.path, time.monotonic() + 5)
    assert groups == (None if found is None else [(g["name"], g["enqueued"], g["completed"]) for g in found])
    (rank,) = pace.look([(0, os.getpid(), server.path)])["ranks"]
    assert [group["name"] for group in rank["groups"] or ()] == [name for name, _, _ in groups or ()]


def test_collectives_of_nccl_that_are_made_at_once_count_as_one() -> None:
    (found,) = process_groups(NCCL)
    assert [(entry["seq"], entry["op"]) for entry in found["recent"]] == [(1, "all_reduce"), (2, "coalesced")]
    assert called(NCCL) == {"called": [[1, 0], [2, 1]], "calls": ["all_reduce of float 4", "coalesced"]}


def test_ranks_that_send_and_receive_with_nccl_number_collectives_differently() -> None:
    """A batch of transfers counts as a collective, of those ranks only that are part of it."""
    send = {**NCCL_ENTRY, "is_p2p": True, "collective_seq_id": 3, "profiling_name": "nccl:coalesced"}
    trace = {"entries": [*NCCL["entries"], send]}
    assert process_groups(trace) == []
    assert called(trace)["called"] == []


def test_progress_of_the_script_is_told_from_that_of_a_library_that_waits() -> None:
    """A wait with a timeout counts down in its own variables."""

    def script(step: str, line: int, remaining: str) -> object:
        library = {"name": "wait", "filename": "/usr/lib/python3.11/selectors.py", "line": 4}
        own = {"name": "evaluate", "filename": "/exp/train.py", "line": line}
        frames = [(library, {"remaining": remaining}), (own, {"step": step})]
        return _variables(
            [{**frame, "locals": [{"name": k, "repr": v} for k, v in values.items()]} for frame, values in frames]
        )["script"]

    assert script("3", 41, "5.0") == script("3", 41, "4.2")
    assert len({script("3", 41, "5.0"), script("4", 41, "5.0"), script("3", 42, "5.0")}) == 3


SCRIPT = """
def fit():
    try:
        train()
    except KeyError:
        report()
    finally:
        try:
            close()
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    ("line", "clause"), [(4, ""), (6, "except of fit.py:3"), (9, "finally of fit.py:3"), (11, "except of fit.py:8")]
)
def test_a_clause_that_may_follow_an_exception_is_found(tmp_path: Path, line: int, clause: str) -> None:
    script = tmp_path / "fit.py"
    script.write_text(SCRIPT)
    library = {"function": "wait", "file": threading.__file__, "line": 1}
    called = {"function": "fit", "file": str(script), "line": line}
    assert _clause([library, called, {"function": "<module>", "file": "<stdin>", "line": 1}]) == clause
