"""What outlives the board: a run that is kept, and one that is not, when the board quits or is killed with -9."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing

import pytest

from gpuboard.cluster.inventory.file import VARIABLE, write_nodes
from gpuboard.launch.runs.folder import FINAL
from gpuboard.launch.runs.index import RunEntry
from tests.board.launches import Exp
from tests.board.pty_lab import Terminal
from tests.integration.ranks_driver import carriers
from tests.waiting import Stopwatch, until

_UP = "\x1b[A"


class OnPty(Terminal):
    """`gpuboard board` on a terminal of its own, over the simulated nodes."""

    def __init__(self, exp: Exp) -> None:
        write_nodes(exp.folder / "nodes", exp.nodes)
        self.exp = exp
        self._seen = 0
        environ = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": exp.variables.partition("=")[2]}  # what the ranks run in
        environ |= {VARIABLE: str(exp.folder / "nodes"), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        super().__init__([sys.executable, "-m", "gpuboard", "board"], exp.env | environ, (120, 40), exp.work)

    def type(self, text: str) -> None:
        self.press(text.encode())

    def wait(self, words: str) -> None:
        self.shows(words, since=self._seen)
        self._seen = len(self.written)

    def launch(self, *, keep: bool) -> RunEntry:
        self.wait("sim02")
        self.type("x")
        self.wait("one rank per GPU")
        self.type("sleep.py")
        self.wait("sleep.py")
        if not keep:
            self.type(f"{_UP}{_UP}{_UP} ")  # over the buttons to the last field
            self.wait("[ ] no")
        self.type("\r")
        self.wait("Last line")  # the runs, in place of the dialog
        return self.exp.running()


@pytest.mark.parametrize("end", ["kill -9", "quit"])
def test_a_run_that_is_kept_goes_on_when_the_board_ends(exp: Exp, end: str) -> None:
    with closing(OnPty(exp)) as board:
        run = board.launch(keep=True).view
        _end(board, end)
        time.sleep(2.0)  # what would end it has had its time
        (entry,) = exp.entries()
        assert (entry.view.id, entry.view.state) == (run.id, "running")
        assert len(carriers(run.id)) >= 2
        stop = subprocess.run(
            [sys.executable, "-m", "gpuboard", "stop", "--now", run.id], env=exp.env, capture_output=True, text=True
        )
        assert stop.returncode == 0, stop.stderr
        until(lambda: exp.claims() == [], "the reservation to be released")


@pytest.mark.parametrize("end", ["kill -9", "quit"])
def test_a_run_that_is_not_kept_ends_with_the_board(exp: Exp, end: str) -> None:
    with closing(OnPty(exp)) as board:
        run = board.launch(keep=False).view
        _end(board, end)
        until(lambda: exp.entries()[0].view.state in FINAL, "the run to end")
        (entry,) = exp.entries()
        assert (entry.view.state, entry.view.verdicts[0].text) == ("stopped", "the board that launched it is closed")
        until(lambda: not carriers(run.id), "its processes to end")
        until(lambda: exp.claims() == [], "the reservation to be released")


def _end(board: OnPty, how: str) -> None:
    if how == "quit":
        began = Stopwatch()
        board.type("q")
        board.process.wait(60)
        assert began.stop() < 2.0
    else:
        board.process.kill()
        board.process.wait(60)
