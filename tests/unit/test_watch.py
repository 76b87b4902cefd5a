"""The root cause of a failed run: which rank, why, the exit code; and its secondary failures."""

from __future__ import annotations

import signal

import msgspec
import pytest

from gpuboard.launch import events
from gpuboard.launch.events import (
    Exited,
    Gate,
    Joined,
    LaunchEvent,
    NodeEnded,
    Raised,
    RunNotice,
    Spawned,
    Stopping,
    Store,
)
from gpuboard.launch.failure import FailureWatch
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.launch.target import Target
from gpuboard.launch.timing import DEFAULT_TIMING
from tests.unit.test_plan import planned

BOOM = Raised(1, "ValueError", "boom", "/exp/train.py", 41, "load_batch")
RESET = Raised(2, "RuntimeError", "[gloo] Connection closed by peer [10.0.0.1]:1234")


def watch() -> FailureWatch:
    """Return the watch of ranks 0 and 1 on gpu01 and rank 2 on gpu02, all started."""
    started = FailureWatch(planned())
    for rank in (0, 1, 2):
        started.event(_node(rank), Spawned(rank, 100 + rank), 0.0)
        started.event(_node(rank), Gate(rank), 0.0)
    started.gate_opened()
    return started


def _node(rank: int) -> str:
    return "gpu02" if rank == 2 else "gpu01"


def feed(target: FailureWatch, *happened: LaunchEvent, at: float = 10.0) -> FailureWatch:
    """Process events, then evaluate once."""
    for event in happened:
        target.event(_node(getattr(event, "rank", 0)), event, at)
    target.tick(at)
    return target


def test_the_rank_whose_exception_every_rank_gets_has_failed() -> None:
    full = "OSError", "[Errno 28] No space left on device", "/exp/train.py", 41, "write_data"
    failed = feed(watch(), Raised(0, *full, origin=2), Raised(2, *full, origin=2))
    assert failed.messages == [
        "rank 2 (gpu02:7) failed: OSError: [Errno 28] No space left on device at /exp/train.py:41 in write_data"
    ]
    feed(failed, *(Exited(rank, code=1) for rank in (0, 1, 2)))
    assert failed.summary()[1:] == ["secondary failures: ranks 0-1"]
    assert feed(watch(), Raised(0, *full, origin=9)).messages[0].startswith("rank 0 (gpu01:0) failed: "), "no rank"


def test_a_connection_to_a_process_of_the_rank_is_not_one_to_another_rank() -> None:
    died = "RuntimeError", "DataLoader worker (pid 9) is killed", "/exp/train.py", 41, "main"
    note = "while handling ConnectionResetError: [Errno 104] Connection reset by peer"
    failed = feed(watch(), RESET, Raised(1, *died, note, own_connection=True))
    assert failed.cause is not None
    assert (failed.cause.rank, failed.cause.symptom) == (1, "own")
    assert feed(watch(), RESET, Raised(1, *died, note)).cause is None


def test_what_was_ending_a_rank_weighs_more_than_a_lost_connection_after_it() -> None:
    first = events.FirstRaised("ValueError", "bad record", "/exp/data.py", 7, "load", "ValueError: bad record")
    lost = "RuntimeError", "[gloo] Timed out waiting 5000ms for recv operation", "/exp/train.py", 41
    failed = feed(watch(), RESET, Raised(1, *lost, first=first))
    assert failed.messages[-1] == (
        "rank 1 (gpu01:3) failed: ValueError: bad record at /exp/data.py:7 in load, then RuntimeError: [gloo] "
        "Timed out waiting 5000ms for recv operation at /exp/train.py:41"
    )
    reset = msgspec.structs.replace(first, chain=f"{first.chain}\nOSError: Connection reset by peer")
    assert feed(watch(), Raised(1, *lost, first=reset)).cause is None, "that one is no cause either"


def test_what_was_ending_a_rank_comes_before_what_failed_while_it_ended() -> None:
    text = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726"
    first = events.FirstRaised("RuntimeError", text.partition(": ")[2], "/exp/save.py", 9, "save", text)
    twice = Raised(1, "AssertionError", "Process group cannot be None", "/exp/save.py", 11, first=first)
    assert feed(watch(), twice).messages == [
        f"rank 1 (gpu01:3) failed: {text} at /exp/save.py:9 in save, then AssertionError: Process group cannot be None "
        "at /exp/save.py:11",
        "  → torch.save could not write the whole file: is the disk or the quota full?",
    ]


def test_whether_a_program_had_an_exception_is_not_known() -> None:
    program = msgspec.structs.replace(planned(), target=Target("program", "./train"))
    failed = FailureWatch(program)
    feed(failed, Exited(1, code=1))
    assert failed.messages == ["rank 1 (gpu01:3) ended with exit code 1"]


