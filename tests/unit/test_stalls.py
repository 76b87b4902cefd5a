"""Verdicts on runs in which nothing moves, and when they are given."""

from __future__ import annotations

import msgspec
import pytest

from gpuboard.launch.stalls.evidence import (
    ChildProcess,
    Collective,
    FileLock,
    Inspection,
    ProcessGroup,
    RankEvidence,
    StackFrame,
    StoreProcess,
    Thread,
)
from gpuboard.launch.stalls.inspect import completed
from gpuboard.launch.stalls.verdict import Stall, diagnose, explain
from gpuboard.launch.stalls.waits import RankGroup, RankStatus, activity
from gpuboard.launch.stalls.watch import StallTiming, StallWatch

TORCH = "/venv/lib/python3.11/site-packages/torch/"
REDUCE = [
    StackFrame("all_reduce", f"{TORCH}distributed/distributed_c10d.py", 3252),
    StackFrame("step", "/exp/train.py", 55),
]
INIT = [
    StackFrame("init_process_group", f"{TORCH}distributed/distributed_c10d.py", 1700),
    StackFrame("<module>", "/exp/train.py", 9),
]
LOAD = [StackFrame("load_batch", "/exp/train.py", 41), StackFrame("<module>", "/exp/train.py", 70)]
LOADER = [
    StackFrame("poll", "/usr/lib/python3.11/multiprocessing/connection.py", 257),
    StackFrame("_try_get_data", f"{TORCH}utils/data/dataloader.py", 1300),
    StackFrame("main", "/exp/train.py", 30),
]
WORKER = [
    StackFrame("__getitem__", "/exp/data.py", 12),
    StackFrame("fetch", f"{TORCH}utils/data/_utils/fetch.py", 52),
    StackFrame("_worker_loop", f"{TORCH}utils/data/_utils/worker.py", 350),
]


def status(rank: int, quiet_s: float | None = 6.0, **known: object) -> RankStatus:
    """Return a rank on gpu01 (0, 1) or gpu02 that has joined."""
    of = {"joined": True, "quiet_s": quiet_s, **known}
    return msgspec.convert({"rank": rank, "node": f"gpu0{rank // 2 + 1}", "index": rank % 2, **of}, RankStatus)


def group(enqueued: int, completed: int, op: str = "all_reduce", size: int = 4, name: str = "0") -> ProcessGroup:
    """Return a process group whose newest collective is number ``enqueued``."""
    before = [Collective(seq, "all_reduce", [[4]], ["Float"]) for seq in range(max(1, enqueued - 3), enqueued)]
    return ProcessGroup(name, enqueued, completed, [*before, Collective(enqueued, op, [[size]], ["Float"])])


def seen(rank: int, stack: list[StackFrame], *groups: ProcessGroup, **facts: object) -> RankEvidence:
    """Return the evidence of one rank."""
    base = RankEvidence(rank, 100 + rank, "S", stack=stack, collectives=list(groups))
    return msgspec.structs.replace(base, **facts)


def verdict_or_none(*evidence: RankEvidence, **statuses: RankStatus) -> Stall | None:
    """Return the diagnosis of ranks 0 to n-1."""
    return diagnose({one.rank: activity(statuses.get(f"rank{one.rank}") or status(one.rank), one) for one in evidence})


def verdict(*evidence: RankEvidence, **statuses: RankStatus) -> Stall:
    """Return the diagnosis of ranks 0 to n-1, which there must be."""
    found = verdict_or_none(*evidence, **statuses)
    assert found is not None
    return found


WAITING = seen(0, REDUCE, group(12, 11))


def test_ranks_that_do_not_wait_for_each_other_are_no_stall() -> None:
    assert verdict_or_none(seen(0, LOAD, group(11, 11)), seen(1, LOAD, group(11, 11))) is None


def test_the_rank_that_all_others_wait_for_is_named_with_its_place() -> None:
    found = verdict(WAITING, seen(1, LOAD, group(11, 11)), seen(2, REDUCE, group(12, 11)))
    assert (found.kind, found.ranks, found.node, found.sure) == ("stall-behind", (1,), "gpu01", False)
    assert found.text(12.2) == (
        "waiting 12 s for rank 1 (gpu01:1), which is at train.py:41 in load_batch; "
        "ranks 0,2 wait in all_reduce (collective 12) at train.py:55 in step"
    )


def test_the_place_in_an_installed_package_is_not_that_in_a_library_below_it() -> None:
    """Training code is a package in site-packages in many containers."""
    package = "/venv/lib/python3.11/site-packages/vision/"
    waits = [REDUCE[0], StackFrame("step", f"{package}train.py", 55)]
    sleeps = [StackFrame("wait", "/usr/lib/python3.11/threading.py", 320), StackFrame("load", f"{package}data.py", 41)]
    assert verdict(seen(0, waits, group(12, 11)), seen(1, sleeps, group(11, 11))).words == (
        "for rank 1 (gpu01:1), which is at data.py:41 in load; "
        "rank 0 (gpu01:0) waits in all_reduce (collective 12) at train.py:55 in step"
    )


def test_a_busy_rank_is_shown_with_its_use_of_the_cpu() -> None:
    busy = seen(1, LOAD, group(11, 11), cpu=0.97, gil=True)
    found = verdict(WAITING, busy, rank1=status(1, None))
    assert found.cpu == pytest.approx(0.97)
    assert "is at train.py:41 in load_batch (97 % of a core, holding the GIL)" in found.words


