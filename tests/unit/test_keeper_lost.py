"""The keeper's messages about lost leases are shown once, also by concurrent commands."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

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
