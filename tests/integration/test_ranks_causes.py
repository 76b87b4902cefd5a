"""The cause that a failing rank reports: the innermost exception, where it was raised, and in which process."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks_driver import Node, go, launch_config, node, with_fake_torch

# Early releases of Python 3.11 raise it while they handle the cancellation, later ones from it.
_LATE = "caused by" if "from exc" in inspect.getsource(asyncio.Timeout) else "while handling"
LIBRARY = """
def call(target):
    try:
        return target()
    except Exception as error:
        raise RuntimeError(f"error in call to {target.__name__}") from error

def save():
    try:
        raise ValueError("stream error")
    finally:
        raise OSError("unexpected position")
"""
SCRIPT = """
import os, sys, traceback
sys.path.insert(0, "site-packages")
import library

def boom():
    raise ValueError("wrong\\nvalue")

def chained():
    try:
        boom()
    except ValueError as error:
        raise OSError("no data") from error

def handled():
    try:
        boom()
    except ValueError:
        {}["missing"]

def hydra():
    try:
        boom()
    except Exception:
        traceback.print_exc()
        print("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
        sys.exit(1)

def group():
    error = ValueError("of the group")
    raise ExceptionGroup("several", [error, KeyError("b")])

def text():
    try:
        boom()
    except ValueError:
        trace = traceback.format_exc()
    raise RuntimeError(f"worker failed:\\n{trace}")

def plain():
    sys.exit(4)

def wrapped():
    library.call(boom)

def usage():
    sys.exit("--data is missing")

def bare():
    assert not sys.argv

def noted():
    error = ValueError("noted")
    error.add_note("in line 12 of a.csv\\nof 90")
    raise error

def shadowed():
    open("site-packages/calendar.py", "w").close()
    import calendar
    calendar.month(2026, 1)

def grouped():
    import types
    sys.modules["torch.distributed"] = types.SimpleNamespace(is_initialized=lambda: True)  # with a FileStore
    boom()

def received():
    from multiprocessing import reduction, resource_sharer
    sharer = resource_sharer.DupFd(os.open(os.devnull, os.O_RDONLY))
    resource_sharer.stop()
    sharer.detach()

def killed():
    import multiprocessing, signal
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.kill(); os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    received()

def reaped():
    import multiprocessing, signal
    def _try_get_data():  # as torch's
        failed_workers = [multiprocessing.get_context("fork").Process(target=signal.pause)]
        failed_workers[0].start()
        failed_workers[0].kill()
        failed_workers[0].join()
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    _try_get_data()

def interrupted():
    import signal
    from multiprocessing import process
    def report(*_):
        process._children.clear()
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    class Sender:
        @property
        def pid(self):  # which is read while the report waits for its end: a signal arrives
            signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, report)
    process._children.add(Sender())
    received()

def stopped():
    import signal
    signal.raise_signal(signal.SIGINT)

def left():
    try:
        boom()
    finally:
        raise ConnectionError("closed by peer")

def cleaned():
    from contextlib import contextmanager
    class Group:
        def __enter__(self):
            pass
        def __exit__(self, *_):
            raise ConnectionError("closed by peer")
    @contextmanager
    def group():
        try:
            yield
        except Exception:
            left()
            raise
    with Group(), group():
        chained()

def retried():
    try:
        boom()
    except ValueError:
        left()

def late():
    import asyncio
    async def fetch():
        async with asyncio.timeout(0.01):
            await asyncio.sleep(600)
    asyncio.run(fetch())

def listed():
    sys.exit(["--data", 3])

def saved():
    try:
        library.save()
    except OSError:
        os.unlink("missing.tmp")
        raise

def item(_):
    chained()

def pooled():
    import concurrent.futures
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        list(pool.map(item, range(8)))

class ApiError(Exception):
    def __getattr__(self, name):  # fails for each name that it lacks
        return self.__dict__["info"][name]

def strange():
    raise ApiError("quota exceeded")

def silenced():
    try:
        boom()
    except ValueError:
        raise OSError("training failed") from None

every = (chained, handled, hydra, group, text, wrapped, plain, usage, bare, noted, shadowed, grouped, received, killed,
         interrupted, stopped, reaped, left, cleaned, retried, late,
         listed, saved, pooled, strange, silenced)