def test_a_lost_connection_anywhere_in_the_chain_is_one() -> None:
    wrapped = "StepFailed", "step 12", "/exp/train.py", 41, "step", "caused by DistBackendError: NCCL error in: …"
    chain = "StepFailed: step 12\nDistBackendError: NCCL error in: x.cpp\nLast error: Connection reset by peer"
    assert feed(watch(), Raised(1, *wrapped)).cause is not None
    assert feed(watch(), Raised(1, *wrapped, chain=chain)).cause is None


def test_an_exception_is_reported_with_rank_node_and_place() -> None:
    failed = feed(watch(), BOOM)
    assert failed.messages == ["rank 1 (gpu01:3) failed: ValueError: boom at /exp/train.py:41 in load_batch"]
    assert (failed.stop_reason, failed.exiting) == ("rank 1 failed", [1]), "it may run its exit handlers"
    feed(failed, Exited(1, code=1))
    assert (failed.exiting, failed.exit_code()) == ([], 1)


def test_a_rank_that_raised_and_was_stopped_in_the_end_failed_with_1() -> None:
    failed = feed(watch(), BOOM)
    feed(failed, Exited(1, signal=signal.SIGTERM), Exited(0, signal=signal.SIGTERM), at=11.0)
    assert failed.exit_code() == 1, "the exit code is not that of our own SIGTERM"
    assert [failed.ranks[rank].state for rank in (0, 1)] == ["killed", "failed"]


def test_a_rank_that_handled_its_exception_with_an_exit_keeps_its_code() -> None:
    """On a busy node the rank is still ending when the run is stopped."""
    failed = feed(watch(), BOOM, events.Leaving(1, 3))
    feed(failed, Exited(1, signal=signal.SIGTERM), at=13.0)
    assert failed.exit_code() == 3


@pytest.mark.parametrize(
    ("ended", "words", "code"),
    [
        (Exited(1, code=3), "rank 1 (gpu01:3) ended with exit code 3", 3),
        (Exited(1, code=1), "rank 1 (gpu01:3) ended with exit code 1 (no uncaught exception)", 1),
        (
            Exited(1, code=139),
            "rank 1 (gpu01:3) ended with exit code 139 (128 + 11: a process that it waited for was killed by SIGSEGV)",
            139,
        ),
        (
            Exited(1, signal=11),
            "rank 1 (gpu01:3) was killed by SIGSEGV: invalid memory access in native code "
            "(a C++ or CUDA extension, or libraries of different builds), or endless recursion",
            139,
        ),
        (Exited(1, signal=64), "rank 1 (gpu01:3) was killed by SIGRTMAX", 192),
    ],
)
def test_the_run_exits_with_the_code_of_the_rank(ended: Exited, words: str, code: int) -> None:
    failed = feed(watch(), ended)
    assert (failed.messages, failed.exit_code(), failed.stop_reason) == ([words], code, "rank 1 failed")


def test_out_of_memory_is_reported_with_its_evidence() -> None:
    failed = feed(watch(), Exited(1, signal=9, oom="memory.events: oom_kill 1"))
    assert failed.messages == ["rank 1 (gpu01:3) was killed by SIGKILL: out of memory", "  memory.events: oom_kill 1"]
    assert failed.exit_code() == 137


ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def test_out_of_memory_is_possible_where_there_can_be_no_evidence() -> None:
    failed = feed(watch(), Exited(1, signal=9, oom_readable=False))
    assert failed.messages == [
        "rank 1 (gpu01:3) was killed by SIGKILL: perhaps out of memory, since neither the kernel's log nor the memory "
        "cgroup can be read; or another process sent it, such as Slurm or an administrator's"
    ]
    crashed = feed(watch(), Exited(1, signal=signal.SIGSEGV, oom_readable=False))
    assert "memory access" in crashed.messages[0]


def test_a_cuda_error_is_reported_without_torchs_general_advice() -> None:
    failing = watch()
    feed(failing, Raised(1, "torch.AcceleratorError", ILLEGAL_ACCESS, "/exp/train.py", 41))
    error = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered at /exp/train.py:41"
    assert failing.messages[0] == f"rank 1 (gpu01:3) failed: {error}"
    assert "CUDA_LAUNCH_BLOCKING=1" in failing.messages[1]


# The form of torch's message since 2.2
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.75 GiB is "
    "free. Process 4711 has 61.00 GiB memory in use. Including non-PyTorch memory, this process has 16.50 GiB memory "
    "in use. "
    "Of the allocated memory 15.25 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


def test_cuda_out_of_memory_names_the_holders_of_the_memory() -> None:
    failing = watch()
    failing.gpu_processes = {"gpu01": {4711: "bob, python"}}
    feed(failing, Raised(1, "torch.OutOfMemoryError", CUDA_OOM, "/exp/train.py", 41))
    assert failing.messages == [
        "rank 1 (gpu01:3) failed: torch.OutOfMemoryError: CUDA out of memory on cuda:0 (LOCAL_RANK is 1): "
        "asked for 2.50 GiB, 1.75 GiB of 79.25 GiB free, process 4711 (bob, python) holds 61.00 GiB, "
        "this rank 16.50 GiB at /exp/train.py:41"
    ]


