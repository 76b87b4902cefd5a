"""The keeper's folder, lock or socket is removed, replaced or closed while a keeper runs. Real keepers and claims."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpuboard.keeper import client as keeper
from gpuboard.keeper.timing import KeeperTiming
from tests.integration.keeper_lab import Lab, lab
from tests.waiting import until

__all__ = ["lab"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a claims folder must belong to root")


def remove_all(lab: Lab) -> None:
    shutil.rmtree(lab.folder / "state", ignore_errors=True)


def remove_folder(lab: Lab) -> None:
    shutil.rmtree(lab.place, ignore_errors=True)


def remove_lock(lab: Lab) -> None:
    (lab.place / "lock").unlink(missing_ok=True)


def remove_socket(lab: Lab) -> None:
    (lab.place / "socket").unlink(missing_ok=True)


def remove_both(lab: Lab) -> None:
    remove_lock(lab)
    remove_socket(lab)


REMOVALS = [remove_all, remove_folder, remove_lock, remove_socket, remove_both]
Remove = Callable[[Lab], None]


def take_and_release(lab: Lab, lease: str, gpu: int) -> None:
    """Reserve in a shell that then ends; the keeper releases the lease."""
    script = lab.holding(lease, gpu)
    assert lease in lab.held()
    script.communicate("\n", timeout=60)
    until(lambda: lease not in lab.held(), f"{lease} is released")


def found(lab: Lab) -> int | None:
    """Return the pid of the keeper that commands find, if its lock exists."""
    return lab.keeper_pid() if (lab.place / "lock").exists() else None


def end(lab: Lab, script: subprocess.Popen[str]) -> None:
    """End a holder; its lease is released, the keeper ends, and no loss is reported."""
    script.communicate("\n", timeout=60)
    until(lambda: not lab.held(), "the lease ends with its holder")
    until(lambda: not lab.keepers(), "the keeper ends")
    assert keeper.restart_if_needed(lab.env) == []
    assert lab.records() == set()


def test_a_keeper_with_leases_is_found_again_after_each_removal(lab: Lab) -> None:
    script = lab.holding("kept1")
    first = lab.keepers()
    for number, remove in enumerate(REMOVALS):
        remove(lab)
        until(lambda: lab.records() == {"kept1"} and found(lab) in first, f"commands find it: {remove.__name__}")
        assert list(keeper.holders(lab.env)) == ["kept1"]
        keeper.renew("kept1", 7200, lab.env)
        assert "kept1" in (lab.place / "kept1.json").read_text()
        take_and_release(lab, f"next{number}", 1)
        assert lab.keepers() == first
    end(lab, script)


@pytest.mark.parametrize("remove", [remove_all, remove_lock, remove_socket, remove_both])
def test_a_lease_reserved_right_after_the_removal(lab: Lab, remove: Remove) -> None:
    """Two keepers may run then; finally one of them has both leases."""
    script = lab.holding("kept2")
    remove(lab)
    second = lab.holding("next2", 1)
    assert lab.held() == {"kept2", "next2"}
    until(lambda: lab.records() == {"kept2", "next2"}, "both have records")
    until(lambda: len(lab.keepers()) == 1, "one keeper is left")
    assert until(lambda: found(lab)) in lab.keepers()
    second.communicate("\n", timeout=60)
    until(lambda: lab.held() == {"kept2"}, "one ends with its holder, the other stays")
    end(lab, script)


@pytest.mark.parametrize("remove", [remove_all, remove_lock, remove_socket])  # its folder holds no record
def test_a_lingering_keeper_without_leases_ends(lab: Lab, remove: Remove) -> None:
    take_and_release(lab, "gone3", 0)
    assert lab.keepers()
    remove(lab)
    script = lab.holding("next3", 1)
    lingering = set(lab.keepers())
    until(lambda: len(lab.keepers()) == 1, "the lingering one ends, unless it was used")
    mine = until(lambda: found(lab), "the next one is found after the end of the first")
    assert [mine] == lab.keepers()
    assert mine in lingering
    take_and_release(lab, "last3", 2)
    end(lab, script)


@pytest.mark.parametrize("remove", [remove_all, remove_socket])
def test_removed_again_and_again_while_keepers_start_and_end(lab: Lab, remove: Remove) -> None:
    for number in range(2):
        take_and_release(lab, f"round{number}", number)
        remove(lab)
        early = keeper.start_early(lab.env)
        remove(lab)
        early.close()
    take_and_release(lab, "after", 0)
    until(lambda: not lab.keepers(), "all end")
    assert lab.held() == set()


def test_a_folder_removed_while_a_lease_is_handed_over(lab: Lab) -> None:
    """The folder is removed after the keeper started and the claims were taken."""
    early = keeper.start_early(lab.env)
    until(lambda: found(lab), "it runs")
    assert early.link() is not None
    remove_all(lab)
    script = lab.holding("over4")
    until(lambda: lab.records() == {"over4"})
    early.close()
    end(lab, script)


@pytest.mark.parametrize("remove", [remove_all, remove_lock])  # its socket is removed before
def test_a_suspended_keeper_is_named_with_the_remedy(lab: Lab, remove: Remove) -> None:
    script = lab.holding("stop5")
    pid = lab.signal_keeper(signal.SIGSTOP)
    words = f"the keeper, pid {pid}, is suspended; resume it with `kill -CONT {pid}`"
    with pytest.raises(keeper.KeeperError) as caught:
        lab.adopt("next5", gpu=1, timing=KeeperTiming(adopt_s=0.5))
    assert words in str(caught.value)
    (lab.place / "socket").unlink()
    with pytest.raises(keeper.KeeperError) as caught:
        lab.adopt("next5", gpu=1, timing=KeeperTiming(adopt_s=0.5))
    assert words in str(caught.value)
    remove(lab)
    os.kill(pid, signal.SIGCONT)
    until(lambda: found(lab) == pid, "it is found again")
    end(lab, script)


def test_a_folder_closed_by_its_owner_is_opened_again(lab: Lab) -> None:
    script = lab.holding("closed6")
    for mode in (0o000, 0o777):
        lab.place.chmod(mode)
        take_and_release(lab, f"mode{mode}", 1)
        assert lab.place.stat().st_mode & 0o777 == 0o700
    end(lab, script)


def test_a_folder_of_another_user_is_refused(lab: Lab, tmp_path: Path) -> None:
    script = lab.holding("link7")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o777)
    (theirs / "lost").write_text("message of another user\n")
    os.chown(theirs, 2002, 2002)
    lab.place.rename(tmp_path / "aside")
    lab.place.symlink_to(theirs)
    for _ in range(2):
        with pytest.raises(keeper.KeeperError, match="it is not a folder owned by you"):
            keeper.start_early(lab.env)
        with pytest.raises(keeper.KeeperError, match="it is not a folder owned by you"):
            keeper.restart_if_needed(lab.env)
    assert keeper.holders(lab.env) == {}
    assert sorted(os.listdir(theirs)) == ["lost"]
    lab.place.unlink()
    until(lambda: lab.records() == {"link7"}, "the keeper is found again")
    end(lab, script)


@pytest.mark.parametrize("level", ["gpuboard", "keeper"])
def test_a_folder_below_one_of_another_user_is_refused(lab: Lab, tmp_path: Path, level: str) -> None:
    """That user could replace it at any time."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    os.chown(theirs, 2002, 2002)
    link = next(path for path in (lab.place, *lab.place.parents) if path.name == level)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(theirs)
    with pytest.raises(keeper.KeeperError, match="belongs to another user"):
        keeper.start_early(lab.env)


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """The state folder on its own file system."""
    state = lab.folder / "state"
    state.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", state]).returncode:
        pytest.skip("cannot mount a file system")
    yield state
    lab.close()
    subprocess.run(["umount", "-l", state], check=True)


def test_a_read_only_file_system(lab: Lab, small_disk: Path) -> None:
    take_and_release(lab, "first8", 0)
    until(lambda: not lab.keepers())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(keeper.KeeperError, match=f"{lab.place}: Read-only file system"):
        lab.adopt("next8", gpu=1)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    take_and_release(lab, "after8", 2)


def test_a_full_file_system(lab: Lab, small_disk: Path) -> None:
    script = lab.holding("full9")
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/filler", "bs=4096"], capture_output=True)
    with suppress(OSError), open(f"{lab.place}/log", "ab", buffering=0) as log:
        while True:
            log.write(b".")  # the rest of its page
    for _ in range(2):
        with pytest.raises(keeper.KeeperError, match="No space left on device"):
            lab.adopt("next9", gpu=1)
        assert lab.records() == {"full9"}
        for pid in lab.keepers():  # the next one has no space for its log either
            os.kill(pid, signal.SIGKILL)
    (small_disk / "filler").unlink()
    take_and_release(lab, "after9", 2)
    until(lambda: lab.records() == {"full9"}, "a record goes after its claim")
    end(lab, script)
