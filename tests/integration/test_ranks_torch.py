"""Ranks with the real torch: the store, the process group, function targets, and their failures."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch_lab import SLEEP, parent
from tests.integration.ranks_driver import Node, carriers, launch_config
from tests.waiting import until

pytestmark = pytest.mark.torch

LIBRARY = """
import multiprocessing, os, sys
import torch
from torch import distributed

def train(*words):
    value = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(value)
    print(value.item(), words, sys.argv[1:], distributed.get_backend(), __name__, flush=True)
    print(multiprocessing.get_start_method(allow_none=True), multiprocessing.parent_process(), flush=True)
    if distributed.get_rank() == 1:
        distributed.destroy_process_group()

def one_fails():
    if distributed.get_rank() == 1:
        {}["missing"]
    distributed.barrier()
"""


def library(folder: Path, function: str, *args: str, count: int = 2) -> Node:
    (folder / "library.py").write_text(LIBRARY)
    return Node(launch_config(folder, f"library:{function}", *args, kind="function", count=count))


def test_a_function_is_called_in_the_process_group_and_may_end_it(tmp_path: Path) -> None:
    with library(tmp_path, "train", "a", "b") as node:
        assert node.call("check")["torch"] is not None
        node.start()
        assert [(e["code"], e["joined"]) for e in node.wait_ended()] == [(0, True), (0, True)]
        line = "3.0 ('a', 'b') ['a', 'b'] gloo library\nNone None\n"
        assert [node.text(rank=rank) for rank in (0, 1)] == [line, line]
        assert [node.text("err", rank) for rank in (0, 1)] == ["", ""]
        assert node.data("store") == [
            {"state": "ready", "port": node.data("store")[0]["port"], "extension_only": True, "code": None}
        ]
        assert {d["rank"] for d in node.data("joined")} == {0, 1}
        assert all(0 < d["import_s"] < 60 for d in node.data("gate"))


def test_a_failure_is_reported_with_its_place_and_its_effect_with_the_collectives(tmp_path: Path) -> None:
    with library(tmp_path, "one_fails") as node:
        node.start()
        node.wait_ended()
        lost, own = sorted(node.data("raised"), key=lambda data: data["rank"])
        assert (own["rank"], own["type"], own["function"], own.get("calls")) == (1, "KeyError", "one_fails", None)
        assert (own["file"], own["line"]) == (str(tmp_path / "library.py"), 16)
        assert own["phase"] == "train"
        assert "<gpuboard>" not in node.text("err", 1)
        assert (lost["type"], lost["called"], lost["calls"]) == ("RuntimeError", [[1, 0]], ["barrier"])


CHECKPOINT = """
import os, torch
from torch import distributed

distributed.init_process_group("gloo")
how = HOW
if how is None:
    raise SystemExit
from torch.distributed import checkpoint

class Full(checkpoint.FileSystemWriter):
    def write_data(self, *args, **kwargs):
        if os.environ["RANK"] != "0":
            raise OSError(28, "No space left on device")
        return super().write_data(*args, **kwargs)

checkpoint.save({"weights": torch.ones(3)}, storage_writer=Full("saved"), **how)
"""


def saving(folder: Path, how: str, count: int) -> list[dict[str, Any]]:
    """Return the exceptions of ranks that save a checkpoint with the options ``how``, in the order of the ranks."""
    (folder / "save.py").write_text(CHECKPOINT.replace("HOW", how))
    with Node(launch_config(folder, "save.py", count=count)) as node:
        node.start()
        node.wait_ended()
        return sorted(node.data("raised"), key=lambda told: told["rank"])


def test_an_exception_that_every_rank_gets_names_the_rank_that_failed(tmp_path: Path) -> None:
    every = saving(tmp_path, "{}", 2)
    assert len(every) == 2
    for told in every:
        assert (told["type"], told["message"]) == ("OSError", "[Errno 28] No space left on device")
        words, origin = ("raised again as", None) if told["rank"] == 1 else ("every rank got it as", 1)
        assert (told["line"], told["function"], told["origin"]) == (14, "write_data", origin)
        note = f"{words} torch.distributed.checkpoint.api.CheckpointException"
        assert told["note"] == f"{note} at {tmp_path / 'save.py'}:17"


def test_the_ranks_of_a_checkpoint_are_not_those_of_the_run(tmp_path: Path) -> None:
    """Rank 1 saves without a process group, rank 2 in one of its own: each is rank 0 there."""
    how = '[None, {"no_dist": True}, {"process_group": distributed.new_group([2])}][distributed.get_rank()]'
    assert [(told["rank"], told["type"], told["origin"], told["function"]) for told in saving(tmp_path, how, 3)] == [
        (1, "OSError", None, "write_data"),
        (2, "OSError", None, "write_data"),
    ]


STARVED = """
import os
import torch
from torch import distributed