def test_the_error_on_stderr_is_evidence() -> None:
    failed = watch()
    failed.note_output(1, "step 3", "last error on stderr: error: no such data set")
    feed(failed, Exited(1, code=2))
    assert failed.messages[1] == "  last error on stderr: error: no such data set"


def test_the_error_of_a_child_process_follows_the_exception_about_it() -> None:
    failed = watch()
    child = Raised(
        1, "subprocess.CalledProcessError", "Command 'prepare' returned non-zero exit status 1.", "/exp/t.py", 9
    )
    feed(failed, child)
    failed.note_end_of_output(1, "last error on stderr: KeyError: 'vocab'", "")
    feed(failed, Exited(1, code=1))
    assert (
        (failed.cause and failed.cause.evidence)
        == failed.messages[-1].strip()
        == "last error on stderr: KeyError: 'vocab'"
    )
    other = feed(watch(), BOOM)
    other.note_end_of_output(1, "last error on stderr: KeyError: 'vocab'", "")  # of a process that was not the reason
    assert (feed(other, Exited(1, code=1)).cause or child) == other.cause
    assert other.cause is not None and other.cause.evidence == ""


def test_a_lost_connection_among_processes_of_the_rank_gives_way_to_its_reason() -> None:
    failed = watch()
    failed.note_output(1, "", "last error on stderr: RuntimeError: Connection closed by peer")
    failed.note_end_of_output(1, "last error on stderr: KeyError: 'vocab'", "")
    feed(failed, Exited(1, code=1))
    assert failed.messages[1] == "  last error on stderr: KeyError: 'vocab'"


def test_what_to_try_follows_the_cause() -> None:
    failed = feed(watch(), Raised(1, "RuntimeError", "CUDA error: invalid device ordinal", "/exp/train.py", 4))
    assert failed.messages[1] == "  → the number of a rank's GPU is LOCAL_RANK, not RANK"
    handling = "while handling RuntimeError: Distributed package doesn't have NCCL built in at /exp/train.py:3"
    twice = Raised(1, "AssertionError", "Process group cannot be None", "/exp/train.py", 6, note=handling)
    assert feed(watch(), twice).messages[1].startswith("  → install a torch with CUDA")


def test_a_rank_that_initializes_its_process_group_again_is_told_to_do_it_once() -> None:
    closed = "RuntimeError", "Gloo connectFullMesh failed with Connection closed by peer", "/exp/train.py", 4
    again = Raised(1, *closed, phase="init", called=[(1, 0)], calls=["barrier"])
    assert "call init_process_group once" in later(watch(), again).messages[1]
    first = Raised(1, *closed, phase="init")
    assert "remove GLOO_SOCKET_IFNAME" in later(watch(), first).messages[1]


def test_the_last_line_of_output_is_evidence_where_there_is_no_other() -> None:
    failed = watch()
    failed.note_end_of_output(1, "", "main failed: loss is nan")
    feed(failed, Exited(1, code=1))
    assert failed.messages[1] == "  last line of its output: main failed: loss is nan"


def test_the_other_exceptions_of_a_chain_follow_the_cause() -> None:
    chained = Raised(1, "ValueError", "boom", "/exp/data.py", 4, "read", "in DataLoader worker process 1")
    words = "rank 1 (gpu01:3) failed: ValueError: boom at /exp/data.py:4 in read, in DataLoader worker process 1"
    assert feed(watch(), chained).messages == [words]


def test_a_secondary_failure_that_arrives_first_waits_for_the_root_cause() -> None:
    failed = feed(watch(), RESET, Exited(2, code=1))
    assert failed.messages == []
    feed(failed, BOOM, Exited(1, code=7), at=10.4)
    assert failed.messages[0].startswith("rank 1 (gpu01:3) failed: ValueError")
    assert failed.exit_code() == 7
    assert failed.summary()[1] == "secondary failures: rank 2"


def test_a_secondary_failure_alone_is_the_cause() -> None:
    failed = feed(watch(), RESET)
    failed.tick(10.0 + DEFAULT_TIMING.cause_wait_s)
    assert failed.messages[0].startswith("rank 2 (gpu02:7) failed: RuntimeError: [gloo] Connection closed by peer")


def lost(rank: int) -> Raised:
    """Return the exception of a rank whose peer has gone."""
    return Raised(rank, "RuntimeError", "[gloo] Connection closed by peer [10.0.0.1]:1234")


def later(target: FailureWatch, *happened: LaunchEvent) -> FailureWatch:
    """Process events and evaluate them when no other failure can arrive any more."""
    feed(target, *happened).tick(10.0 + DEFAULT_TIMING.cause_wait_s)
    return target


