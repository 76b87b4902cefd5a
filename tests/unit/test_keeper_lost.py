"""What the keeper left to be told is told once, also when several commands start together."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

from gpuboard.keeper.client import restart_if_needed
from gpuboard.keeper.daemon import tell_of_loss
from gpuboard.keeper.runtime_dir import folder_name

ROUNDS, COMMANDS = 50, 6


def _command(state: str, gate: Barrier, told: multiprocessing.SimpleQueue[list[str]]) -> None:
    for number in range(ROUNDS):
        gate.wait()
        if gate.wait() == 0:
            _lost(state).write_text(f"lease {number} has lapsed\n")
        gate.wait()
        told.put(restart_if_needed({"XDG_STATE_HOME": state}))


def _lost(state: str) -> Path:
    return Path(state, "gpuboard", "keeper", folder_name({}), "lost")


def test_what_is_being_written_is_not_taken_away_empty(tmp_path: Path) -> None:
    lost = _lost(str(tmp_path))
    lost.parent.mkdir(parents=True)
    wanted = {f"lease {number} has lapsed" for number in range(2000)}

    def write() -> None:
        for words in wanted:
            tell_of_loss(str(lost.parent), words)

    keeper = threading.Thread(target=write)
    keeper.start()
    told: set[str] = set()
    while keeper.is_alive() or lost.exists():
        told.update(restart_if_needed({"XDG_STATE_HOME": str(tmp_path)}))
    assert told == wanted


def test_one_of_many_commands_tells_what_was_lost(tmp_path: Path) -> None:
    state = str(tmp_path)
    _lost(state).parent.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    gate, told = fork.Barrier(COMMANDS), fork.SimpleQueue()
    commands = [fork.Process(target=_command, args=(state, gate, told)) for _ in range(COMMANDS)]
    for command in commands:
        command.start()
    answers = [told.get() for _ in range(ROUNDS * COMMANDS)]
    for command in commands:
        command.join(60)
    assert [command.exitcode for command in commands] == [0] * COMMANDS
    assert sorted(word for words in answers for word in words) == sorted(f"lease {n} has lapsed" for n in range(ROUNDS))
    assert list(_lost(state).parent.iterdir()) == []