every[int(os.environ["RANK"])]()
"""


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
    """Return the script and, by rank, what each one's end reported."""
    folder = with_fake_torch(tmp_path_factory.mktemp("causes"))
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "library.py").write_text(LIBRARY)
    with node(folder, SCRIPT, count=26) as here:
        go(here)
        here.wait_ended()
        found = {data["rank"]: data for data in here.data("raised")}
        found[6] = next(data for data in here.data("leaving") if data["rank"] == 6)
        yield str(folder / "script.py"), found


BOOM = ("ValueError", "wrong\nvalue", 7, "boom")


@pytest.mark.parametrize(
    ("rank", "cause", "note"),
    [
        (0, ("OSError", "no data", 13, "chained"), "caused by ValueError: wrong at {}:7"),
        (1, ("KeyError", "'missing'", 19, "handled"), "while handling ValueError: wrong at {}:7"),
        (2, BOOM, "handled with sys.exit(1) at {}:27"),
        (3, ("ValueError", "of the group", None, None), "first of 2 in ExceptionGroup: several (2 sub-exceptions)"),
        (4, BOOM, "reported by RuntimeError for {}:38"),
        (5, BOOM, "raised again as RuntimeError: error in call to boom"),
        (7, ("SystemExit", "--data is missing", 47, "usage"), ""),
        (8, ("AssertionError", "assert not sys.argv", 50, "bare"), ""),
        (9, ("ValueError", "noted", 55, "noted"), "in line 12 of a.csv"),
        (
            10,
            ("AttributeError", "module 'calendar' has no attribute 'month'", 60, "shadowed"),
            "site-packages/calendar.py is imported in place of calendar: rename it",
        ),
        (15, ("KeyboardInterrupt", "SIGINT, of ctrl-C or another process", 106, "stopped"), ""),
        (
            20,
            ("TimeoutError", "async with asyncio.timeout(0.01):", 140, "fetch"),
            _LATE + " asyncio.exceptions.CancelledError at {}:141",
        ),
        (21, ("SystemExit", "['--data', 3]", 145, "listed"), ""),
        (
            23,
            ("OSError", "no data", 13, "chained"),
            "in a process of a pool for {0}:160, caused by ValueError: wrong at {0}:7",
        ),
    ],
)
def test_the_cause_in_a_chain_of_exceptions(
    raised: tuple[str, dict[int, dict[str, Any]]], rank: int, cause: tuple[str, str, int, str], note: str
) -> None:
    script, found = raised
    told = found[rank]
    assert (told["type"], told["message"], told["line"], told["function"], told["note"]) == (
        *cause,
        note.format(script),
    )


def test_an_exception_that_ends_the_rank_is_told_from_those_that_are_handled(
    raised: tuple[str, dict[int, dict[str, Any]]],
) -> None:
    script, found = raised
    first = {"type": "ValueError", "message": "wrong\nvalue", "file": script, "line": 7, "function": "boom"}
    assert found[17]["first"] == {**first, "chain": "ValueError: wrong\nvalue"}
    assert found[17]["chain"] == "ConnectionError: closed by peer\nValueError: wrong\nvalue"
    assert found[18]["first"]["chain"] == "OSError: no data\nValueError: wrong\nvalue"
    assert [found[rank]["first"] for rank in (0, 1, 4, 5)] == [None] * 4
    saved = [found[22]["first"][name] for name in ("type", "message", "file", "function")]
    assert saved == ["OSError", "unexpected position", script, "saved"], "not the one inside of the library"
    assert found[19]["first"]["function"] == "boom"  # that of left(), whose finally follows


def test_a_suppressed_exception_counts_but_is_not_shown(raised: tuple[str, dict[int, dict[str, Any]]]) -> None:
    told = raised[1][25]
    assert (told["type"], told["note"], told["first"]) == ("OSError", "", None)
    assert told["chain"] == "OSError: training failed\nValueError: wrong\nvalue"


