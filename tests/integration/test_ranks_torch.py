"""Ranks with the real torch: the store, the process group, function targets, and what goes wrong with them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ranks_driver import Node, carriers, launch_config

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

def one_fails():
    if distributed.get_rank() == 1:
        {}["missing"]
    distributed.barrier()

def ends_it_itself():
    distributed.destroy_process_group()
"""


def library(folder: Path, function: str, *args: str, **changes: Any) -> Node:
    (folder / "library.py").write_text(LIBRARY)
    return Node(launch_config(folder, f"library:{function}", *args, kind="function", count=2, **changes))


def test_a_function_is_called_in_the_process_group(tmp_path: Path) -> None:
    with library(tmp_path, "train", "a", "b") as node:
        assert node.call("check")["torch"] is not None
        node.start()
        assert [(e["code"], e["joined"]) for e in node.wait_ended()] == [(0, True), (0, True)]
        line = "3.0 ('a', 'b') ['a', 'b'] gloo library\nNone None\n"
        assert [node.text(rank=rank) for rank in (0, 1)] == [line, line]
        assert node.data("store") == [
            {"state": "ready", "port": node.data("store")[0]["port"], "extension_only": True, "code": None}
        ]
        assert {d["rank"] for d in node.data("joined")} == {0, 1}
        assert all(0 < d["import_s"] < 60 for d in node.data("gate"))


def test_the_first_failure_is_told_with_its_place(tmp_path: Path) -> None:
    with library(tmp_path, "one_fails") as node:
        node.start()
        told = node.wait(lambda n: n.data("raised"))[0]
        node.call("stop", grace_s=5, reason="rank 1 failed")
        node.wait_ended()
        assert (told["rank"], told["type"], told["function"]) == (1, "KeyError", "one_fails")
        assert (told["file"], told["line"]) == (str(tmp_path / "library.py"), 14)
        assert told["phase"] == "train"
        assert "<gpuboard>" not in node.text("err", 1)


def test_a_function_may_end_the_process_group(tmp_path: Path) -> None:
    with library(tmp_path, "ends_it_itself") as node:
        node.start()
        assert [e["code"] for e in node.wait_ended()] == [0, 0]
        assert node.text("err") == ""


def test_a_function_that_is_missing(tmp_path: Path) -> None:
    with library(tmp_path, "absent") as node:
        node.start()
        node.wait_ended()
        told = node.data("raised")[0]
        assert (told["type"], told["phase"]) == ("AttributeError", "import")
        assert "absent" in told["message"]


def test_failure_in_init_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch.distributed as d\nd.init_process_group('gloo', world_size=-3, rank=0)\n"
    )
    with Node(launch_config(tmp_path, "script.py")) as node:
        node.start()
        node.wait_ended()
        assert node.data("raised")[0]["phase"] == "init"
        assert node.data("raised")[0]["line"] == 2


def test_the_death_of_the_store_ends_the_run(tmp_path: Path) -> None:
    script = (
        "import torch.distributed as d, time\nd.init_process_group('gloo')\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    (tmp_path / "script.py").write_text(script)
    with Node(launch_config(tmp_path, "script.py")) as node:
        rank = node.start()["0"]
        node.wait(lambda n: "up" in n.text())
        store = [pid for pid in carriers(node.run) if pid != rank]
        assert len(store) == 1
        os.kill(store[0], signal.SIGKILL)
        assert node.wait_ended(10)[0]["signal"] == signal.SIGTERM
        assert node.data("store")[-1]["state"] == "died"
        assert node.data("store")[-1]["code"] == -signal.SIGKILL


def test_the_store_of_several_nodes_stays_until_stop(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('done')\n")
    config = launch_config(tmp_path, "script.py", nodes=2, world_size=2)
    with Node(config) as node:
        port = node.call("listen", host="127.0.0.1", port=0)["port"]
        node.call("spawn")
        node.call("go", master_addr="127.0.0.1", master_port=port, environ={})
        node.wait(lambda n: n.data("exited"))
        node.call("ping")
        socket.create_connection(("127.0.0.1", port), 5).close()
        assert node.data("ended") == []
        node.call("stop", grace_s=30, reason="every rank has ended")
        node.wait_ended(5)


def test_without_the_extension_alone_the_store_loads_all_of_torch(tmp_path: Path) -> None:
    """A torch whose C extension cannot be loaded by itself: here it is refused while torch is a stand-in."""
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
