"""What an inspection reads in a trace of torch's flight recorder."""

from __future__ import annotations

from gpuboard.agent.launch.watch.inspection import _variables, process_groups

# As torch 2.13 writes them with gloo: after a send, a receive and a broadcast that waits. op_id and pg_status count
# transfers too, which have no entries.
ENTRY = {
    "process_group": ["0", "default_pg"],
    "pg_id": 0,
    "is_p2p": False,
    "input_dtypes": ["Float"],
    "state": "scheduled",
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