def test_the_death_of_the_process_that_sent_data_is_noted(raised: tuple[str, dict[int, dict[str, Any]]]) -> None:
    assert raised[1][12]["note"] == "the process that sent the data has ended: a DataLoader worker?"
    assert re.fullmatch(r"a process of this rank \(pid \d+\) was killed by SIGKILL", raised[1][13]["note"])
    assert re.fullmatch(r"worker \(pid \d+\) was killed by SIGKILL", raised[1][16]["note"])
    assert [raised[1][rank]["own_connection"] for rank in (11, 12, 13)] == [False, True, True]


def test_an_exception_of_a_signal_handler_meanwhile_is_reported(raised: tuple[str, dict[int, dict[str, Any]]]) -> None:
    script, found = raised
    told = [found[14][name] for name in ("type", "message", "file", "function")]
    assert told == [
        "RuntimeError",
        "DataLoader worker (pid 7) is killed by signal: Killed.",
        script,
        "received",
    ]
    assert re.match(r"while handling \w+Error: ", found[14]["note"])


def test_an_exception_whose_own_methods_fail_is_reported(raised: tuple[str, dict[int, dict[str, Any]]]) -> None:
    told = [raised[1][24][name] for name in ("type", "message", "line", "function", "note")]
    assert told == ["ApiError", "quota exceeded", 167, "strange", ""]


def test_an_exit_code_of_its_own_is_no_exception(raised: tuple[str, dict[int, dict[str, Any]]]) -> None:
    script, found = raised
    assert found[6] == {"rank": 6, "code": 4, "place": f"{script}:41 in plain"}


def test_a_process_group_without_a_store_of_tcp_counts_as_initialized(
    raised: tuple[str, dict[int, dict[str, Any]]],
) -> None:
    assert {found["phase"] for rank, found in raised[1].items() if "phase" in found and rank != 11} == {"import"}
    assert raised[1][11]["phase"] == "train"


CHILDREN = """
import os, signal
import torch, torch.multiprocessing
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, at):
        if at == 3:
            if os.environ["RANK"] == "2":
                os.kill(os.getpid(), signal.SIGBUS)
            try:
                return {}[at]
            except KeyError as missing:
                raise ValueError("sample 3 is broken") from missing
        return at

def child(index):
    list(DataLoader(Data(), num_workers=1))

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        torch.multiprocessing.spawn(child)
    for _ in DataLoader(Data(), num_workers=2):
        pass
"""


@pytest.mark.torch
def test_the_cause_in_a_child_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    with Node(launch_config(tmp_path, "script.py", count=3, listen=False)) as here:
        go(here)
        here.wait_ended(120)
        script = str(tmp_path / "script.py")
        found = {data["rank"]: data for data in here.data("raised")}
        for rank in range(2):
            told = [found[rank][name] for name in ("type", "message", "file", "line", "function")]
            assert told == ["ValueError", "sample 3 is broken", script, 16, "__getitem__"]
        missing = f", caused by KeyError: 3 at {script}:14"
        assert found[0]["note"] == f"in DataLoader worker process 1 for {script}:25{missing}"
        assert found[1]["note"] == f"in DataLoader worker process 0 for {script}:24{missing}"
        # torch's signal handler raises where the rank is then, or the DataLoader does when it waits
        assert found[2]["line"] in {25, 26}
        words = f"{found[2]['message']}, {found[2]['note']}"
        assert " exited unexpectedly" in words or " is killed by signal: " in found[2]["message"]
        assert re.search(r" is killed by signal: Bus error\.|\(pid \d+\) was killed by SIGBUS", words)
        assert ", /dev/shm: " in words


PARAMETERS = """
import torch
from torch import distributed, nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.used = nn.Linear(2, 2)
        self.tied = self.used
        self.head = nn.ModuleDict({"aux": nn.Linear(2, 1)})
    def forward(self, x):
        return self.used(x)

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(Net())
for step in range(2):
    model(torch.ones(4, 2)).sum().backward()
"""


@pytest.mark.torch
def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PARAMETERS)
    with Node(launch_config(tmp_path, "script.py", listen=False)) as here:
        go(here)
        here.wait_ended(120)
        (found,) = here.data("raised")
        assert "did not receive grad for rank 0: 2 3" in found["message"]
        assert found["note"] == "parameters without a gradient: head.aux.weight, head.aux.bias"