for attempt in range(3):  # without the wait at the end two of three are aborted
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    raise SystemExit
store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
store = distributed.PrefixStore(str(attempt), store)
distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
held = distributed.group.WORLD  # as a DistributedDataParallel model holds it: its threads outlive destroy_process_group
distributed.all_reduce(torch.zeros(1))
cpus = sorted(os.sched_getaffinity(0))
mine = {cpus[int(os.environ["RANK"]) % len(cpus)]}
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, mine)
    with open(f"/proc/self/task/{thread}/comm") as file:
        if file.read() == "pt_gloo_runloop\\n":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            print("starved", flush=True)
distributed.all_reduce(torch.zeros(1))
distributed.destroy_process_group()
"""


def test_ranks_exit_with_0_while_gloo_threads_still_hold_tensors(tmp_path: Path) -> None:
    (tmp_path / "starved.py").write_text(STARVED)
    with Node(launch_config(tmp_path, "starved.py", count=2)) as node:
        node.start()
        assert [e["code"] for e in node.wait_ended(150)] == [0, 0]  # on a busy machine the threads get no CPU for long
        assert node.text("err") == ""
        assert node.text(rank=0).count("starved") >= 3


WORLDS = """
import os, sys, time, torch
from torch import distributed

world = int(sys.argv[1])
os.environ.update(RANK=str(int(os.environ["RANK"]) % world), WORLD_SIZE=str(world))
distributed.init_process_group("gloo")
distributed.all_reduce(torch.ones(1))
print("trained", flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
"""


@pytest.mark.parametrize("world", [1, 2])
def test_only_process_groups_of_all_ranks_are_compared(tmp_path: Path, world: int) -> None:
    """Ranks may be worlds of their own, such as trials of a search: their collectives have nothing in common."""
    (tmp_path / "worlds.py").write_text(WORLDS)
    with Node(launch_config(tmp_path, "worlds.py", str(world), count=2)) as node:
        node.start()
        node.wait(lambda n: all("trained" in n.text(rank=rank) for rank in (0, 1)))
        both = world == 2
        assert [told["all_ranks"] for told in node.data("joined")] == [both, both]
        assert sorted(one["rank"] for one in node.call("pace")["ranks"]) == ([0, 1] if both else [])
        (tmp_path / "end").touch()
        node.wait_ended()
        calls = ["all_reduce of float 1"] if both else []
        assert [told.get("calls", []) for told in node.data("leaving")] == [calls, calls]


def test_a_function_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("")
    with Node(launch_config(tmp_path, "library:absent", kind="function", preimport=False)) as node:
        node.start()
        node.wait_ended()
        raised = node.data("raised")[0]
        assert (raised["type"], raised["phase"]) == ("AttributeError", "import")
        assert "absent" in raised["message"]


def sleeping(folder: Path) -> Node:
    """Return a node whose store is real; its rank needs no torch."""
    (folder / "script.py").write_text(SLEEP)
    return Node(launch_config(folder, "script.py", preimport=False))


def test_the_death_of_the_store_ends_the_run(tmp_path: Path) -> None:
    with sleeping(tmp_path) as node:
        rank = node.start()["0"]
        node.wait(lambda n: "up" in n.text() and n.data("store"))
        store = [pid for pid in carriers(node.run) if pid != rank]
        assert len(store) == 1
        os.kill(store[0], signal.SIGKILL)
        assert node.wait_ended()[0]["signal"] == signal.SIGTERM
        assert node.data("store")[-1]["state"] == "died"
        assert node.data("store")[-1]["code"] == -signal.SIGKILL


def test_slurm_is_the_cause_where_its_sigterm_ends_the_store_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with sleeping(tmp_path) as node:
        rank = node.start()["0"]
        node.wait(lambda n: "up" in n.text() and n.data("store"))
        (store,) = [pid for pid in carriers(node.run) if pid != rank]
        supervisor = parent(rank)
        os.kill(supervisor, signal.SIGSTOP)  # it then finds the end of the store and its own signal at once
        os.kill(store, signal.SIGTERM)
        until(lambda: store not in carriers(node.run), "the store ends")
        os.kill(supervisor, signal.SIGTERM)
        os.kill(supervisor, signal.SIGCONT)
        node.wait_ended()
        assert ["Slurm is ending job 7" in event["reason"] for event in node.data("stopping")] == [True]
        assert [event["state"] for event in node.data("store")] == ["ready"]


def test_the_store_of_several_nodes_stays_until_stop(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('done')\n")
    config = launch_config(tmp_path, "script.py", nodes=2, world_size=2, preimport=False)
    with Node(config) as node:
        port = node.call("listen", host="127.0.0.1", port=0)["port"]
        node.call("spawn")
        node.call("go", master_addr="127.0.0.1", master_port=port, environ={})
        node.wait(lambda n: n.data("exited"))
        node.call("ping")
        socket.create_connection(("127.0.0.1", port), 5).close()
        assert node.data("ended") == []
        node.call("stop", grace_s=30, reason="every rank has ended")
        node.wait_ended(20)


def test_if_the_extension_fails_the_store_loads_all_of_torch(tmp_path: Path) -> None:
    """A torch whose C extension fails to load without the package torch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch._C' and not hasattr(sys.modules['torch'], '__file__'):\n"
        "            raise ImportError('not alone')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    (tmp_path / "script.py").write_text(
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.destroy_process_group()\n"
    )
    with Node(launch_config(tmp_path, "script.py", environ={"PYTHONPATH": str(tmp_path)})) as node:
        node.start()
        assert node.wait_ended()[0]["code"] == 0
        assert node.data("store")[0]["extension_only"] is False


