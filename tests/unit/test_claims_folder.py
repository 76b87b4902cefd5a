"""Clocks that jump, stamps set by hand, folders that cannot hold claims, disks that are full."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.claims import files as claims_files
from gpuboard.agent.claims import rules
from gpuboard.agent.claims import store as claims
from tests.unit.claims_help import ALICE, BOB, become, claims_folder, read, refused, root, take
from tests.waiting import Stopwatch

__all__ = ["claims_folder"]


GOOD: dict[str, Any] = {
    "lease": "k3f9", "uuid": "GPU-a", "share": None, "holder": None, "nodes": [], "gpus": 1, "purpose": "", "host": "",
    "boot": "b", "took": [],
}  # fmt: skip


def entry(mtime: float, ctime: float, **changes: Any) -> rules.Entry:
    return rules.Entry("gpuboard.GPU-a.k3f9", 1, 1, mtime, ctime, rules.encode({**GOOD, **changes}), "")


LONG = {"from": 10_000.0, "up": 100.0, "until": 90_000.0}  # born when the wall clock stood at 10,000


@pytest.mark.parametrize(
    "case",
    [
        ("touched 30 s ago", 10_400, 500, 10_370, 10_370, "live"),
        ("touched 95 s ago", 10_400, 500, 10_305, 10_305, "lapsed"),
        ("mtime in the future: ctime counts", 10_400, 500, 99_999, 10_305, "lapsed"),
        ("mtime set back by its owner", 10_400, 500, 10_000, 10_399, "lapsed"),
        ("ctime changed by another user's hard link: mtime counts", 10_400, 500, 10_305, 10_399, "lapsed"),
        ("clock set forward an hour since the touch", 14_000, 500, 10_370, 10_370, "live"),
        ("clock set forward an hour, touched since", 14_000, 500, 10_370, 13_970, "live"),
        ("clock set forward an hour, no touch for 95 s", 14_000, 500, 10_305, 10_305, "lapsed"),
        ("clock set forward, mtime ahead", 14_000, 500, 11_000, 10_305, "lapsed"),
        ("clock set back an hour since the touch", 6_800, 500, 10_370, 10_370, "live"),
        ("clock set back an hour, touched since", 6_800, 500, 10_370, 6_770, "live"),
        ("clock set back an hour, no touch for 95 s", 6_800, 500, 10_305, 10_305, "lapsed"),
    ],
)
def test_heartbeats_count_when_the_clock_is_set(case: tuple[str, float, float, float, float, str]) -> None:
    words, wall, up, mtime, ctime, state = case
    found = rules.judge(entry(mtime, ctime, **LONG), rules.Clock(wall, up), "b")
    assert found.state == state, words


def test_the_end_does_not_move_with_the_clock() -> None:
    """Born at 100 s since boot for 80,000 s: at 80,099 it lives, at 80,100 it is over, wherever the clock stands."""
    for wall in (10_000.0, 500_000.0, 90_100.0):
        for up, state in ((80_099.0, "live"), (80_100.0, "lapsed")):
            mtime = 10_000.0 + up - 100.0 - 5
            assert rules.judge(entry(mtime, wall - 5, **LONG), rules.Clock(wall, up), "b").state == state


def test_the_clock_of_this_kernel(folder: str) -> None:
    """mtime in the future, by hand: the claim ends all the same, and a pre-dated one shows."""
    take(folder, "k3f9", "GPU-a")
    path = f"{folder}/gpuboard.GPU-a.k3f9"
    os.utime(path, (time.time() + 86400, time.time() + 86400))
    assert 0 <= read(folder)["k3f9 GPU-a"].age_s < 5
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    assert read(folder)["k3f9 GPU-a"].state == "lapsed"


def test_a_folder_that_cannot_hold_claims(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    plain = tmp_path / "plain"
    plain.mkdir(mode=0o777)
    plain.chmod(0o777)
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    narrow.chmod(0o1755)
    shm = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        shm.chmod(0o1777)
        file = tmp_path / "file"
        file.touch()
        for path, words in (
            (missing, "No such file or directory"),
            (file, "Not a directory"),
            (plain, "it is not sticky"),
            (narrow, "it is not writable by all users"),
            (shm, "logind empties /dev/shm"),
        ):
            kind, message = refused(lambda path=path: take(str(path), "k3f9", "GPU-a"))  # type: ignore[misc]
            assert kind == "folder"
            assert f"{path} cannot hold reservations: {words}" in message
            found, error = claims.Folder(str(path)).read()
            assert found == []
            assert error == message
    finally:
        shm.rmdir()


@root
def test_a_folder_of_a_user_is_refused(folder: str) -> None:
    os.chown(folder, ALICE, ALICE)
    kind, message = refused(lambda: take(folder, "k3f9", "GPU-a"))
    assert kind == "folder"
    assert "it belongs to uid 20001, not to root" in message


# Lines as /proc/self/mountinfo has them on an NFS client, under pam_namespace and under systemd's PrivateTmp.
EXT4 = "29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"
MOUNTS = {
    "98 29 0:52 / /var/tmp rw,relatime shared:50 - nfs4 nas:/export/tmp rw,vers=4.2,proto=tcp": "it is on nfs4",
    "98 29 0:52 / /var rw,relatime shared:50 - nfs nas:/export/var rw,vers=3": "it is on nfs,",
    "98 29 0:61 / /var/tmp rw - fuse.sshfs bob@nas:/tmp rw,user_id=1000": "it is on fuse.sshfs",
    "98 29 8:1 /var/tmp/tmp-inst/alice /var/tmp rw shared:1 - ext4 /dev/sda1 rw": "it is a private instance",
    "98 29 8:1 /tmp-inst/root /var/tmp rw shared:1 - ext4 /dev/sda1 rw": "it is a private instance",
    "98 29 8:1 /var/tmp/systemd-private-0a-x.service-b/tmp /var/tmp rw - ext4 /dev/sda1 rw": "it is a private",
    "98 29 0:52 / /var/tmp/x rw - nfs4 nas:/x rw": None,  # something below it, not it
    "98 29 0:52 / /var/tm rw - nfs4 nas:/x rw": None,
    "98 29 0:40 / /var/tmp rw - tmpfs tmpfs rw": None,
    "98 29 0:52 / /var/tmp rw - nfs4 nas:/x rw\n99 98 0:40 / /var/tmp rw - tmpfs tmpfs rw": None,  # mounted over
}


@pytest.mark.parametrize("lines", MOUNTS)
def test_file_systems(lines: str) -> None:
    expected = MOUNTS[lines]
    found = claims_files.mount_trouble("/var/tmp", f"{EXT4}\n{lines}\n", 0)
    assert found == expected if expected is None else (found or "").startswith(expected)


@root
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """On a tmpfs without a free inode for the second of three claims, then without a free page."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    for options in ("size=1M,nr_inodes=4", "size=8k"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=1777", "none", mounted], check=True)
        try:
            kind, message = refused(lambda: take(str(mounted), "k3f9", "GPU-a", "GPU-b", "GPU-c"))
            assert kind == "disk"
            assert "No space left on device" in message
            assert os.listdir(mounted) == []
        finally:
            subprocess.run(["umount", mounted], check=True)


def test_leftovers_of_a_dead_process_are_removed(folder: str) -> None:
    files = claims_files.Files(folder)
    fresh, stale = files.create(b"x"), files.create(b"x")
    files.close()
    # ctime cannot be set, so the clock that is compared with it is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims_files, "STALE_S", -1.0)
        take(folder, "k3f9", "GPU-a")
    assert fresh not in os.listdir(folder)
    assert stale not in os.listdir(folder)
    files = claims_files.Files(folder)
    fresh = files.create(b"x")
    files.close()
    take(folder, "zzzz", "GPU-b")
    assert fresh in os.listdir(folder)


@root
def test_a_held_lock_delays_by_at_most_two_seconds(folder: str) -> None:
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        began, watch = time.monotonic(), Stopwatch()
        assert "until" in become(ALICE, lambda: take(folder, "k3f9", "GPU-a"))
        assert time.monotonic() - began > 1.9
        assert watch.stop() < 4
        assert become(BOB, lambda: take(folder, "zzzz", "GPU-a"))[0] == "conflict"
    finally:
        os.close(fd)