@pytest.mark.parametrize(
    "line",
    [
        "[W1123 16:03:45.6 socket.cpp:200] retrying",
        "[rank1]:[W1123 16:03:45.6 socket.cpp:200] retrying",
        "[rank1]:W1123 16:03:45.635000 1904 torch/_logging/_internal.py:1345] [0/0] Profiler record function",
        "train.py:3: UserWarning: deprecated",
    ],
)
def test_a_warning_is_not_quoted(line: str) -> None:
    found = verdict(WAITING, seen(1, LOAD, group(11, 11)), rank1=status(1, last_error=line))
    assert "stderr" not in found.words


def test_a_swallowed_exception_is_quoted() -> None:
    found = verdict(WAITING, seen(1, LOAD, group(11, 11)), rank1=status(1, last_error="ValueError: bad label"))
    assert "; its last line on stderr: ValueError: bad label" in found.words


JOIN = [
    StackFrame("_wait_for_tstate_lock", "/usr/lib/python3.11/threading.py", 1132),
    StackFrame("join", "/usr/lib/python3.11/threading.py", 1112),
    StackFrame("<module>", "/exp/train.py", 90),
]


def test_the_thread_that_a_rank_waits_for_is_named() -> None:
    threads = [Thread("Thread-1 (log)", LOAD)]
    found = verdict(WAITING, seen(1, JOIN, group(11, 11), threads=threads))
    assert found.words.startswith(
        "for rank 1 (gpu01:1), which is at train.py:90; its thread Thread-1 (log) is at train.py:41 in load_batch; rank"
    )
    found = verdict(WAITING, seen(1, LOAD, group(11, 11), threads=threads))
    assert "its thread" not in found.words, "its main thread does not wait for it"


def test_a_collective_is_at_the_place_of_the_thread_that_called_it() -> None:
    found = verdict(
        seen(0, JOIN, group(12, 11, name="1"), threads=[Thread("Thread-1 (log)", REDUCE)]),
        seen(1, LOAD, group(11, 11, name="1")),
    )
    assert found.words.endswith("waits in all_reduce (collective 12 of group 1) at train.py:55 in step")


def test_a_clause_that_may_follow_an_exception_is_named() -> None:
    after = "in the finally of train.py:23 (an exception would be printed after it)"
    found = verdict(WAITING, seen(1, LOAD, group(11, 11), clause="finally of train.py:23"))
    assert f"which is at train.py:41 in load_batch, {after}; rank 0" in found.words
    found = verdict(WAITING, seen(1, REDUCE, group(12, 11, op="barrier"), clause="finally of train.py:23"))
    assert found.words.endswith(f"rank 1 (gpu01:1) called barrier of float 4 at train.py:55 in step, {after}")


def test_tasks_that_all_wait_are_the_reason_of_an_idle_event_loop() -> None:
    loop = [
        StackFrame("select", "/usr/lib/python3.11/selectors.py", 468),
        StackFrame("_run_once", "/usr/lib/python3.11/asyncio/base_events.py", 1884),
        *LOAD[1:],
    ]
    assert "; no task of its asyncio loop can go on: " in verdict(WAITING, seen(1, loop, group(11, 11))).words


@pytest.mark.parametrize(
    ("lock", "words", "remedy"),
    [
        (
            FileLock("/data/.lock", 100, "python"),
            "it waits for the lock on /data/.lock, held by rank 0 (gpu01:0)",
            "release",
        ),
        (
            FileLock("/data/.lock", 7, "flock"),
            "the lock on /data/.lock, held by process 7 (flock)",
            "fuser -v /data/.lock",
        ),
        (FileLock("", 8), "it waits for the lock on a file, held by process 8, which has ended", "fuser -v FILE"),
        (FileLock("/a.db", 9, "python", waits=False), "; /a.db is locked by process 9 (python)", "fuser -v /a.db"),
        (FileLock("/a.db", 0), "held by a process that cannot be seen", "fuser"),
    ],
)
def test_the_holder_of_the_lock_that_a_rank_waits_for_is_named(lock: FileLock, words: str, remedy: str) -> None:
    found = verdict(WAITING, seen(1, LOAD, group(11, 11), lock=lock))
    assert words in found.words
    assert remedy in found.remedy


@pytest.mark.parametrize("module", ["subprocess.py", "multiprocessing/popen_fork.py"])
def test_the_program_that_a_rank_waits_for_is_named(module: str) -> None:
    stack = [StackFrame("_wait", f"/usr/lib/python3.11/{module}", 2000), *LOAD]
    found = verdict(WAITING, seen(1, stack, group(11, 11), children=[ChildProcess(7, "ffmpeg", "S")]))
    assert "which is at train.py:41 in load_batch, waiting for its process 7 (ffmpeg); rank 0" in found.words


SUBPROCESS = [StackFrame("_try_wait", "/usr/lib/python3.11/subprocess.py", 2000), StackFrame("run", "/exp/run.py", 8)]


def parent(rank: int, *children: list[StackFrame]) -> RankEvidence:
    """Return the evidence of a rank that waits for processes with these stacks."""
    return seen(rank, SUBPROCESS, children=[ChildProcess(70 + i, "python", "S", c) for i, c in enumerate(children)])


def test_a_rank_whose_process_waits_for_that_of_another_rank_waits_for_it() -> None:
    alone = {f"rank{rank}": status(rank, joined=False) for rank in (0, 1)}
    found = verdict(parent(0, INIT), parent(1, LOAD), **alone)
    assert (found.kind, found.ranks) == ("stall-absent", (1,))
    assert found.words == (
        "for rank 1 (gpu01:1), which has not called init_process_group: it is at run.py:8 in run, waiting for its "
        "process 70 (python), which is at train.py:41 in load_batch; rank 0 (gpu01:0) waits in init_process_group in "
        "its process 70 at train.py:9"
    )