def test_an_exit_code_is_no_effect_of_another_rank_because_of_its_last_line() -> None:
    first = watch()
    first.note_output(1, "", "ConnectionError: Connection reset by peer")
    feed(first, Exited(1, code=9))
    assert (first.messages[0], first.exit_code()) == ("rank 1 (gpu01:3) ended with exit code 9", 9), "at once"
    raced = watch()
    raced.note_output(1, "", "ConnectionError: Connection reset by peer")
    later(raced, lost(0), Exited(1, code=9), lost(2))
    assert (raced.messages[0], raced.exit_code()) == ("rank 1 (gpu01:3) ended with exit code 9", 9)
    assert raced.summary()[0] == "root cause: rank 1 (gpu01:3) ended with exit code 9"
    slow = later(watch(), events.Leaving(1, 9), lost(0), lost(2))  # its interpreter still ends
    slow.note_output(1, "", "last line on stderr: quota used up")
    feed(slow, Exited(1, code=9), at=12.0)
    assert slow.messages == ["rank 1 (gpu01:3) ended with exit code 9", "  last line on stderr: quota used up"]
    assert slow.exit_code() == 9


def test_a_rank_that_ends_with_0_while_others_lose_their_connection_to_it_is_the_cause() -> None:
    joined = [Joined(rank) for rank in range(3)]
    failed = later(watch(), *joined, events.Leaving(1), lost(2), lost(0))
    assert failed.messages[0] == (
        "rank 1 (gpu01:3) ended with exit code 0 in the middle of training; ranks 0,2 lost the connection to it"
    )
    assert (failed.cause and failed.cause.rank, failed.exit_code()) == (1, 1)
    assert "uneven inputs" in failed.messages[2]
    for line in (
        "last line on stderr: bad batch 'label 17'",
        "last error on stderr: no such label; last line: skipped",
    ):
        swallowed = watch()
        swallowed.note_output(1, "", line)
        later(swallowed, *joined, events.Leaving(1), lost(2), lost(0))
        assert swallowed.messages[0].endswith(f"ranks 0,2 lost the connection to it; its {line}")
    uploads = Raised(0, "ConnectionResetError", "[Errno 104] Connection reset by peer", "/exp/save.py", 9)
    alone = later(watch(), *joined, Exited(1, code=0), Exited(2, code=0), uploads)
    assert alone.messages[0].startswith("rank 0 (gpu01:0) failed: ConnectionResetError"), "not from torch"
    after = watch()
    feed(after, *joined, lost(2))
    feed(after, Exited(1, code=0), at=10.5).tick(11.0)
    assert after.messages[0].startswith("rank 2 (gpu02:7) failed"), "rank 1 ended well, and later"


def test_a_lost_connection_that_is_not_torch_s_is_the_cause_whatever_arrives_first() -> None:
    server = Raised(1, "ConnectionResetError", "[Errno 104] Connection reset by peer", "/exp/data.py", 9)
    failed = later(watch(), *(Joined(rank) for rank in range(3)), lost(2), server, lost(0))
    assert failed.messages[0].startswith("rank 1 (gpu01:3) failed: ConnectionResetError: [Errno 104]")


def test_an_exit_after_a_lost_connection_that_is_not_torch_s_is_its_effect() -> None:
    refused = Raised(1, "ConnectionRefusedError", "[Errno 111] Connection refused", "/exp/log.py", 4)
    words = "rank 1 (gpu01:3) failed: ConnectionRefusedError: [Errno 111] Connection refused at /exp/log.py:4"
    assert feed(feed(watch(), refused), Exited(2, code=4), at=10.1).messages == [words]
    told = feed(watch(), refused)
    told.note_output(2, "", "RuntimeError: [gloo] Connection closed by peer")
    later(feed(told, Exited(2, code=4), at=10.1))
    assert told.messages == [words], "also if its own last line blames another rank"
    torch = Raised(1, "torch.distributed.DistNetworkError", "failed to recv, got 0 bytes")
    boom = msgspec.structs.replace(BOOM, rank=2)
    for before, lost_one, after, cause in (
        ([], refused, Exited(2, signal=signal.SIGSEGV), "was killed by SIGSEGV"),  # no effect of another failure
        ([], refused, boom, "failed: ValueError"),  # may have closed that connection
        ([events.Leaving(2, 4)], refused, Exited(2, code=4), "ended with exit code 4"),
        ([], torch, Exited(2, code=4), "ended with exit code 4"),
    ):
        failed = feed(feed(watch(), *before, at=9.9), lost_one)
        assert feed(failed, after, at=10.1).messages[0].startswith(f"rank 2 (gpu02:7) {cause}")


