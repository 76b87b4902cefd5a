"""The keeper's folder, lock and socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from gpuboard.agent.proc import boot_id
from gpuboard.keeper import runtime_dir as place
from gpuboard.keeper.daemon.keeper import Keeper
from gpuboard.keeper.timing import KeeperTiming


def test_one_of_two_keepers_acquires_the_folder(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert place.connect(folder) is None
    first = place.acquire(folder, 10.0)
    assert first is not None
    assert place.acquire(folder, 0.1) is None
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    first.close()
    assert place.connect(folder) is None
    second = place.acquire(folder, 10.0)
    assert second is not None
    second.close()


def occupy(folder: str) -> None:
    """Acquire a free folder, connect to it, and release it."""
    occupied = place.acquire(folder, 10.0)
    assert occupied is not None
    connection = place.connect(folder)
    assert connection is not None
    connection.close()
    occupied.close()


def test_socket_of_a_dead_keeper_is_replaced(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with place._short_path(str(tmp_path)) as path:
        dead.bind(f"{path}/socket")
    dead.close()
    assert place.connect(str(tmp_path)) is None
    occupy(str(tmp_path))


def test_lock_held_by_a_process_that_does_not_answer(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(lock, b"4242")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(
        place.KeeperError, match=r"is locked, .*the keeper, pid 4242, does not respond; end it with `kill 4242`"
    ):
        place.acquire(str(tmp_path), 0.05)
    os.close(lock)


def test_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    occupy(str(folder))


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like NFS without its lock daemon: lock and socket are in the fallback folder."""
    real = fcntl.flock

    def no_locks_here(fd: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOLCK, "No locks available")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", no_locks_here)
    occupied = place.acquire(str(tmp_path), 10.0)
    assert occupied is not None
    connection = place.connect(str(tmp_path))
    assert connection is not None
    assert os.stat(f"/tmp/gpuboard-{os.geteuid()}").st_mode & 0o777 == 0o700
    connection.close()
    occupied.close()
    assert place.connect(str(tmp_path)) is None


def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(place.KeeperError, match="it is not a folder owned by you"):
        place.make_private(str(link))
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 12345, 12345)
        with pytest.raises(place.KeeperError, match="it is not a folder owned by you"):
            place.make_private(str(theirs))
        assert place.connect(str(theirs)) is None


def test_folder_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    place.make_private(str(tmp_path / "open"))
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_folder_name_contains_host_and_boot() -> None:
    boot = boot_id()[:8]
    assert place.folder_name({}).startswith(f"{os.uname().nodename}-{boot}")


def test_a_slurm_job_has_its_own_keeper() -> None:
    name = place.folder_name({})
    assert place.folder_name({"SLURM_JOB_ID": "7"}) == f"{name}-job7"
    assert place.folder_name({"SLURM_JOB_ID": "../7"}) == name


def test_folders_of_keepers_of_old_jobs_are_removed(tmp_path: Path) -> None:
    host = os.uname().nodename
    names = [f"{host}-b00t-job7", f"{host}-b00t-job8", f"{host}-b00t-job9", f"{host}-b00t", "other-b00t-job7"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").touch()
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(tmp_path / names[1])  # recently modified
    occupied = place.acquire(str(tmp_path / names[2]), timeout_s=10.0)
    os.utime(tmp_path / names[2], (1e9, 1e9))  # old, but its keeper is running
    place.prune(str(tmp_path / f"{host}-b00t"))
    assert sorted(os.listdir(tmp_path)) == sorted(names), "only in a job"
    place.prune(str(tmp_path / f"{host}-b00t-job10"))
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    assert occupied is not None
    occupied.close()


def test_checks_of_a_slow_folder_do_not_queue_up_before_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each takes seconds, and another is due meanwhile."""
    occupied = place.acquire(str(tmp_path), 10.0)
    assert occupied is not None
    keeper = Keeper(str(tmp_path), occupied, KeeperTiming(place_s=0.001))
    (tmp_path / "lock").unlink()
    checks: list[int] = []

    def check() -> None:
        checks.append(len(checks))
        time.sleep(0.1 if len(checks) < 20 else 0.0)

    monkeypatch.setattr(keeper, "_ensure_reachable", check)
    keeper._watch_place()
    keeper.loop.wait(60.0)
    assert 1 <= len(checks) < 10
    occupied.close()