def test_a_process_that_others_of_its_rank_wait_for_is_named() -> None:
    found = verdict(parent(0, INIT, LOAD), parent(1, INIT))
    assert (found.kind, found.ranks) == ("stall-behind", (0,))
    assert found.words == (
        "for process 71 of rank 0 (gpu01:0), which is at train.py:41 in load_batch; its process 70 waits in "
        "init_process_group at train.py:9"
    )


def test_processes_of_ranks_that_all_wait_lack_others() -> None:
    found = verdict(parent(0, INIT, INIT), parent(1, REDUCE))
    assert (found.kind, found.ranks) == ("stall-network", (0, 1))
    assert found.words.startswith(
        "in init_process_group at train.py:9; all_reduce at train.py:55 in step: processes that ranks 0-1 started"
    )


def test_workers_of_a_loader_and_busy_ranks_wait_for_no_other_rank() -> None:
    assert verdict_or_none(parent(0, WORKER), parent(1, WORKER)) is None
    busy = {"rank0": status(0, None), "rank1": status(1, None)}
    assert verdict_or_none(parent(0, INIT, LOAD), parent(1, INIT), **busy) is None


def test_a_store_that_a_script_opens_itself_is_named() -> None:
    alone = {f"rank{rank}": status(rank, joined=False) for rank in (0, 1)}
    source = 'store = dist.TCPStore("127.0.0.1", 29871)'
    found = verdict(seen(0, LOAD, source=source), seen(1, LOAD, source=source), **alone)
    assert found.words.startswith("in TCPStore at train.py:41 in load_batch: ranks 0-1 have not connected to the store")


def test_a_rank_that_waits_for_its_loader_is_traced_to_the_worker() -> None:
    children = [ChildProcess(7, "python", "S", WORKER)]
    found = verdict(WAITING, seen(1, LOADER, group(11, 11), children=children))
    assert "which waits for its DataLoader at train.py:30 in main, whose worker 7 is at data.py:12" in found.words


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ([StackFrame("readinto", "/usr/lib/python3.11/socket.py", 720), *WORKER], "whose worker 7 is at data.py:12"),
        (
            [StackFrame("select", "/usr/lib/python3.11/selectors.py", 415), WORKER[-1]],
            "its DataLoader at train.py:30 in main; ",
        ),
    ],
    ids=["in the standard library, called by the dataset", "idle"],
)
def test_the_place_of_a_worker_is_in_the_dataset(inside: list[StackFrame], words: str) -> None:
    forked = StackFrame("main", "/exp/train.py", 30)  # a forked process has its parent's frames below its own
    found = verdict(
        WAITING, seen(1, LOADER, group(11, 11), children=[ChildProcess(7, "python", "S", [*inside, forked])])
    )
    assert words in found.words


def test_an_absent_rank_is_named_while_the_others_initialize() -> None:
    found = verdict(seen(0, INIT), seen(1, LOAD), rank1=status(1, joined=False))
    assert found.kind == "stall-absent"
    assert "for rank 1 (gpu01:1), which has not called init_process_group: it is at train.py:41" in found.words


def test_a_rank_that_still_imports_torch_is_waited_for_longer() -> None:
    found = verdict(seen(0, INIT), seen(1, LOAD), rank1=status(1, joined=False, importing=True))
    assert found.importing
    assert "is still importing torch" in found.words


def test_a_rank_whose_wrapper_has_not_started_python_is_not_called_importing() -> None:
    wrapper = seen(1, [], name="sleep", stack_error="not a Python process")
    found = verdict(seen(0, INIT), wrapper, rank1=status(1, joined=False, importing=True))
    assert "rank 1 (gpu01:1), which has not started Python: its process still runs sleep" in found.words
    assert "--wrap" in found.remedy


def test_a_rank_that_has_replaced_its_python_is_named() -> None:
    error = "Error: Failed to find python version from target process"
    found = verdict(WAITING, seen(1, [], name="sleep", stack_error=error, collectives=None))
    assert found is not None
    assert "rank 1 (gpu01:1), which has replaced its Python by sleep" in found.words
    unreadable = verdict(WAITING, seen(1, [], name="pt_main_thread", stack_error="Permission denied", collectives=None))
    assert unreadable is not None
    assert "rank 1 (gpu01:1), which is at an unknown place" in unreadable.words


@pytest.mark.parametrize(("state", "words"), [("T", "is stopped (SIGSTOP"), ("D", "in uninterruptible sleep in nfs")])
def test_a_stopped_or_blocked_rank_comes_first(state: str, words: str) -> None:
    found = verdict(WAITING, seen(1, LOAD, group(11, 11), state=state, wchan="nfs_wait"), seen(2, LOAD, group(11, 11)))
    assert (found.kind, found.ranks, found.sure) == ("stall-stopped", (1,), state == "T")
    assert words in found.words


def test_a_rank_that_ended_is_the_one_that_is_waited_for() -> None:
    ended = status(1, ended=True, exit_code=0, exit_place="train.py:9 in main")
    found = diagnose({0: activity(status(0), WAITING), 1: activity(ended, None)})
    assert found is not None
    assert found.kind == "stall-ended"
    assert found.words.endswith("; sys.exit() was called at train.py:9 in main")
    assert "for rank 1 (gpu01:1), which ended with exit code 0 and takes part in no further collective" in found.words


def test_ranks_that_call_different_collectives_differ_and_the_minority_is_suspected() -> None:
    other = seen(1, REDUCE[:0] + LOAD, group(12, 11, "broadcast"))
    found = verdict(WAITING, other, seen(2, REDUCE, group(12, 11)))
    assert (found.kind, found.ranks, found.sure) == ("stall-mismatch", (1,), True)
    assert "the ranks differ at collective 12: ranks 0,2 called all_reduce of float 4 at train.py:55" in found.words


