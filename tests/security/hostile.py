"""What a hostile user can put into a folder of claims: leases, file systems of his own, files of others, ACLs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.claims import files
from gpuboard.agent.claims import store as claims
from gpuboard.agent.proc import boot_id
from tests.unit.claims_help import BOB, become
from tests.waiting import read_line

ANSWER_S = 15.0  # then a file system that never answers is unmounted, so that a test fails instead of hanging
_MNT_FORCE, _MNT_DETACH = 1, 2
_HOLD_LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent by the kernel when another process opens the file
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def write_lease(path: str, uid: int = BOB) -> Iterator[None]:
    """Hold a write lease (fcntl(2), F_SETLEASE) on a file of ``uid``: others' open(O_NONBLOCK) fails with EAGAIN."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_LEASE, path, str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert read_line(holder) == b"held\n"
        try:
            yield
        finally:
            holder.kill()


@contextlib.contextmanager
def fuse(path: str, kind: str, uid: int = BOB) -> Iterator[None]:
    """Mount on the file or folder ``path`` what fusermount mounts for ``uid``: a file system without a server.

    ``kind``: "denies" others, as without allow_other; "never answers"; "fails", once, with EIO, and never
    answers after that; "is gone", its server has ended.
    """
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR)
    mode = "40755" if os.path.isdir(path) else "100644"
    options = f"fd={server},rootmode={mode},user_id={uid},group_id={uid}"
    options += "" if kind == "denies" else ",allow_other"
    if libc.mount(b"bobfs", path.encode(), b"fuse", 0, options.encode()):
        os.close(server)
        pytest.skip(f"needs to mount FUSE: {os.strerror(ctypes.get_errno())}")
    giving_up = threading.Timer(ANSWER_S, libc.umount2, (path.encode(), _MNT_FORCE))
    try:
        if kind == "is gone":
            os.close(server)
        elif kind == "fails":
            threading.Thread(target=_fail_once, args=(server,), daemon=True).start()
        giving_up.start()
        yield
    finally:
        giving_up.cancel()
        if kind != "is gone":
            os.close(server)
        libc.umount2(path.encode(), _MNT_FORCE | _MNT_DETACH)


def _fail_once(server: int) -> None:
    """Serve a FUSE connection until one request has failed: structs and opcodes of linux/fuse.h."""
    init, forgets = 26, (2, 42)
    with contextlib.suppress(OSError):  # unmounted
        while True:
            _, opcode, unique = struct.unpack_from("=IIQ", os.read(server, 1 << 20))
            if opcode == init:
                body = struct.pack("=4I2H2I2H8I", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, *[0] * 8)
                os.write(server, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
            elif opcode not in forgets:
                os.write(server, struct.pack("=IiQ", 16, -errno.EIO, unique))
                return


def acl(path: str, kind: str, **permissions: int) -> None:
    """Give a file an ACL, "access" or "default": ``user``, ``group``, ``mask``, ``other``, and ``bob``'s.

    The kernel's format of acl(5): version 2, then tag, permissions and id of each entry.
    """
    tags = {"user": (0x01, 0xFFFFFFFF), "bob": (0x02, BOB), "group": (0x04, 0xFFFFFFFF), "mask": (0x10, 0xFFFFFFFF),
            "other": (0x20, 0xFFFFFFFF)}  # fmt: skip
    entries = sorted((*tags[name], granted) for name, granted in permissions.items())
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, granted, who) for tag, who, granted in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", value)
    except OSError as error:
        pytest.skip(f"needs POSIX ACLs below /var/tmp: {error.strerror}")


def by_hand(folder: str, uid: int, *claimed: tuple[str, str], **changes: Any) -> None:
    """Write live claims as ``uid`` would without gpuboard: (GPU, lease) each."""
    clock = files.Files(folder).clock()
    content = {
        "from": clock.wall, "until": clock.wall + 600.0, "up": clock.up, "share": None, "holder": None, "nodes": [],
        "gpus": 1, "purpose": "", "host": "", "boot": boot_id(), "took": [], **changes,
    }  # fmt: skip
    for uuid, lease in claimed:
        path = Path(folder, f"gpuboard.{uuid}.{lease}")
        path.write_text(json.dumps({**content, "uuid": uuid, "lease": lease}))
        os.chown(path, uid, uid)


def names(prefix: str, count: int) -> list[str]:
    """Return that many lease ids."""
    return [f"{prefix}{number:05d}" for number in range(count)]


def states(folder: str, uid: int) -> dict[str, str]:
    """Return what a fresh reader of ``uid`` sees: "lease GPU" → state; the error under ""."""
    answer = become(uid, lambda: claims.handle("claims", {}, claims.Folder(folder)))
    found = {f"{claim['lease']} {claim['uuid']}": claim["state"] for claim in answer["claims"]}
    return {**found, "": answer["error"]} if answer["error"] else found


class Counted:
    """Counts the system calls of this process that cost something, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        for name in ("open", "read", "fstat", "scandir", "stat"):
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return call(*args, **options)

        return counted