def test_a_rank_that_leaves_its_group_and_runs_on_is_named() -> None:
    early = feed(watch(), lost(0))
    wanted = [early.places_wanted]  # not at once: the root cause may arrive
    early.tick(10.0 + DEFAULT_TIMING.cause_wait_s / 2)
    assert [*wanted, early.places_wanted] == [None, True]
    failed = watch()
    failed.elsewhere = {1: "is at train.py:41 in export"}
    later(failed, *(Joined(rank) for rank in range(3)), lost(0), lost(2))
    assert failed.messages[0] == (
        "ranks 0,2 lost the connection to another rank, although none has ended: most likely to rank 1 (gpu01:3), "
        "which is at train.py:41 in export; has it called destroy_process_group?"
    )
    feed(failed, Exited(1, signal=15), at=12.0)
    assert (failed.cause and (failed.cause.kind, failed.cause.rank), failed.exit_code()) == (("left-group", 1), 1)
    assert failed.stop_reason == "the run failed"


def test_a_message_of_several_lines_is_printed_in_one() -> None:
    failed = feed(watch(), Raised(1, "ValueError", "bad line:\n    a,,b\n      ^"))
    assert failed.messages[0] == "rank 1 (gpu01:3) failed: ValueError: bad line: a,,b ^"


def test_ranks_that_fail_alike_are_no_secondary_failures() -> None:
    alike = [Raised(rank, "OSError", f"/data/{rank}", "/exp/train.py", 9, "load") for rank in (0, 1)]
    failed = feed(watch(), *alike, lost(2), *(Exited(rank, code=1) for rank in range(3)))
    assert failed.summary()[1:] == ["the same failure: rank 1", "secondary failures: rank 2"]
    usage = [events.Leaving(rank, 2, place="/exp/train.py:5") for rank in (0, 1)]
    left = feed(watch(), *usage, Exited(0, code=2), Exited(1, code=2), Exited(2, signal=15))
    assert left.summary() == [
        "root cause: rank 0 (gpu01:0) ended with exit code 2 (sys.exit() at /exp/train.py:5)",
        "the same failure: rank 1",
        "secondary failures: rank 2",
    ]
    done = [events.Leaving(rank, place="/exp/train.py:80") for rank in range(3)]
    crashed = feed(watch(), *done, Exited(1, signal=signal.SIGSEGV), Exited(0, signal=15), Exited(2, signal=15))
    assert crashed.summary()[1:] == ["secondary failures: ranks 0,2"]


SIZES = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2000 vs 1000. Received data size …"


def test_the_receiver_of_a_mismatch_is_not_blamed() -> None:
    failed = watch()
    failed.note_output(0, "", SIZES)
    later(failed, Exited(0, signal=6), lost(1), lost(2))
    assert failed.messages == [
        "the ranks called different collectives, or one with different shapes or dtypes: rank 0 (gpu01:0) received "
        "2000 bytes and expected 1000; this does not show which rank is wrong",
        "  rank 0 (gpu01:0) was killed by SIGABRT: native code ended the process",
    ]
    assert (failed.cause and failed.cause.rank, failed.exit_code(), failed.stop_reason) == (None, 1, "the run failed")
    feed(failed, Exited(1, code=1), Exited(2, code=1), at=12.0)
    assert failed.summary()[1] == "other ranks that failed: ranks 1-2"


def test_an_error_of_the_script_with_words_of_a_mismatch_is_its_own() -> None:
    sizes = Raised(1, "ValueError", "data size doesn't match: 10 images, 9 labels", "/exp/data.py", 7, "load")
    failed = feed(watch(), RESET, sizes)
    assert failed.messages == [
        "rank 1 (gpu01:3) failed: ValueError: data size doesn't match: 10 images, 9 labels at /exp/data.py:7 in load"
    ]


def test_the_collectives_that_ranks_called_until_a_mismatch_are_compared() -> None:
    closed = "RuntimeError", "[gloo] Connection closed by peer [10.0.0.1]:1234", "/exp/train.py", 12, "main"
    before = [(4, 0), (5, 1)]
    first = Raised(1, *closed, called=before, calls=["all_reduce of float 8", "all_gather of float 6"])
    second = Raised(2, *closed, called=before, calls=["all_reduce of float 8", "all_gather of float 4"])
    failed = watch()
    failed.note_output(0, "", SIZES)
    later(failed, Exited(0, signal=6), first, second)
    assert failed.messages[0] == (
        "the ranks differ at collective 5: rank 1 (gpu01:3) called all_gather of float 6 at train.py:12 in main; rank "
        "2 (gpu02:7) called all_gather of float 4 at train.py:12 in main; rank 0 (gpu01:0) received 2000 bytes and "
        "expected 1000"
    )
    alike = watch()
    alike.note_output(0, "", SIZES)
    later(alike, Exited(0, signal=6), first, msgspec.structs.replace(first, rank=2))
    assert alike.messages[0] == (
        "ranks 1-2 called all_gather of float 6 (collective 5) at train.py:12 in main; rank 0 (gpu01:0) received 2000 "
        "bytes and expected 1000; most likely wrong: rank 0 (gpu01:0)"
    )
    assert (alike.cause and alike.cause.rank, alike.exit_code()) == (0, 1)
    uneven = [msgspec.structs.replace(first, rank=rank, called=[(5, 0)], calls=["all_to_all"]) for rank in (1, 2)]
    splits = watch()
    splits.note_output(0, "", SIZES)
    later(splits, Exited(0, signal=6), *uneven)
    assert "does not show which rank is wrong" in splits.messages[0], "their sizes may differ"
    one_left = watch()
    one_left.note_output(0, "", SIZES)
    later(one_left, Exited(0, signal=6), first, lost(2))
    assert one_left.messages[0] == (
        "the ranks called different collectives, or one with different shapes or dtypes: rank 0 (gpu01:0) received "
        "2000 bytes and expected 1000; rank 1 (gpu01:3) called all_gather of float 6 (collective 5) at "
        "train.py:12 in main; this does not show which rank is wrong"
    )


