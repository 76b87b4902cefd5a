"""The board in a real terminal (tmux), over real ssh to three nodes: what it shows, its keys, and nodes that fail.

One tmux session and one board serve all tests; each begins at the picture of the whole cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.integration.launch_lab import write_torch
from tests.nodes import USERS, Cluster, Host
from tests.nvml import GIB, Gpu
from tests.waiting import Stopwatch, alive, until

pytestmark = pytest.mark.nodes

_CONFIG = 'nodes = ["gpu[01-03]"]\ninterval = "1s"\n'


class Pane:
    """A tmux session of alice on login1 with a shell in it, and the board in that."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def tmux(self, *words: str) -> str:
        """Run a command of tmux, from outside the host: in one process instead of six. Return what it printed."""
        command = ["tmux", "-u", "-S", str(self.host.path("/tmp/board.tmux")), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def begin(self) -> None:
        """Start the session."""
        session = ["new-session", "-d", "-x", "120", "-y", "40", "env PS1='shell$ ' bash --norc --noprofile"]
        self.host.run(["tmux", "-S", "/tmp/board.tmux", "-f", "/dev/null", *session], check=True)
        self.shows("shell$")

    def end(self) -> None:
        """End the session with everything in it, and tmux itself, which would not begin another before."""
        self.host.run(["tmux", "-S", "/tmp/board.tmux", "kill-server"])
        until(lambda: not self.host.processes(lambda p: p.name.startswith("tmux"), user="alice"), "tmux ends")

    def size(self, columns: int, rows: int) -> None:
        """Give the terminal another size, and wait until the board is drawn at it: its last row ends at the edge."""
        self.tmux("resize-window", "-x", str(columns), "-y", str(rows))

        def drawn(text: str) -> bool:
            lines = text.splitlines()
            return len(lines) == rows and lines[-1].endswith("? Help") and columns - 4 < len(lines[-1]) <= columns

        self.wait(drawn, f"the board is drawn at {columns}x{rows}")

    def keys(self, *names: str) -> None:
        """Press keys, by tmux's names."""
        self.tmux("send-keys", *names)

    def type(self, text: str) -> None:
        """Type text as it is."""
        self.tmux("send-keys", "-l", text)

    def click(self, words: str) -> None:
        """Click on the last place where the screen has these words, as a terminal reports it (xterm's mode 1006)."""
        lines = self.shows(words).splitlines()
        row = max(number for number, line in enumerate(lines) if words in line)
        place = f"0;{lines[row].rindex(words) + 1};{row + 1}"
        self.type(f"\x1b[<{place}M\x1b[<{place}m")

    def text(self) -> str:
        """Return what is on the screen."""
        return self.tmux("capture-pane", "-p")

    def wait(self, right: Callable[[str], object], what: str, timeout_s: float = 60) -> str:
        """Wait until the screen is ``right``; return it."""
        seen = [""]

        def look() -> bool:
            seen[0] = self.text()
            return bool(right(seen[0]))

        try:
            until(look, what, timeout_s)
        except (AssertionError, pytest.fail.Exception) as error:  # the latter: of the test's timeout
            raise AssertionError(f"{error}; the screen:\n{seen[0]}") from None
        return seen[0]

    def shows(self, *words: str, timeout_s: float = 60) -> str:
        """Wait until the screen shows all ``words``; return it."""
        return self.wait(lambda text: all(word in text for word in words), f"the screen shows {words}", timeout_s)

    def states(self, wanted: dict[str, str], timeout_s: float = 60) -> str:
        """Wait until the picture has these letters in the rows of these nodes; return the screen."""
        return self.wait(lambda text: wanted.items() <= letters(text).items(), f"states {wanted}", timeout_s)

    def boards(self) -> list[int]:
        """Return the boards that run, as seen from outside."""
        return [process.pid for process in self.host.processes(lambda p: p.argv[-1:] == ("board",), user="alice")]


def letters(text: str) -> dict[str, str]:
    """Return the letters of the picture's cells, by node: the first character of each cell, below its number."""
    header = re.search(r"^ *Node +State +(.*?) +Free\b", text, re.MULTILINE)
    if header is None:
        return {}
    places = [header.start(1) - header.start() + number.start() for number in re.finditer(r"\d+", header[1])]
    found: dict[str, str] = {}
    for line in text.splitlines():
        if re.match(r" *gpu\d\d ", line):
            found[line.split()[0]] = ""
        elif not found or not re.match(r" +GPU \d+-\d+ ", line):  # a further row of the node above
            continue
        cells = "".join(line[place : place + 1] for place in places)
        found[[*found][-1]] += re.sub("[^FRABOX?]", "", cells)
    return found


def row(text: str, words: str) -> str:
    """Return the line that has ``words`` in it, blanks drawn together."""
    return next((" ".join(line.split()) for line in text.splitlines() if words in " ".join(line.split())), "")


USUAL = {"gpu01": "FBOXFFFF", "gpu02": "FFFFFFFF", "gpu03": "FF"}


@pytest.fixture(scope="module")
def pane(started_nodes: Cluster) -> Iterator[Pane]:
    """The session, on nodes with GPUs of every kind."""
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    started_nodes.reset()
    one = [Gpu(), Gpu(utilization=90), Gpu(used=5 * GIB), Gpu(remap=(0, 1)), Gpu(), Gpu(), Gpu(), Gpu()]
    started_nodes["gpu01"].script(one)
    started_nodes["gpu03"].script([Gpu(), Gpu()])
    config = started_nodes.home("alice") / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('nodes = ["gpu[01-03]"]\ninterval = "1s"\n')
    for folder in (config.parent, config.parent.parent):
        os.chown(folder, USERS["alice"], USERS["alice"])
    terminal = Pane(started_nodes["login1"])
    terminal.begin()
    yield terminal
    terminal.end()


@pytest.fixture
def screen(pane: Pane, started_nodes: Cluster) -> Iterator[Pane]:
    """The board, at the picture of all three nodes as they usually are, its cursor on the first GPU."""
    if pane.boards():
        try:
            pane.states(USUAL)
        except AssertionError:  # left behind by a test that failed
            pane.end()
            pane.host.run(["gpuboard", "release", "--mine"])
            pane.begin()
    if not pane.boards():
        pane.type("gpuboard board\n")
    pane.states(USUAL)
    pane.keys("Home", *["Left"] * 7)
    yield pane
    for name in USUAL:
        started_nodes[name].resume_sshd()
        started_nodes[name].plug()


def test_every_gpu_of_every_node_is_there_with_its_state(screen: Pane) -> None:
    text = screen.shows("15 free of 18", "2 busy", "1 broken", "3 nodes")
    assert letters(text) == USUAL
    assert "unreachable" not in text
    assert "stale" not in text


def test_the_filter_applies_while_typing_and_the_table_shows_reasons(screen: Pane) -> None:
    screen.keys("/")
    screen.shows("^p Palette")  # keys go to the filter
    screen.type("node:gpu01 state:bro")
    screen.wait(lambda text: "gpu02" not in text.split("\n", 1)[1], "the filter leaves gpu01 alone")
    screen.keys("C-o")  # not alt: many terminals send the same for alt-f and ctrl-right, and fields take alt-letters
    screen.shows("Save this filter for GPUs", "Will save: node:gpu01 state:bro")
    screen.keys("Escape")
    screen.wait(lambda text: "Save this filter" not in text, "the dialog is closed")
    screen.keys("Enter")
    screen.shows("t View")  # and to the rows again
    screen.keys("t")
    text = screen.shows("Reason", "row remapping")
    assert row(text, "gpu01 3 ").split()[:2] == ["gpu01", "3"]
    assert "gpu01    4" not in text
    screen.keys("Escape")
    screen.shows("gpu01    4", "gpu03    1", "5.0 GiB in use", "90 % util")
    screen.keys("t")
    screen.states(USUAL)


def test_a_gpu_in_detail(screen: Pane, started_nodes: Cluster) -> None:
    screen.keys("Right", "Enter")
    screen.shows("gpu01  GPU 1", uuids(started_nodes["gpu01"])[1], "B busy", "Row remap", "5 min ago")
    screen.keys("Escape")
    screen.states(USUAL)


def test_reserving_with_keys_is_a_claim_on_the_node_and_releasing_ends_it(screen: Pane, started_nodes: Cluster) -> None:
    gpu02 = started_nodes["gpu02"]
    screen.keys("Down", "Space", "Space")
    screen.shows("2 selected")
    screen.keys("r")
    screen.shows("Will reserve gpu02 GPUs 0-1")
    screen.keys("Enter")
    lease = screen.shows("Reserved: ").partition("Reserved: ")[2].split()[0]
    claims = sorted(gpu02.path("/var/tmp").glob(f"gpuboard.*.{lease}"))
    assert [claim.name.split(".")[1] for claim in claims] == uuids(gpu02)[:2]
    assert {claim.stat().st_uid for claim in claims} == {USERS["alice"]}
    screen.states({"gpu02": "RRFFFFFF"})
    screen.keys("Escape")
    screen.wait(lambda text: "selected" not in text, "the selection is taken away")
    screen.keys("l")
    text = screen.wait(lambda text: row(text, f"{lease} alice"), "the lease is listed")
    assert "gpu02:0-1" in row(text, f"{lease} alice")
    screen.keys("d")
    screen.shows(f"Release {lease}?")
    screen.keys("y")
    screen.shows(f"Released: {lease}")
    until(lambda: not any(claim.exists() for claim in claims), "the claims are gone")
    screen.keys("Escape")
    screen.states(USUAL)


def test_a_launch_from_selected_gpus_of_two_nodes(screen: Pane, started_nodes: Cluster) -> None:
    home = started_nodes.home("alice")
    write_torch(home / "fake")
    (home / "script.py").write_text("from torch.distributed import meet\nmeet()\nprint('trained', flush=True)\n")
    screen.keys("Space", "Down", "Left", "Space")
    screen.shows("2 selected")
    screen.keys("x")
    screen.shows("Launch", "gpu01:0", "gpu02:0")
    screen.type("script.py")
    screen.keys(*["Tab"] * 5)
    screen.type("PYTHONPATH=/srv/home/alice/fake")
    screen.keys("Tab", "Space", "Enter")
    ranks = (r"^ *0 +done +gpu01 +0 .*trained", r"^ *1 +done +gpu02 +0 .*trained", r"Ranks +gpu01 0 D +gpu02 1 D")
    lines = (r"^ *r\w{7} +done", *ranks)
    screen.wait(lambda text: all(re.search(line, text, re.MULTILINE) for line in lines), "the run is done")
    screen.keys("Escape")
    screen.states(USUAL)  # what launch reserved is given back
    screen.keys("Escape")
    screen.wait(lambda text: "selected" not in text, "the selection is taken away")


def test_processes_of_the_cluster_and_one_signal_to_two_of_them(screen: Pane, started_nodes: Cluster) -> None:
    gpu03 = started_nodes["gpu03"]
    with ExitStack() as stack:
        one, two = (stack.enter_context(gpu03.popen(["sleep", words], user="alice")) for words in ("611", "612"))
        for process in (one, two):
            stack.callback(process.kill)
        loads = [(process.process.inner, percent) for process, percent in ((one, 71), (two, 9))]
        gpu03.script([Gpu(processes=(("compute", pid, 3 * GIB),), samples=((pid, sm, 0.1),)) for pid, sm in loads])
        screen.keys("P")
        text = screen.shows("2 processes on 2 GPUs of 1 node", "sleep 611", "sleep 612")
        assert row(text, "sleep 611").split()[:6] == ["alice", "gpu03", "0", str(loads[0][0]), "3.0G", "71"]
        screen.keys("Space", "Space")
        screen.shows("2 selected")
        screen.keys("K")
        screen.shows("Signal for 2 processes")
        screen.keys("Enter")
        screen.shows("Send SIGTERM to 2 processes?", f"pid {loads[0][0]}", f"pid {loads[1][0]}")
        screen.keys("y")
        screen.shows("signal sent to 2 processes")
        assert [process.wait(60) for process in (one, two)] == [-signal.SIGTERM] * 2
    gpu03.script([Gpu(), Gpu()])
    screen.shows("No process on any GPU.")
    screen.keys("Escape", "Escape")
    screen.states(USUAL)


def test_a_node_that_hangs_goes_unknown_alone_and_comes_back(screen: Pane, started_nodes: Cluster) -> None:
    started_nodes["gpu02"].pause_sshd()
    started_nodes["gpu03"].script([Gpu(), Gpu(trouble=("hang *",))])  # and NVML on one GPU
    text = screen.states({"gpu02": "????????", "gpu01": USUAL["gpu01"]})
    assert re.search(r"stale +\d+s", row(text, "gpu02 "))
    screen.wait(lambda text: letters(text).get("gpu03") == "F?" and row(text, "gpu03 up"), "one GPU of gpu03 hangs")

    def grown(text: str) -> bool:
        stale = re.search("stale ([89]|[0-9]{2,})s", row(text, "gpu02 "))
        counted = re.search(r"1 stale · oldest +[0-9]+s", text) and " 6 free of 18" in text
        return bool(stale and counted and row(text, "gpu01 up"))

    screen.wait(grown, "its age grows, and the others go on")
    started_nodes["gpu02"].resume_sshd()
    started_nodes["gpu03"].script([Gpu(), Gpu()])
    screen.states(USUAL)
    screen.shows("15 free of 18")


def test_a_node_that_dies_keeps_the_selection_and_is_never_free(screen: Pane, started_nodes: Cluster) -> None:
    gpu03 = started_nodes["gpu03"]
    screen.keys("Down", "Down", "Right", "Space")
    screen.shows("1 selected")
    seen: set[str] = set()

    def is_unreachable(text: str) -> bool:
        if "gpu03" in letters(text):
            seen.add(letters(text)["gpu03"])
        return "unreachable" in row(text, "gpu03 ") and letters(text) == {**USUAL, "gpu03": "??"}

    gpu03.stop_sshd()
    text = screen.wait(is_unreachable, "gpu03 is unreachable")
    assert seen <= {"FF", "??"}
    assert "1 selected" in text
    screen.keys("Enter")
    screen.shows("gpu03  GPU 1", uuids(gpu03)[1], "? unknown")
    screen.keys("Escape")
    gpu03.sshd()
    text = screen.states(USUAL)
    assert "1 selected" in text
    screen.keys("Escape")
    screen.wait(lambda text: "selected" not in text, "the selection is taken away")


def test_the_screen_is_saved_as_text_by_the_key_that_a_terminal_sends(screen: Pane, started_nodes: Cluster) -> None:
    shown = screen.states(USUAL)
    screen.keys("M-s")
    screen.shows("Saved", "gpuboard-cluster-")
    [file] = started_nodes.home("alice").rglob("gpuboard-cluster-*.txt")
    saved = file.read_text()
    assert (saved.count("\n"), letters(saved)) == (shown.count("\n"), USUAL)
    assert file.stat().st_uid == USERS["alice"]


def test_a_paste_with_escapes_is_text_and_no_keys(screen: Pane) -> None:
    for field in (False, True):
        if field:
            screen.keys("/")
            screen.shows("^p Palette")  # keys go to the filter
        screen.tmux("set-buffer", "\x1b[31mquit\x1b[0m")
        screen.tmux("paste-buffer", "-p", "-d")
    screen.shows("[31mquit[0m")
    screen.keys("Escape")
    screen.states(USUAL)


def test_a_dialog_by_the_mouse_while_the_terminal_changes_its_size(screen: Pane) -> None:
    screen.click("Reserve")
    screen.shows("GPUs", "Purpose", "Cancel")
    screen.size(80, 24)
    screen.click("Purpose")  # the label; the field is right of it
    screen.click("e.g. ablation study")
    screen.type("tests")
    screen.shows("Purpose      ", "tests")
    screen.size(120, 40)
    assert "e.g. ablation" not in screen.shows("Cancel"), "the text is kept"
    screen.click("Cancel")
    screen.wait(lambda text: "Purpose" not in text, "the dialog is closed")
    screen.click("Leases")
    screen.shows("Owner", "Back")
    screen.click("Back")
    screen.states(USUAL)


OPENED = {  # key → words that the picture has not
    "t": ("Reason",),
    "Enter": ("Utilization", "esc Back"),
    "n": ("Connection", "esc Back"),
    "v": ("Events", "What", "esc Back"),
    "P": ("Command", "esc Back"),
    "l": ("Owner", "esc Back"),
    "u": ("Ranks", "Target"),
    "?": ("cluster.view",),
    "C-p": ("Search for commands",),
    "C-t": ("Theme: ",),
    "s": ("Sort by", "Cancel"),
    "r": ("Purpose", "Cancel"),
    "x": ("Grace", "Cancel"),
    "y": ("Copy", "UUIDs"),
}


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_screens_and_dialogs_open_and_close_by_keys(screen: Pane, size: tuple[int, int]) -> None:
    screen.size(*size)
    screen.states(USUAL)
    for key, words in OPENED.items():
        screen.keys(key)
        text = screen.shows(*words, timeout_s=20)
        assert max(map(len, text.splitlines())) <= size[0], key
        screen.keys("t" if key == "t" else "Escape")
        screen.wait(lambda text, words=words: words[-1] not in text, f"{key} is closed", 20)  # type: ignore[misc]
        screen.states(USUAL, timeout_s=20)
    screen.size(120, 40)


def test_another_size_and_back(screen: Pane) -> None:
    screen.size(80, 24)
    text = screen.states(USUAL)
    assert max(map(len, text.splitlines())) <= 80
    assert "15 free" in text
    screen.size(200, 60)
    screen.shows("gpu01  GPU 0", "Row remap")  # room for the cursor's GPU beside the cluster
    screen.size(120, 40)
    text = screen.wait(lambda text: "Health" not in text and letters(text) == USUAL, "it is as before")
    assert max(map(len, text.splitlines())) <= 120


def test_ctrl_z_and_back(screen: Pane) -> None:
    screen.keys("C-z")
    screen.shows("Stopped", "shell$")
    screen.type("fg\n")
    text = screen.states(USUAL)
    assert "Stopped" not in text


def test_stopped_by_a_signal_it_waits_until_the_shell_continues_it(screen: Pane) -> None:
    (board,) = screen.boards()
    os.kill(board, signal.SIGSTOP)
    screen.shows("Stopped", "shell$")
    os.kill(board, signal.SIGCONT)
    until(lambda: state(board) == "T", "in the background it stops again")
    screen.type("echo mine: $((6 * 7))\n")
    screen.shows("mine: 42")
    screen.type("fg\n")
    screen.wait(lambda text: "mine" not in text and letters(text) == USUAL, "the board is back, and all of it")
    screen.keys("t")
    screen.shows("GPU", "Util")
    screen.keys("t")
    screen.states(USUAL)


def test_it_comes_back_though_the_input_that_it_was_about_to_read_is_taken(screen: Pane) -> None:
    (board,) = screen.boards()
    for turn in range(4):  # its thread is stopped (SIGTTIN) within the read about once in three turns
        os.kill(board, signal.SIGSTOP)
        screen.shows("Stopped", "shell$")
        screen.type("sleep 1000\n")
        (sleep,) = until(partial(screen.host.processes, lambda p: p.argv == ("sleep", "1000"), user="alice"))
        screen.type("not for the board\n")
        screen.shows("not for the board")
        os.kill(board, signal.SIGCONT)
        until(lambda: state(board) == "T", "in the background it stops again")
        screen.keys("C-c")  # takes what was typed with it
        until(lambda pid=sleep.pid: not alive(pid), "the command of the shell ends")  # type: ignore[misc]
        screen.type("fg\n")
        screen.wait(lambda text: "shell$" not in text and letters(text) == USUAL, f"it is back, turn {turn}")


def test_leaving_takes_no_time_though_a_node_hangs(screen: Pane, started_nodes: Cluster) -> None:
    (board,) = screen.boards()
    started_nodes["gpu01"].unplug()
    started_nodes["gpu02"].pause_sshd()
    screen.states({"gpu01": "???X????", "gpu02": "????????"})
    screen.keys("q")
    pressed = Stopwatch()
    until(lambda: not alive(board), "the board ends")
    assert pressed.stop() < 3.0  # 0.2 s; waiting for one of the nodes would take longer
    screen.type("echo back to $((6 * 7))\n")
    text = screen.shows("back to 42", "shell$")
    assert "Filter" not in text  # the terminal is the shell's again
    of_ours = partial(screen.host.processes, lambda p: "gpuboard" in " ".join(p.argv), user="alice")
    until(lambda: not of_ours(), "nothing is left")  # a keeper lingers for 5 s after the last lease


def test_the_board_ends_with_its_terminal(screen: Pane) -> None:
    (board,) = screen.boards()
    screen.end()
    until(lambda: not alive(board), "the board ends")
    screen.begin()


def uuids(host: Host) -> list[str]:
    """Return the UUIDs of a node's GPUs, by index."""
    script = (host.folder / "nvml" / "script").read_text()
    return re.findall(r"^uuid (\S+)$", script, re.MULTILINE)


def state(pid: int) -> str:
    """Return the state of a process, a letter of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
