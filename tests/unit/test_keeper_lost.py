"""The keeper's messages about lost leases are shown once, also by concurrent commands."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from gpuboard.keeper.client import restart_if_needed
from gpuboard.keeper.daemon.lease import record_loss
from gpuboard.keeper.runtime_dir import folder_name

ROUNDS, COMMANDS = 50, 6


def _command(state: str, gate: Barrier, shown: multiprocessing.SimpleQueue[list[str]]) -> None:
    for number in range(ROUNDS):
        gate.wait()
        if gate.wait() == 0:
            _lost(state).write_text(f"lease {number} expired\n")
        gate.wait()
        shown.put(restart_if_needed({"XDG_STATE_HOME": state}))


def _lost(state: str) -> Path:
    return Path(state, "gpuboard", "keeper", folder_name({}), "lost")


def test_messages_written_while_commands_read_are_not_lost(tmp_path: Path) -> None:
    lost = _lost(str(tmp_path))
    lost.parent.mkdir(parents=True)
    wanted = {f"lease {number} expired" for number in range(600)}

    def write() -> None:
        for message in wanted:
            record_loss(str(lost.parent), message)

    keeper = threading.Thread(target=write)
    keeper.start()
    shown: set[str] = set()
    while keeper.is_alive() or lost.exists():
        shown.update(restart_if_needed({"XDG_STATE_HOME": str(tmp_path)}))
    assert shown == wanted


def test_a_message_is_added_to_a_damaged_file(tmp_path: Path) -> None:
    """As after a crash of the home's server: the keeper ended, and with it the heartbeats of all leases."""
    lost = _lost(str(tmp_path))
    lost.parent.mkdir(parents=True)
    lost.write_bytes(b"lease k3f9 expired on gpu\xff1\n")
    record_loss(str(lost.parent), "lease m2 expired")
    assert restart_if_needed({"XDG_STATE_HOME": str(tmp_path)}) == [
        "lease k3f9 expired on gpu\N{REPLACEMENT CHARACTER}1",
        "lease m2 expired",
    ]


def test_one_of_several_concurrent_commands_shows_a_message(tmp_path: Path) -> None:
    state = str(tmp_path)
    _lost(state).parent.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    gate, shown = fork.Barrier(COMMANDS), fork.SimpleQueue()
    commands = [fork.Process(target=_command, args=(state, gate, shown)) for _ in range(COMMANDS)]
    for command in commands:
        command.start()
    answers = [shown.get() for _ in range(ROUNDS * COMMANDS)]
    for command in commands:
        command.join(60)
    assert [command.exitcode for command in commands] == [0] * COMMANDS
    assert sorted(message for messages in answers for message in messages) == sorted(
        f"lease {n} expired" for n in range(ROUNDS)
    )
    assert list(_lost(state).parent.iterdir()) == []


def test_messages_taken_by_a_command_that_was_killed_are_shown_by_the_next(tmp_path: Path) -> None:
    state = str(tmp_path)
    _lost(state).parent.mkdir(parents=True)
    _lost(state).write_text("lease k3f9 expired\n")

    def command() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            restart_if_needed({"XDG_STATE_HOME": state})

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    _lost(state).write_text("lease m2x7 expired\n")
    assert sorted(restart_if_needed({"XDG_STATE_HOME": state})) == ["lease k3f9 expired", "lease m2x7 expired"]
    assert list(_lost(state).parent.iterdir()) == []


def test_messages_in_a_folder_that_cannot_be_written_stay_there(tmp_path: Path) -> None:
    lost = _lost(str(tmp_path))
    lost.parent.mkdir(parents=True)
    lost.write_bytes(b"lease k3f9 expired on gpu\xff1\n")
    lost.parent.chmod(0o500)
    tmp_path.chmod(0o711)
    if os.getuid() == 0:
        os.chown(lost.parent, 65534, 65534)
    fork = multiprocessing.get_context("fork")
    shown = fork.SimpleQueue()

    def command() -> None:
        os.chdir(tmp_path)  # its parents are root's alone
        if os.getuid() == 0:
            os.setuid(65534)
        shown.put(restart_if_needed({"XDG_STATE_HOME": "/proc/self/cwd"}))

    process = fork.Process(target=command)
    process.start()
    process.join(60)
    assert (process.exitcode, shown.get() if process.exitcode == 0 else None) == (0, [])
    lost.parent.chmod(0o700)
    if os.getuid() == 0:
        os.chown(lost.parent, 0, 0)
    assert restart_if_needed({"XDG_STATE_HOME": str(tmp_path)}) == [
        "lease k3f9 expired on gpu\N{REPLACEMENT CHARACTER}1"
    ]