COUNTS = "DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
SIZES_OF = (
    "[{}]: params[0] in this process with sizes [12, 16] appears not to match sizes of the same param in process 0."
)


@pytest.mark.parametrize(
    ("errors", "words", "suspect"),
    [
        (
            {0: COUNTS.format(0, 4, 1, 6), 2: COUNTS.format(2, 4, 1, 6)},
            "ranks 0,2: 4 parameters; rank 1: 6 parameters; most likely wrong: rank 1 (gpu01:3)",
            1,
        ),
        ({0: COUNTS.format(0, 4, 1, 6)}, "rank 0: 4 parameters; rank 1: 6 parameters", None),
        (
            {1: SIZES_OF.format(1)},
            "rank 1: sizes [12, 16] of parameter 0; ranks 0,2: other sizes; most likely wrong: rank 1 (gpu01:3)",
            1,
        ),
        (
            {1: SIZES_OF.format(1), 2: SIZES_OF.format(2)},
            "ranks 1-2: sizes [12, 16] of parameter 0; rank 0: other sizes; most likely wrong: rank 0 (gpu01:0)",
            0,
        ),
    ],
)
def test_the_rank_with_another_model_is_named(errors: dict[int, str], words: str, suspect: int | None) -> None:
    failed = later(watch(), *(Raised(rank, "RuntimeError", text) for rank, text in errors.items()))
    assert failed.messages[0] == f"the ranks have different models: {words}"
    assert (failed.cause and failed.cause.rank) == suspect


def test_a_run_that_ends_while_its_collectives_are_compared_has_failed() -> None:
    failed = watch()
    failed.comparing = True
    failed.note_output(0, "", SIZES)
    feed(failed, Exited(0, signal=6), lost(1), lost(2))
    feed(failed, Exited(1, code=1), Exited(2, code=1))
    assert failed.cause is None, "the comparison may show which rank is wrong"
    for node in ("gpu01", "gpu02"):
        failed.event(node, NodeEnded(0), 10.0)
    failed.tick(10.0)
    assert failed.messages[0].startswith("the ranks called different collectives")
    assert failed.exit_code() == 1


def test_a_rank_that_waited_until_the_timeout_is_not_blamed() -> None:
    joined = [Joined(rank) for rank in range(3)]
    waits = [Raised(n, "RuntimeError", "[gloo] Timed out waiting 20000ms for recv operation") for n in range(3)]
    some = later(watch(), *joined, waits[0], lost(2))
    assert some.messages[0] == (
        "rank 0 waited in a collective until its timeout: rank 1 did not take part in time, or called a different "
        "collective"
    )
    seen = watch()
    seen.elsewhere = {1: "is at train.py:41 in load_batch"}
    later(seen, *joined, waits[0], waits[2])
    assert seen.messages[0] == (
        "ranks 0,2 waited in a collective until its timeout: no answer from rank 1 (gpu01:3), which is at train.py:41 "
        "in load_batch"
    )
    feed(seen, Exited(1, signal=15), at=12.0)
    assert (seen.cause and (seen.cause.rank, seen.cause.node), seen.exit_code()) == ((1, "gpu01"), 1)
    all_of_them = later(watch(), *joined, *waits)
    assert all_of_them.messages[0].endswith(": the ranks called different collectives, or cannot reach each other")
    absent = later(watch(), Joined(0), Joined(2), waits[0])
    assert absent.messages[0].endswith(": rank 1 had not connected to the process group")
    handle = later(watch(), *joined, Raised(0, "RuntimeError", "Operation timed out!", "/exp/train.py", 9))
    assert handle.cause is not None
    assert handle.cause.kind == "timeout"
    upload = feed(watch(), Raised(0, "requests.Timeout", "operation timed out!", "/exp/train.py", 9))
    assert (upload.cause and upload.cause.kind) == "raised", "its own"