@pytest.mark.parametrize(("op", "suspects"), [("all_reduce", (0, 1)), ("scatter", None), ("all_to_all_single", None)])
def test_shapes_matter_where_they_must_be_equal(op: str, suspects: tuple[int, ...] | None) -> None:
    found = verdict(seen(0, REDUCE, group(12, 11, op)), seen(1, REDUCE, group(12, 11, op, 5)))
    assert (found.kind, found.ranks) == (("stall-mismatch", suspects) if suspects else ("stall-network", (0, 1)))


def test_ranks_that_agree_are_kept_apart_by_the_network() -> None:
    found = verdict(WAITING, seen(1, REDUCE, group(12, 11)), seen(2, REDUCE, group(12, 11)))
    assert found.kind == "stall-network"
    assert "so the network between gpu01, gpu02 may not deliver" in found.words


def test_ranks_that_initialize_their_process_group_again_get_the_reason() -> None:
    found = verdict(seen(0, INIT, group(4, 4)), seen(1, REDUCE, group(1, 0)), seen(2, INIT, group(4, 4)))
    assert found.words == (
        "in init_process_group at train.py:9: ranks 0,2 had a process group before, whose addresses are still in the "
        "store of this run"
    )
    assert (found.ranks, found.remedy.partition(";")[0]) == ((0, 2), "call init_process_group once in each process")


def test_ranks_that_look_for_another_store_get_the_reason() -> None:
    alone = {f"rank{rank}": status(rank, joined=False) for rank in (0, 1)}
    connect = [StackFrame("_create_c10d_store", f"{TORCH}distributed/rendezvous.py", 189), *INIT]
    found = verdict(seen(0, connect), seen(1, connect), **alone)
    assert found.words == "in init_process_group at train.py:9: ranks 0-1 have not connected to the store of this run"
    assert found.remedy.startswith("leave MASTER_ADDR and MASTER_PORT as they are")
    found = verdict(seen(0, INIT), seen(1, INIT), **alone)
    assert found.words == (
        "in init_process_group at train.py:9: ranks 0-1 take part; they use different stores, or the connections "
        "between the ranks on gpu01 may not deliver"
    ), "whether a program has connected is not known"


def test_groups_used_in_different_order_are_a_cycle() -> None:
    first = seen(0, REDUCE, group(4, 4), group(2, 1, name="a"), group(1, 1, name="b"))
    second = seen(1, REDUCE, group(4, 4), group(1, 1, name="a"), group(2, 1, name="b"))
    found = verdict(first, second)
    assert found.words.startswith("because the ranks wait for each other: rank 0 (gpu01:0) waits in all_reduce")


def test_ranks_that_wait_for_a_cycle_are_no_part_of_it() -> None:
    barrier = group(1, 0, op="barrier")
    found = verdict(
        seen(0, REDUCE, barrier, group(5, 5, name="a")),
        seen(1, REDUCE, barrier, group(5, 5, name="a")),
        seen(2, REDUCE, group(1, 0), group(5, 5, name="b")),  # in the group of all ranks, not in its own
        seen(3, REDUCE, group(6, 5, name="b")),
    )
    assert (found.kind, found.ranks) == ("stall-mismatch", (2, 3))
    assert found.words == (
        "because the ranks wait for each other: rank 2 (gpu02:0) waits in all_reduce (collective 1) at train.py:55 in "
        "step for rank 3; rank 3 (gpu02:1) waits in all_reduce (collective 6 of group b) at train.py:55 in step for "
        "rank 2"
    )


NEW_GROUP = [StackFrame("new_group", f"{TORCH}distributed/distributed_c10d.py", 5600), *LOAD]


def test_a_rank_that_alone_makes_a_group_waits_for_the_others() -> None:
    found = verdict(WAITING, seen(1, NEW_GROUP, group(11, 11)))
    assert (found.kind, found.ranks) == ("stall-mismatch", (0, 1))
    assert found.words == (
        "because the ranks wait for each other: rank 0 (gpu01:0) waits in all_reduce (collective 12) at train.py:55 in "
        "step for rank 1; rank 1 (gpu01:1) waits in new_group at train.py:41 in load_batch for rank 0"
    )
    assert found.remedy.startswith("every rank must call new_group with the same ranks")
    assert verdict(bare(0), seen(1, NEW_GROUP)).words == found.words.replace(" (collective 12)", "")
    found = verdict(seen(0, NEW_GROUP), seen(1, LOAD), rank1=status(1, joined=False))
    assert found.words.startswith("for rank 1 (gpu01:1), which is at train.py:41"), "it has called init_process_group"


def test_a_stopped_store_is_named_while_ranks_need_it() -> None:
    def found(state: str, *evidence: RankEvidence) -> Stall | None:
        activities = {one.rank: activity(status(one.rank), one) for one in evidence}
        return diagnose(activities, StoreProcess("gpu01", 41, state))

    both = seen(0, NEW_GROUP, group(11, 11)), seen(1, NEW_GROUP, group(11, 11))
    stopped = found("T", *both)
    assert stopped is not None
    assert (stopped.kind, stopped.node, stopped.sure) == ("stall-stopped", "gpu01", True)
    assert stopped.words == (
        "for the store of this run, process 41 on gpu01, which is stopped (SIGSTOP); ranks 0-1 wait in new_group at "
        "train.py:41 in load_batch"
    )
    assert stopped.remedy == "to continue it: kill -CONT 41 on gpu01"
    running = found("S", *both)
    assert running is not None
    assert running.kind == "stall-network"
    training = found("T", seen(0, REDUCE, group(12, 11)), seen(1, LOAD, group(11, 11)))
    assert training is not None
    assert training.kind == "stall-behind", "collectives do not need the store"


