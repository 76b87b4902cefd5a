"""Files that are not claims are listed with their owner and block no GPU; claims of other jobs are ignored."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.claims import store as claims
from gpuboard.agent.proc import boot_id
from tests.unit.claims_help import ALICE, BOB, ask, become, claims_folder, read, root, take

__all__ = ["claims_folder"]


GOOD = {
    "lease": "k3f9", "uuid": "GPU-a", "from": 1e9, "until": 1e9 + 60, "up": 1.0, "share": None, "holder": None,
    "nodes": [], "gpus": 1, "purpose": "", "host": "", "boot": boot_id(), "took": [],
}  # fmt: skip
GARBAGE: dict[str, tuple[Any, str]] = {
    "empty": (b"", "empty"),
    "not JSON": (b"\xff\x00{", "not JSON"),
    "deep": (b"[" * 60000, "not JSON"),
    "a list": (b"[1]", "not a JSON object"),
    "huge": (b" " * 65537, "larger than 65536 bytes"),
    "no lease": ({"lease": None}, "lease is missing or malformed"),
    "another GPU": ({"uuid": "GPU-b"}, "its content belongs to another name"),
    "another lease": ({"lease": "zzzz"}, "its content belongs to another name"),
    "not a number": (json.dumps({**GOOD, "from": float("nan")}).encode(), "from is not a number"),
    "infinite": (b'{"lease":"k3f9","uuid":"GPU-a","from":1e999}', "from is not a number"),
    "no float": ({"from": 10**400, "until": 10**400 + 60}, "from is not a number"),
    "an end that is no float": ({"until": 10**400}, "until is not a number"),
    "a birth that is no float": ({"up": -(10**400)}, "up is not a number"),
    "a sum that is infinite": ({"from": 10**308, "until": 10**308 + 60, "up": -1e308}, "from is not a number"),
    "for ever": ({"until": 1e18}, "it would last 999999999000000000 s"),
    "ends before it begins": ({"until": 0.0}, "it would last -1000000000 s"),
    "from the future": ({"up": 1e12}, "dated in the future"),
    "not a holder": ({"holder": {"pid": "1"}}, "holder is not a process"),
    "a purpose too long": ({"purpose": "x" * 513}, "purpose is not a text of at most 512 characters"),
    "not a list of nodes": ({"nodes": "gpu01"}, "nodes is not a list of names"),
    "not a share": ({"share": True}, "share is not a size"),
    "not a count": ({"gpus": -1}, "gpus is not a count"),
    "a list as job": ({"job": []}, "job is not a text of at most 64 characters"),
    "a number as job": ({"job": 0}, "job is not a text of at most 64 characters"),
    "false as job": ({"job": False}, "job is not a text of at most 64 characters"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_named_and_blocks_no_gpu(name: str, folder: str) -> None:
    value, reason = GARBAGE[name]
    data = value if isinstance(value, bytes) else json.dumps({**GOOD, **value}).encode()
    Path(folder, "gpuboard.GPU-a.k3f9").write_bytes(data)
    claim = read(folder)["k3f9 GPU-a"]
    assert (claim.state, claim.reason) == ("garbage", f"gpuboard.GPU-a.k3f9: {reason}")
    assert claim.uid == os.geteuid()
    take(folder, "zzzz", "GPU-a")
    assert ask("release", folder, lease="k3f9") == {"released": []}  # its owner can clear it away
    assert os.listdir(folder) == ["gpuboard.GPU-a.zzzz"]


@root
@pytest.mark.parametrize("kind", ["link", "fifo", "socket", "folder", "unreadable", "hard link", "odd name"])
def test_other_than_regular_files_neither_block_nor_hang(kind: str, folder: str) -> None:
    """Read as alice, who has no rights over it; bob made it."""
    path = f"{folder}/gpuboard.GPU-a.k3f9"

    def make() -> None:
        match kind:
            case "link":
                os.symlink("/etc/passwd", path)
            case "fifo":
                os.mkfifo(path)
            case "socket":
                socket.socket(socket.AF_UNIX).bind(path)
            case "folder":
                os.mkdir(path)
            case "unreadable":
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o000))
            case "hard link":
                take(folder, "zzzz", "GPU-b")
                os.link(f"{folder}/gpuboard.GPU-b.zzzz", path)
            case "odd name":
                Path(folder, "gpuboard.\x1b[31m.\udcff").touch()

    assert become(BOB, make) is None
    found = become(ALICE, lambda: ask("claims", folder))
    assert found["error"] is None
    [claim] = [c for c in found["claims"] if c["state"] == "garbage"]
    reasons = {
        "link": "a symbolic link", "fifo": "not a regular file", "socket": "not a regular file",
        "folder": "not a regular file", "unreadable": "not readable: Permission denied",
        "hard link": "its content belongs to another name", "odd name": "not a claim's name",
    }  # fmt: skip
    shown = "gpuboard.\\x1b[31m.\\udcff" if kind == "odd name" else "gpuboard.GPU-a.k3f9"
    assert (claim["uid"], claim["reason"]) == (BOB, f"{shown}: {reasons[kind]}")
    assert "until" in become(ALICE, lambda: take(folder, "cccc", "GPU-a"))


def test_real_and_simulated_gpus_do_not_see_each_other(folder: str) -> None:
    take(folder, "aaaa", "GPU-a")
    for prefix in ("SIM-x-", "SIM-y-"):
        simulated = claims.Folder(folder, prefix)
        args = {"lease": "bbbb", "uuids": [prefix + "0"], "for_s": 60.0, "nodes": [], "gpus": 1}
        claims.handle("take", args, simulated)
        assert [claim["uuid"] for claim in simulated.read()[0]] == [prefix + "0"]
    assert list(read(folder)) == ["aaaa GPU-a"]


def test_old_mig_uuids_contain_slashes(folder: str) -> None:
    take(folder, "k3f9", "MIG-GPU-a/1/0")
    assert os.listdir(folder) == ["gpuboard.MIG-GPU-a_1_0.k3f9"]
    assert read(folder)["k3f9 MIG-GPU-a/1/0"].state == "live"