def test_a_rank_that_was_not_there_when_init_timed_out_is_named_with_its_place() -> None:
    waits = Raised(0, "torch.distributed.DistStoreError", "wait timeout after 4000ms, keys: /0/1", phase="init")
    failed = watch()
    failed.elsewhere = {1: "is at train.py:3 in load_data"}
    later(failed, Joined(0), Joined(2), waits)
    assert failed.messages[0] == (
        "rank 0 waited in init_process_group until its timeout: no answer from rank 1 (gpu01:3), which is at "
        "train.py:3 in load_data; it has not connected to the process group"
    )
    stopped = (Exited(rank, signal=signal.SIGTERM) for rank in (1, 2))
    feed(failed, Exited(0, code=1), *stopped, at=12.0)
    assert failed.summary()[1:] == [], "ranks 1 and 2 were stopped"


def test_secondary_failures_in_the_output_of_others_are_marked() -> None:
    failed = feed(watch(), BOOM)
    assert failed.mark(2, "RuntimeError: Connection reset by peer") == "(caused by rank 1) "
    assert failed.mark(2, "loss 0.3") == ""
    assert failed.mark(1, "Connection reset by peer") == ""
    assert watch().mark(2, "Connection reset by peer") == "", "nothing has failed yet"


def test_exit_0_is_no_failure_and_rank_0_may_end_much_later() -> None:
    done = feed(watch(), *(Joined(rank) for rank in range(3)), Exited(1, code=0), Exited(2, code=0))
    done.tick(3600.0)
    assert (done.cause, done.finished, done.running) == (None, False, [0])
    feed(done, Exited(0, code=0), NodeEnded(), at=3601.0)
    done.event("gpu02", NodeEnded(), 3601.0)
    assert (done.finished, done.emptied, done.exit_code()) == (True, True, 0)


def test_exit_0_before_init_is_a_failure_as_soon_as_another_waits() -> None:
    failed = feed(watch(), Exited(1, code=0))
    assert failed.cause is None, "no rank waits for it yet"
    feed(failed, Joined(0))
    assert failed.messages == [
        "rank 1 (gpu01:3) ended with exit code 0 before init_process_group; rank 0 would wait for it until the timeout"
    ]
    assert (failed.stop_reason, failed.exit_code()) == ("rank 1 failed", 1)


def test_exit_0_before_init_is_none_where_the_group_does_not_need_the_rank() -> None:
    done = feed(watch(), Exited(1, code=0), Joined(0, all_ranks=False), Joined(2, all_ranks=False))
    done.tick(3600.0)
    assert (done.cause, done.messages) == (None, [])


def test_of_a_rank_without_a_channel_no_exception_and_no_init_is_known() -> None:
    """As after os.execv, or where the script has closed all descriptors."""
    cut = events.Disconnected(1)
    failed = feed(watch(), cut, Exited(1, code=1))
    assert failed.messages == ["rank 1 (gpu01:3) ended with exit code 1"]
    done = feed(watch(), cut, Joined(0), Joined(2), Exited(1, code=0))
    assert (done.cause, done.messages) == (None, [])
    lost = feed(watch(), cut, Joined(0), Joined(2), Exited(1, code=0), RESET)
    lost.tick(20.0)
    assert lost.messages[0].startswith("rank 1 (gpu01:3) ended with exit code 0 in the middle of training; rank 2 lost")


def test_a_failure_after_the_end_of_the_script_is_told_from_one_in_it() -> None:
    late = "after its script had ended with 0: by an exit handler (atexit), a thread or native code"
    failed = feed(watch(), events.Leaving(1), Exited(1, code=9))
    assert failed.messages[0] == f"rank 1 (gpu01:3) ended with exit code 9, {late}"
    assert failed.exit_code() == 9
    crashed = feed(watch(), events.Leaving(1), Exited(1, signal=signal.SIGSEGV))
    assert crashed.messages[0].endswith(late)
    own = feed(watch(), events.Leaving(1, code=4, place="/exp/train.py:9"), Exited(1, code=4))
    assert own.messages == ["rank 1 (gpu01:3) ended with exit code 4 (sys.exit() at /exp/train.py:9)"]
    other = feed(watch(), events.Leaving(1, place="/exp/train.py:9"), Exited(1, code=9))
    assert other.messages[0] == f"rank 1 (gpu01:3) ended with exit code 9, {late}", "that of sys.exit() was 0"


def test_ranks_that_never_join_are_independent() -> None:
    done = feed(watch(), *(Exited(rank, code=0) for rank in range(3)))
    assert (done.cause, done.exit_code()) == (None, 0)


def test_a_lost_node_is_a_failure_of_the_run() -> None:
    failed = watch()
    failed.node_lost("gpu02", "connection lost: reset", 10.0)
    failed.tick(10.0)
    assert failed.messages == ["gpu02: connection lost: reset"]
    assert (failed.exit_code(), failed.running) == (1, [0, 1])
    assert failed.ranks[2].state == "lost"


def test_a_node_that_has_ended_is_not_lost() -> None:
    done = feed(watch(), Exited(2, code=0))
    done.event("gpu02", NodeEnded(), 10.0)
    done.node_lost("gpu02", "the agent ended", 10.1)
    done.tick(10.1)
    assert done.cause is None