def transfer(rank: int, call: str, peer: int | None, *groups: ProcessGroup) -> RankEvidence:
    """Return a rank that waits in ``send`` or ``recv``."""
    stack = [StackFrame(call, f"{TORCH}distributed/distributed_c10d.py", 2799), StackFrame("step", "/exp/pipe.py", 8)]
    return seen(rank, stack, *groups, peer=peer)


def test_ranks_that_wait_for_a_message_lead_to_the_rank_that_sends_none() -> None:
    done = group(3, 3)
    found = verdict(transfer(0, "send", 1, done), seen(1, LOAD, done), transfer(2, "recv", 1, done))
    assert (found.kind, found.ranks) == ("stall-behind", (1,))
    assert found.words == (
        "for rank 1 (gpu01:1), which is at train.py:41 in load_batch; "
        "rank 0 (gpu01:0) waits in send to rank 1 at pipe.py:8 in step; "
        "rank 2 (gpu02:0) waits in recv from rank 1 at pipe.py:8 in step"
    )


def test_receives_without_a_send_are_a_cycle() -> None:
    found = verdict(*(transfer(rank, "recv", (rank + 1) % 3) for rank in range(3)))
    assert (found.kind, found.ranks, found.sure) == ("stall-mismatch", (0, 1, 2), True)
    assert "rank 1 (gpu01:1) waits in recv from rank 2 at pipe.py:8 in step; rank 2" in found.words
    assert found.remedy.startswith("every recv needs a send")


def test_a_message_that_was_sent_and_does_not_arrive_is_the_network() -> None:
    found = verdict(transfer(0, "send", 1), transfer(1, "recv", 0))
    assert found.kind == "stall-network"


@pytest.mark.parametrize(
    ("source", "peers", "words"),
    [
        (
            "request.wait()",
            (None, None),
            "because every rank waits for another one: rank 0 (gpu01:0) waits in `request.wait()` at",
        ),
        (
            "request.wait()",
            (None, None, "barrier"),
            "because every rank waits for another one: rank 0 (gpu01:0) waits in `request.wait()` at train.py:41 in "
            "load_batch; rank 1 (gpu01:1) waits in `request.wait()` at train.py:41 in load_batch; "
            "rank 2 (gpu02:0) waits in barrier in all_reduce (collective 4) at train.py:55 in step",
        ),
        ("os.wait()", (None, None), None),
    ],
)
def test_a_handle_of_a_transfer_is_known_by_its_line(
    source: str, peers: tuple[str | None, ...], words: str | None
) -> None:
    found = verdict_or_none(
        *(
            seen(rank, REDUCE, group(4, 3, op=op)) if op else seen(rank, LOAD, group(3, 3), source=source)
            for rank, op in enumerate(peers)
        )
    )
    assert (found.words[: len(words)] if found and words else found) == words


@pytest.mark.parametrize(
    ("joins", "words"),
    [
        ([(0, 3), (1, 3)], "rank 0 (gpu01:0) passed rank=0 and world_size=3; rank 1 (gpu01:1) passed rank=1"),
        ([(0, 2), (0, 2)], "rank 0 (gpu01:0) passed rank=0 and world_size=2; rank 1 (gpu01:1) passed rank=0"),
        ([(0, 2), (1, 2)], None),
    ],
    ids=["more than the run has", "LOCAL_RANK on two nodes", "right"],
)
def test_numbers_with_which_no_group_can_form_are_named(joins: list[tuple[int, int]], words: str | None) -> None:
    found = verdict(*(seen(rank, INIT, joins_as=pair) for rank, pair in enumerate(joins)))
    if words is None:
        assert found.kind == "stall-network"
    else:
        assert (found.kind, found.ranks) == ("stall-mismatch", (0, 1))
        assert found.words.startswith(f"in init_process_group at train.py:9: the run has 2 ranks; {words}")


def test_a_rank_that_writes_a_checkpoint_waits_for_no_rank() -> None:
    stack = [StackFrame("_write_item", f"{TORCH}distributed/checkpoint/filesystem.py", 400), *LOAD]
    found = verdict(WAITING, seen(1, stack, group(11, 11)))
    assert (found.kind, found.ranks) == ("stall-behind", (1,))