def test_two_nodes_of_different_size(tmp_path: Path) -> None:
    """Two supervisors on one machine, each with an address of its own: handshakes, then ranks."""
    script = "import os\nprint(*(os.environ[name] for name in ('GROUP_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE')))\n"
    (tmp_path / "script.py").write_text(script)
    ranks = [{"rank": r, "local_rank": r % 2, "index": r, "uuid": str(r), "memory_fraction": None} for r in range(3)]
    shared: dict[str, Any] = {"nodes": 2, "world_size": 3, "preimport": False, "cuda_visible_devices": ""}
    first = launch_config(tmp_path, "script.py", ranks=ranks[:2], node_rank=0, **shared)
    second = launch_config(tmp_path, "script.py", ranks=ranks[2:], node_rank=1, listen=False, **shared)
    with Node(first) as zero, Node(second) as one:
        port = zero.call("listen", host="127.0.0.1", port=0)["port"]
        for node in (zero, one):
            node.call("check")
            node.call("spawn")
        ports = {node: node.call("probe-listen", count=2)["ports"] for node in (zero, one)}
        zero.wait(lambda n: n.data("store"))
        targets = [{"node": "zero", "address": "127.0.0.1", "port": p} for p in [port, *ports[zero]]]
        found = one.call("probe-connect", targets=targets, timeout_s=20)["results"]
        assert [(r["port"], r["result"], r["interface"]) for r in found] == [(t["port"], "ok", "lo") for t in targets]
        targets = [{"node": "one", "address": "127.0.0.1", "port": p} for p in ports[one]]
        found = zero.call("probe-connect", targets=targets, timeout_s=20)["results"]
        assert [r["result"] for r in found] == ["ok", "ok"]
        for node in (zero, one):
            node.call("go", master_addr="127.0.0.1", master_port=port, environ={"GLOO_SOCKET_IFNAME": "lo"})
        assert [e["code"] for e in one.wait_ended()] == [0]
        zero.wait(lambda n: len(n.data("exited")) == 2)
        assert [zero.text(rank=0), zero.text(rank=1), one.text(rank=2)] == ["0 2 3\n", "0 2 3\n", "1 1 3\n"]
        zero.call("stop", grace_s=30, reason="all ranks ended")
        assert [e["code"] for e in zero.wait_ended(20)] == [0, 0]