def test_the_death_of_the_store_ends_the_run() -> None:
    failed = feed(watch(), Store("died", code=-9))
    assert failed.messages == ["gpu01: the rendezvous store of the ranks died: killed by SIGKILL"]
    assert failed.stop_reason is not None


def test_a_node_that_stops_itself_is_the_cause_of_what_follows() -> None:
    failed = feed(watch(), Stopping("no ping from `gpuboard launch` for 60 s"), Exited(0, signal=15))
    assert failed.messages == ["gpu01: no ping from `gpuboard launch` for 60 s; its ranks are being stopped"]
    assert failed.exit_code() == 1
    assert failed.cause is not None
    assert failed.cause.kind == "node-stopped"


def test_a_stop_is_no_failure_of_a_rank() -> None:
    stopped = watch()
    stopped.stop("ctrl-C", 10.0)
    feed(stopped, *(Exited(rank, signal=15) for rank in range(3)))
    assert (stopped.stop_reason, stopped.summary(), stopped.cause and stopped.cause.kind) == ("ctrl-C", [], "stopped")
    assert {view.state for view in stopped.ranks.values()} == {"killed"}


def test_a_forwarded_signal_is_named_as_such() -> None:
    failed = watch()
    failed.note_forwarded(signal.SIGTERM)
    feed(failed, Exited(0, signal=15))
    assert failed.messages == [], "it may be the node that ends"
    failed.tick(10.0 + DEFAULT_TIMING.cause_wait_s)
    assert failed.messages == ["rank 0 (gpu01:0) was killed by SIGTERM (forwarded by `gpuboard launch`)"]
    assert failed.exit_code() == 143


@pytest.mark.parametrize("all_of_them", [False, True])
def test_ranks_that_get_the_sigterm_of_their_node_first_are_not_the_root_cause(all_of_them: bool) -> None:
    failed = feed(watch(), *(Exited(rank, signal=15) for rank in ((0, 1, 2) if all_of_them else (0,))))
    failed.event("gpu02", Stopping("Slurm is ending job 7"), 10.5)
    failed.tick(10.5)
    assert failed.messages == ["gpu02: Slurm is ending job 7; its ranks are being stopped"]


def test_a_store_that_gets_the_sigterm_of_its_node_first_is_not_the_root_cause() -> None:
    failed = feed(watch(), Store("died", code=-15))
    failed.event("gpu01", Stopping("Slurm is ending job 7"), 10.5)
    failed.tick(10.5)
    assert failed.messages == ["gpu01: Slurm is ending job 7; its ranks are being stopped"]


def test_what_sigterm_ended_is_the_cause_when_all_nodes_are_empty() -> None:
    failed = feed(watch(), *(Exited(rank, signal=15) for rank in range(3)))
    failed.event("gpu01", NodeEnded(0), 10.1)
    failed.event("gpu02", NodeEnded(0), 10.1)
    failed.tick(10.1)
    assert failed.messages == [
        "rank 0 (gpu01:0) was killed by SIGTERM: another process sent it, such as Slurm, an administrator's or one of "
        "the script"
    ]


def test_events_about_the_ranks_of_another_node_are_ignored() -> None:
    watched = watch()
    watched.event("gpu02", Exited(0, code=1), 10.0)
    watched.event("gpu02", Exited(17, code=1), 10.0)
    watched.tick(20.0)
    assert (watched.cause, watched.exits) == (None, {})


def test_notices_and_processes_that_cannot_be_killed_are_reported() -> None:
    watched = watch()
    watched.event("gpu02", RunNotice("Traceback:\n  File x\nBoom: 1\n"), 10.0)
    watched.event("gpu02", NodeEnded(left=2), 10.0)
    assert watched.messages == [
        "gpu02: Traceback:",
        "gpu02:   File x",
        "gpu02: Boom: 1",
        "gpu02: processes in uninterruptible sleep (driver or file system) cannot be killed yet: 2",
    ]


def test_control_characters_are_removed() -> None:
    failed = feed(watch(), Raised(1, "E\x1b[2J", "a\nb\x07\u202e", "f\x00.py", 1))
    assert failed.messages == ["rank 1 (gpu01:3) failed: E[2J: a b at f.py:1"]


def test_events_are_typed_and_unknown_ones_ignored() -> None:
    assert events.decode("exited", b'{"rank": 1, "code": 0, "signal": null, "new_key": 1}') == Exited(1, code=0)
    assert events.decode("from-the-future", b"{}") is None
    with pytest.raises(Exception, match="Expected `int`"):
        events.decode("exited", b'{"rank": "1"}')


def test_ranks_as_text() -> None:
    assert [rank_words(r) for r in ([3], [0, 1, 2, 5], [7, 6])] == ["rank 3", "ranks 0-2,5", "ranks 6-7"]
