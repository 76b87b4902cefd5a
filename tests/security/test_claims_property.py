"""Whatever lies in a folder of claims beside alice's: they are seen and kept, their GPUs not free, looking is cheap.

Entries of a real folder with real owners, of every kind, mode and content; errors that no real file gives are injected
into the steps of claims_files on bob's files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.agent.claims import files as claims_files
from gpuboard.agent.claims import store as claims
from gpuboard.agent.claims import wire
from gpuboard.agent.proc import boot_id
from tests.security.hostile import Counted
from tests.unit.claims_help import ALICE, BOB, ask, become, root, take

pytestmark = root
GPUS = ("GPU-0", "GPU-1", "GPU-2")
HERS = GPUS[:2]

# What alice's and bob's files may contain, as changes of a live claim of that name, or bytes.
CONTENTS = st.one_of(
    st.sampled_from(
        (
            {}, {"share": 1}, {"job": "7"}, {"job": []}, {"job": {}}, {"job": 0}, {"job": False}, {"up": 0.0},
            {"up": 1e12}, {"until": 1e17}, {"boot": "another"}, {"lease": "other"},
            {"uuid": "GPU-1"}, {"took": [{"name": "gpuboard.GPU-0.k3f9"}]}, {"renewed": None},
            {"nodes": ["n" * 255] * 200}, {"from": float("inf")}, {"purpose": "\x1b" * 512},
            b"", b"{", b"[" * 60000, b"9" * 65000, b" " * 65537, b"\xff", b'{"lease": 1}',
        )
    ),
    st.binary(max_size=64),
)  # fmt: skip
KINDS = ("file", "file", "file", "symlink", "fifo", "socket", "folder", "hard link of hers", "file of hers moved here")
LEASES = ("a0", "k3f9", "k3f9x", "zz", "Z!", "")
ERRORS = ("", "", "", "", "_pin EIO", "_pin EMFILE", "_bytes EAGAIN", "_bytes EIO", "_bytes ENOMEM", "_bytes ESTALE")


ENTRIES = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "gpu": st.sampled_from((*GPUS, "", "x.y")),
            "lease": st.sampled_from(LEASES),
            "content": CONTENTS,
            "mode": st.sampled_from((0o644, 0o644, 0o600, 0o000, 0o664, 0o666, 0o4755)),
            "age_s": st.sampled_from((0, 0, 100, -100)),
            "error": st.sampled_from(ERRORS),
        }
    ),
    max_size=12,
)


@contextlib.contextmanager
def errors(injected: dict[str, str]) -> Iterator[None]:
    """Let the named steps fail on the files of those names."""
    with pytest.MonkeyPatch.context() as patch:
        for step in ("_pin", "_bytes"):
            real = getattr(claims_files.Files, step)

            def failing(files: Any, what: Any, step: str = step, real: Any = real) -> Any:
                name = what if isinstance(what, str) else os.path.basename(os.readlink(f"/proc/self/fd/{what}"))
                failed, _, number = injected.get(name, "").partition(" ")
                if failed == step:
                    raise OSError(getattr(errno, number), number)
                return real(files, what)

            patch.setattr(claims_files.Files, step, failing)
        yield


def content(folder: str, uuid: str, lease: str, wanted: Any) -> bytes:
    if isinstance(wanted, bytes):
        return wanted
    clock = claims_files.Files(folder).clock()
    whole = {
        "from": clock.wall, "until": clock.wall + 600.0, "up": clock.up, "share": None, "holder": None, "nodes": [],
        "gpus": 1, "purpose": "", "host": "", "boot": boot_id(), "took": [], "uuid": uuid, "lease": lease,
    }  # fmt: skip
    return json.dumps({**whole, **wanted}).encode()


def put(folder: str, entry: dict[str, Any]) -> str | None:
    """Make one entry; return its name if it is bob's. A well-formed claim of alice's only she could make: none is."""
    name = f"gpuboard.{entry['gpu']}.{entry['lease']}"
    path = f"{folder}/{name}"
    if os.path.lexists(path):
        return None
    data = content(folder, entry["gpu"], entry["lease"], entry["content"])
    owner = BOB
    match entry["kind"]:
        case "symlink":
            os.symlink(f"{folder}/gpuboard.GPU-0.k3f9", path)
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path)
        case "folder":
            os.mkdir(path)
        case "hard link of hers":
            os.link(f"{folder}/gpuboard.GPU-0.k3f9", path)
            return None
        case _:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(fd, data)
            os.close(fd)
            if entry["kind"] == "file of hers moved here":
                # Not by bob in her name: what of it he may have written, others may write.
                owner = ALICE
                entry["mode"] |= 0o022 if isinstance(entry["content"], dict) else 0
    if entry["kind"] != "symlink":
        os.chmod(path, entry["mode"])
        at = os.stat(path).st_mtime - entry["age_s"]
        os.utime(path, (at, at))
    os.chown(path, owner, owner, follow_symlinks=False)
    return name if owner == BOB else None


@settings(max_examples=int(os.environ.get("GPUBOARD_TEST_EXAMPLES", "30")))
@given(entries=ENTRIES)
def test_alices_claims_are_seen_and_kept_beside_any_files(entries: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuboard-claims-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o1777)
        assert "until" in become(ALICE, lambda: take(folder, "k3f9", *HERS))
        injected = {}
        for entry in entries:
            name = put(folder, entry)
            if name is not None and entry["error"]:
                injected[name] = entry["error"]
        readers_own = any(error.endswith(("EMFILE", "ENOMEM")) for error in injected.values())
        with errors(injected):
            _seen(folder, readers_own, len(entries) + len(HERS))
            _not_free(folder)
            _kept(folder, any(error.startswith("_pin") for error in injected.values()))


def _seen(folder: str, readers_own: bool, count: int) -> None:
    """Her claims are live in each reading, but where the reader lacks something: there all is unknown."""
    reader = claims.Folder(folder)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            found, error = reader.read()
        assert counted.calls["open"] <= 10 + 4 * 2 * count
        assert len(json.dumps(found)) < wire.CLAIMS_BYTES
        if error is not None:
            assert readers_own, error
            continue
        live = {claim["uuid"] for claim in found if claim["uid"] == ALICE and claim["state"] == "live"}
        assert live == set(HERS), found


def _not_free(folder: str) -> None:
    for uuid in HERS:
        assert become(BOB, functools.partial(take, folder, "bbbb", uuid))[0] in {"conflict", "disk"}


def _kept(folder: str, without_names: bool) -> None:
    """She does not open bob's files. What fails before their owner is known, which he cannot cause, concerns her."""
    answer = become(ALICE, lambda: ask("touch", folder, leases=["k3f9"]))
    if without_names and isinstance(answer, list):
        assert answer[0] == "disk"
        return
    if without_names and "unread" in answer:
        assert (answer["alive"], answer["lapsed"], answer["missing"], list(answer["unread"])) == ([], [], [], ["k3f9"])
        return
    assert (answer["alive"], answer["lapsed"], answer["missing"]) == (["k3f9"], [], [])
    assert set(HERS) <= set(answer["claims"]["k3f9"])
    assert "until" in become(ALICE, lambda: ask("renew", folder, lease="k3f9", for_s=900.0))
    released = become(ALICE, lambda: ask("release", folder, lease="k3f9"))
    assert set(HERS) <= set(released["released"])