def test_ranks_that_broadcast_from_different_ranks_differ() -> None:
    stack = [StackFrame("broadcast", f"{TORCH}distributed/distributed_c10d.py", 3151), *REDUCE[1:]]
    found = verdict(*(seen(rank, stack, group(12, 11, "broadcast"), peer=rank // 2) for rank in range(3)))
    assert (found.kind, found.ranks, found.sure) == ("stall-mismatch", (0, 1, 2), True)
    assert found.words == (
        "because the ranks differ in src or dst of broadcast (collective 12): "
        "ranks 0-1 named rank 0 at train.py:55 in step; rank 2 (gpu02:0) named rank 1 at train.py:55 in step"
    )


def test_without_a_flight_recorder_the_stacks_decide() -> None:
    bare = [msgspec.structs.replace(one, collectives=None) for one in (WAITING, seen(1, LOAD))]
    found = verdict(*bare)
    assert found.text(5) == (
        "waiting 5 s for rank 1 (gpu01:1), which is at train.py:41 in load_batch; "
        "rank 0 (gpu01:0) waits in all_reduce at train.py:55 in step"
    )


def bare(rank: int, call: str = "all_reduce", line: int = 55) -> RankEvidence:
    """Return a rank that waits in a collective, without a flight recorder."""
    stack = [StackFrame(call, REDUCE[0].file, 3252), StackFrame("step", "/exp/train.py", line)]
    return seen(rank, stack, collectives=None)


@pytest.mark.parametrize(("call", "line"), [("broadcast", 60), ("all_reduce", 60)])
def test_without_a_flight_recorder_different_calls_are_named(call: str, line: int) -> None:
    program = {f"rank{rank}": status(rank, joined=False) for rank in range(3)}
    found = verdict(bare(0), bare(1, call, line), bare(2), **program)
    assert (found.kind, found.ranks, found.sure) == ("stall-mismatch", (0, 1, 2), False)
    assert found.words == (
        "because the ranks wait in different calls, as far as their stacks show; "
        "ranks 0,2 wait in all_reduce at train.py:55 in step; "
        f"rank 1 (gpu01:1) waits in {call} at train.py:60 in step"
    )
    assert found.remedy.startswith("every rank must call the same collectives in the same order")
    assert "if they do, check the network" in found.remedy


def test_a_rank_without_a_flight_recorder_is_compared_with_the_others_by_its_stack() -> None:
    found = verdict(WAITING, bare(1, "broadcast"))
    assert (found.kind, found.ranks) == ("stall-mismatch", (0, 1))


def test_arguments_are_called_equal_only_if_they_were_compared() -> None:
    found = verdict(bare(0), bare(1))
    assert found.kind == "stall-network"
    assert found.words == (
        "in all_reduce at train.py:55 in step: ranks 0-1 take part; without a flight recorder shapes and dtypes are "
        "unknown: they differ, or the connections between the ranks on gpu01 may not deliver"
    )
    for bare_ones in ((seen(0, INIT), seen(1, INIT)), (bare(0, "barrier"), bare(1, "barrier"))):
        assert "take part, so the connections" in verdict(*bare_ones).words


def test_collectives_are_compared_in_every_group_in_which_ranks_wait() -> None:
    pairs = (group(5, 4, name="a"), group(5, 4, name="a"), group(7, 6, name="b"), group(7, 6, "broadcast", name="b"))
    found = verdict(*(seen(rank, REDUCE, one) for rank, one in enumerate(pairs)))
    assert (found.kind, found.ranks) == ("stall-mismatch", (2, 3))


def test_the_picture_joins_ranks_that_do_the_same_and_wait_for_the_same_ranks() -> None:
    evidence = [WAITING, seen(1, LOAD, group(11, 11)), seen(2, REDUCE, group(12, 11))]
    found = explain([status(rank) for rank in range(3)], {one.rank: one for one in evidence})
    assert found.groups == [
        RankGroup([0, 2], "collective", "wait in all_reduce (collective 12) at train.py:55 in step", [1]),
        RankGroup([1], "code", "idle at train.py:41 in load_batch", suspect=True),
    ]
    assert found.picture == [
        "ranks 0,2: wait in all_reduce (collective 12) at train.py:55 in step, for rank 1",
        "rank 1 (gpu01:1): idle at train.py:41 in load_batch",
    ]


def test_a_rank_that_waits_for_its_threads_after_its_script_is_told_apart() -> None:
    stack = [StackFrame("_shutdown", "/usr/lib/python3.11/threading.py", 1590)]
    found = explain([status(0)], {0: seen(0, stack)})
    assert found.picture == [
        "rank 0 (gpu01:0): its script has ended, and it waits for its other threads at threading.py:1590 in _shutdown"
    ]


def test_ranks_that_are_all_named_by_a_verdict_are_no_suspects() -> None:
    first = seen(0, REDUCE, group(4, 4), group(2, 1, name="a"), group(1, 1, name="b"))
    second = seen(1, REDUCE, group(4, 4), group(1, 1, name="a"), group(2, 1, name="b"))
    found = explain([status(0), status(1)], {0: first, 1: second})
    assert found.verdict is not None
    assert [(one.ranks, one.waits_for, one.suspect) for one in found.groups] == [([0], [1], False), ([1], [0], False)]


class Run:
    """A run of two ranks; rank 0 waits in a collective for rank 1."""

    def __init__(self, suspect: RankEvidence, quiet: bool, load: float = 0.0, waiting: RankEvidence = WAITING) -> None:
        self.waiting = waiting
        self.watch = StallWatch(on_gpus=False, timing=StallTiming())
        self.suspect = suspect
        self.quiet = quiet
        self.load = load
        self.computes = False  # rank 1 has other local variables at every inspection
        self.steps = False  # its script goes on
        self.calls = False  # another function now and then
        self.watch.quiet(0, 3.0, load, 3.0)
        if quiet:
            self.watch.quiet(1, 3.0, load, 3.0)

    def follow(self, until: float, start: float = 3.0, took: float = 0.0) -> float | None:
        """Inspect whenever that is due, which takes ``took`` seconds; return the time of the first message."""
        now = start
        while now < until:
            if self.watch.due(now):
                begun, now = now, now + took
                statuses = [status(0, self.watch.quiet_s(0, now)), status(1, self.watch.quiet_s(1, now))]
                suspect = msgspec.structs.replace(self.suspect, variables=round(10 * now) if self.computes else 0)
                if self.steps:
                    suspect = msgspec.structs.replace(suspect, script=round(10 * now))
                if self.calls and round(10 * now) % 2:
                    suspect = msgspec.structs.replace(suspect, stack=[StackFrame("pad", "/exp/data.py", 3), *LOAD])
                self.watch.inspected(statuses, [Inspection([self.waiting, suspect], self.load)], now, begun)
                if self.watch.messages:
                    return now
            now += 0.1
        return None


IDLE = seen(1, LOAD, group(11, 11), cpu=0.0)
BUSY = seen(1, LOAD, group(11, 11), cpu=0.95)


def test_an_idle_rank_is_reported_after_seven_seconds_also_on_a_busy_node() -> None:
    for load in (0.0, 8.0):
        assert Run(IDLE, quiet=True, load=load).follow(60) == pytest.approx(7.8, abs=0.8)


@pytest.mark.parametrize("took", [0.0, 0.4, 0.9])
def test_a_verdict_is_given_when_it_is_due_however_long_inspections_take(took: float) -> None:
    assert Run(IDLE, quiet=True).follow(60, took=took) == pytest.approx(7.2, abs=0.3)
    assert Run(BUSY, quiet=False).follow(60, took=took) == pytest.approx(7.4 + took, abs=0.5)


def test_ranks_that_wait_for_their_gpus_in_the_same_collective_are_given_time() -> None:
    """The CPU has called the collective of NCCL before the GPU has computed what it needs."""
    spinning = [seen(rank, LOAD, group(12, 11), cpu=1.0, gil=False, active=True) for rank in range(2)]
    run = Run(spinning[1], quiet=False, waiting=spinning[0])
    assert run.follow(60) == pytest.approx(40, abs=2)
    assert "stalled" not in run.watch.messages[0]


def test_a_rank_that_was_idle_before_the_others_waited_for_it_is_reported_sooner() -> None:
    run = Run(IDLE, quiet=False)
    run.watch.quiet(1, 30.0, 0.0, 3.0)
    assert run.follow(60) == pytest.approx(4.5, abs=0.5)


def test_a_busy_rank_is_reported_later_and_later_still_if_cpus_are_scarce() -> None:
    assert Run(BUSY, quiet=False).follow(60) == pytest.approx(7.4, abs=1.1)
    starved = msgspec.structs.replace(BUSY, cpu=0.3)
    assert Run(starved, quiet=False, load=4.0).follow(90) == pytest.approx(24.5, abs=3)


def test_a_rank_that_computes_before_the_first_collective_is_given_time() -> None:
    preparing, first = seen(1, LOAD, cpu=0.95), seen(0, REDUCE, group(1, -1))
    assert Run(preparing, quiet=False, waiting=first).follow(39) is None
    assert Run(preparing, quiet=False, waiting=first).follow(60) == pytest.approx(41, abs=2)


@pytest.mark.parametrize("releases_gil", [False, True])
def test_a_rank_that_computes_for_long_is_named_without_calling_it_a_stall(releases_gil: bool) -> None:
    run = Run(msgspec.structs.replace(BUSY, gil=not releases_gil), quiet=False)
    run.computes = run.calls = not releases_gil
    reported = run.follow(100)
    assert reported == pytest.approx(41, abs=2)
    assert run.watch.messages[0].startswith("waiting 40 s for rank 1 (gpu01:1), which is at train.py:41 in load_batch")
    assert run.watch.report is not None
    assert run.watch.report.computes
    while not run.watch.messages[0].startswith("stalled: "):
        run.watch.messages.clear()
        assert reported is not None
        reported = run.follow(1000, start=reported + 1)
    assert reported == pytest.approx(340, abs=40)


def test_a_rank_that_computes_in_one_function_without_calls_is_named_sooner() -> None:
    for facts in ({}, {"stack": [StackFrame("load_batch", "/exp/train.py", 42), *LOAD[1:]]}):
        run = Run(msgspec.structs.replace(BUSY, gil=True, **facts), quiet=False)
        run.computes = True
        assert run.follow(60) == pytest.approx(10.5, abs=1.0)
        assert run.watch.messages[0].startswith("waiting 10 s for rank 1 (gpu01:1), which is at train.py:4"), "no stall"
    for others in ({"gil": False}, {"moved_bytes": 10}, {"children": [ChildProcess(7)]}, {"stack": LOADER}):
        run = Run(msgspec.structs.replace(BUSY, **{"gil": True, **others}), quiet=False)
        run.computes = True
        assert run.follow(39) is None, others
    preparing = Run(seen(1, LOAD, cpu=0.95, gil=True), quiet=False, waiting=seen(0, REDUCE, group(1, -1)))
    preparing.computes = True
    assert preparing.follow(39) is None


def test_a_data_loader_worker_that_computes_in_one_function_without_calls_is_named_sooner() -> None:
    worker = ChildProcess(7, "python", "R", WORKER, gil=True)
    idle = ChildProcess(8, "python", "S", WORKER[1:], gil=False)
    waits = msgspec.structs.replace(BUSY, stack=LOADER, gil=False, children=[worker, idle])
    run = Run(waits, quiet=False)
    assert run.follow(60) == pytest.approx(10.5, abs=1.0)
    assert "whose worker 7 is at data.py:12 in __getitem__" in run.watch.messages[0]
    assert run.watch.messages[0].startswith("waiting 10 s for rank 1 (gpu01:1)"), "no stall"
    for others in ({"moved_bytes": 10}, {"children": [idle]}, {"stack": LOAD}):
        assert Run(msgspec.structs.replace(waits, **others), quiet=False).follow(39) is None, others


def test_ranks_that_are_all_idle_elsewhere_are_reported() -> None:
    run = Run(IDLE, quiet=True, waiting=seen(0, LOAD, group(11, 11)))
    assert run.follow(100) == pytest.approx(90, abs=2)
    assert run.watch.messages[0].startswith("stalled: waiting 90 s while no rank computes, reads or writes: ranks 0-1")


@pytest.mark.parametrize("below", [False, True])
def test_ranks_that_wait_for_a_connection_are_reported_soon_and_once(below: bool) -> None:
    source = "server.connect(address)"
    child = ChildProcess(7, "python", "S", LOAD, source)
    waiting = seen(0, SUBPROCESS, children=[child]) if below else seen(0, LOAD, source=source)
    run = Run(IDLE, quiet=True, waiting=waiting)
    assert run.follow(100) == pytest.approx(10, abs=1)
    assert "waits for a connection to be opened at train.py:41" in run.watch.messages[0]
    run.watch.messages.clear()
    assert run.follow(38, start=10.5) is None, "neither repeated nor called over"


def test_the_end_of_ranks_after_sigterm_is_no_progress() -> None:
    run = Run(IDLE, quiet=True)
    assert run.follow(60)
    run.watch.messages.clear()
    run.watch.ending = True
    run.watch.inspected([status(0, None), status(1, ended=True)], [Inspection([seen(0, LOAD)])], 20.0)
    assert run.watch.messages == []


def test_a_deadlock_is_a_stall_although_the_script_went_on_before() -> None:
    run = Run(seen(1, NEW_GROUP, group(11, 11)), quiet=True)
    run.steps = True
    assert run.follow(60) == pytest.approx(4.5, abs=1)
    assert run.watch.messages[0].startswith("stalled: waiting ")
    assert "because the ranks wait for each other" in run.watch.messages[0]


def test_a_rank_that_writes_is_given_time() -> None:
    writing = msgspec.structs.replace(BUSY, moved_bytes=10**6)
    assert Run(writing, quiet=False).follow(39) is None
    assert Run(writing, quiet=False).follow(60) == pytest.approx(41, abs=2)


def test_a_rank_that_sleeps_in_each_step_of_its_script_is_given_time() -> None:
    run = Run(IDLE, quiet=True)
    run.steps = True
    assert run.follow(60) == pytest.approx(41, abs=2)
    assert run.watch.messages[0].startswith("waiting 40 s for rank 1"), "no stall"
    run = Run(msgspec.structs.replace(IDLE, source="time.sleep(0.5)"), quiet=True)
    run.steps = True
    assert run.follow(60) == pytest.approx(10.5, abs=1.0), "it tries again and again"
    assert run.watch.messages[0].startswith("waiting 10 s for rank 1"), "no stall"
    run = Run(IDLE, quiet=True)
    run.computes = True  # only variables of a library change, as in a wait with a timeout
    assert run.follow(60) == pytest.approx(7.8, abs=0.8)


def test_a_rank_that_sleeps_while_another_of_its_threads_prints_is_reported_soon() -> None:
    sleeping = msgspec.structs.replace(IDLE, active=False, gil=False, cpu=0.03, moved_bytes=200)
    for load in (0.0, 8.0):
        run = Run(sleeping, quiet=False, load=load)
        assert run.follow(60) == pytest.approx(7.8, abs=0.8)
        assert run.watch.messages[0].startswith("stalled: ")
    works = {"moved_bytes": 10**5}, {"cpu": 0.9}, {"active": True}
    for facts in works:
        assert Run(msgspec.structs.replace(sleeping, **facts), quiet=False).follow(39) is None, facts
    run = Run(sleeping, quiet=False)
    run.computes = True
    assert run.follow(39) is None, "its variables change"


def test_a_rank_in_uninterruptible_sleep_is_given_time() -> None:
    assert Run(msgspec.structs.replace(IDLE, state="D"), quiet=True).follow(60) == pytest.approx(16, abs=1)


def test_a_stopped_rank_is_reported_at_once() -> None:
    assert Run(msgspec.structs.replace(IDLE, state="T"), quiet=True).follow(60) == pytest.approx(4.5, abs=0.5)


def test_the_end_of_a_stall_is_reported_and_the_place_is_given_more_time_afterwards() -> None:
    run = Run(IDLE, quiet=True)
    assert run.follow(60)
    assert run.watch.report is not None
    run.watch.messages.clear()
    run.watch.quiet(0, None, 0.0, 20.0)
    assert run.watch.due(20.0)
    statuses = [status(0, None), status(1, None)]
    moving = [seen(0, LOAD, group(13, 13)), seen(1, LOAD, group(13, 13))]
    run.watch.inspected(statuses, [Inspection(moving)], 20.0)
    assert run.watch.messages == ["the run continues after 20 s"]
    run.watch.messages.clear()
    run.watch.quiet(1, None, 0.0, 21.0)
    run.watch.quiet(0, 3.0, 0.0, 100.0)
    run.watch.quiet(1, 3.0, 0.0, 100.0)
    assert run.follow(300, start=100.0) == pytest.approx(137, abs=5), "twice as long as the wait before"


def test_a_node_that_could_not_be_inspected_ends_no_stall() -> None:
    run = Run(IDLE, quiet=True)
    assert run.follow(60)
    report = run.watch.report
    run.watch.messages.clear()
    run.watch.inspected([status(0), status(1)], [Inspection([WAITING])], 20.0)
    assert (run.watch.report, run.watch.messages) == (report, [])


def test_what_a_rank_called_is_kept_where_it_ends_before_its_node_is_inspected_again() -> None:
    """A node without py-spy is inspected twice: the ranks of a run that fails end in between."""
    first = Inspection([seen(rank, [], group(4, 3)) for rank in range(3)])
    ended = RankEvidence(0, 100)
    mute = seen(1, REDUCE, collectives=None)
    second = completed(Inspection([ended, mute], pyspy=True), first)
    assert [(one.rank, one.collectives, one.stack) for one in second.ranks] == [
        (0, [group(4, 3)], []),
        (1, [group(4, 3)], REDUCE),
        (2, [group(4, 3)], []),
    ]
    assert second.pyspy
