"""The board on real terminals that go wrong, over agents that go wrong: it ends in time, the terminal is whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.widgets import Static

from gpuboard.board.app import BoardApp, SceneChanged
from tests.board.lab import board, make_core, screen, settle
from tests.board.pty_lab import Terminal, plain
from tests.integration.here import Here
from tests.waiting import until

WRITE = {"x86_64": "1", "aarch64": "64"}[os.uname().machine]
LEAVE_S = 1.0  # promised are 0.5 s; the machine that tests run on may be busy


@pytest.fixture
def opened(here: Here) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(here.command("board"), environment(here))) as terminal:
        terminal.shows("Reserve")
        yield terminal


def environment(here: Here, **more: str) -> dict[str, str]:
    env = {key: value for key, value in here.env.items() if key not in {"NO_COLOR", "LC_ALL", "LC_CTYPE"}}
    return env | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | more


class Late(Static):
    """Sends the app a scene when it is taken off the screen."""

    sent = False

    def on_unmount(self) -> None:
        assert isinstance(self.app, BoardApp)
        assert self.app.scene is not None
        self.sent = self.app.post_message(SceneChanged(self.app.scene))


async def test_a_scene_that_comes_while_the_screens_are_taken_apart_is_not_drawn(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        late = Late()
        await app.screen.mount(late)
        await pilot.pause()
    assert late.sent  # an error of the app would have been raised here


def test_a_stopped_agent_holds_nothing_up(opened: Terminal) -> None:
    agents = opened.children()
    assert len(agents) == 1  # the one that was started before textual was imported, and no other
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    try:
        opened.press(b"q")
        assert opened.ends(LEAVE_S) < LEAVE_S
        assert (opened.process.returncode, opened.restored) == (0, True)
    finally:
        for pid in agents:
            with contextlib.suppress(ProcessLookupError):  # a board that takes its time kills it
                os.kill(pid, signal.SIGCONT)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in agents), "the agent ends with its pipe")


def test_a_node_that_accepts_and_never_answers_holds_nothing_up(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        here.ssh_config(f"Host hung\n  HostName 127.0.0.1\n  Port {port}\n  User nobody\n")
        with contextlib.closing(Terminal(here.command("board", "--nodes", "hung"), environment(here))) as terminal:
            terminal.shows("hung")
            held, _ = server.accept()
            with held:
                terminal.press(b"q")
                assert terminal.ends(LEAVE_S) < LEAVE_S
                assert (terminal.process.returncode, terminal.restored) == (0, True)


def test_a_stopped_keeper_holds_nothing_up(here: Here) -> None:
    here.needs_claims()
    taken = here.run("allocate", "--n", "1", "--detach", "--for", "10m")
    assert taken.returncode == 0, taken.stderr
    keepers = [pid for pid in processes(f"HOME={here.folder}") if "keeper" in command_line(pid)]
    assert keepers
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)
    terminal = Terminal(here.command("board"), environment(here))
    try:
        terminal.shows("Reserve")
        terminal.press(b"q")
        assert terminal.ends(LEAVE_S) < LEAVE_S
        assert (terminal.process.returncode, terminal.restored) == (0, True)
    finally:
        terminal.close()
        for pid in keepers:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["SIGTERM", "hang-up"])
def test_a_terminal_that_takes_nothing_holds_nothing_up(opened: Terminal, how: str) -> None:
    opened.stop_reading()
    for _ in range(40):
        opened.press(b"?\x1b")  # much to draw, nowhere to
    until(lambda: blocked(opened.process.pid), "the terminal's buffer is full")
    if how == "SIGTERM":
        opened.process.send_signal(signal.SIGTERM)
    else:
        opened.hang_up()
    assert opened.ends(LEAVE_S) < LEAVE_S
    assert opened.process.returncode == (143 if how == "SIGTERM" else 129)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])  # SIGTERM: below, when it is stopped
def test_signals_leave_the_terminal_as_it_was(opened: Terminal, number: signal.Signals) -> None:
    opened.process.send_signal(number)
    assert opened.ends(LEAVE_S) < LEAVE_S
    assert (opened.process.returncode, opened.restored) == (128 + number, True)


def test_a_dropped_terminal_ends_it_and_its_agent(opened: Terminal) -> None:
    agents = opened.children()
    opened.hang_up()
    assert opened.ends(3.0) < 3.0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in agents), "the agent ends, too")


def test_a_dropped_terminal_ends_it_under_nohup_too(here: Here) -> None:
    with contextlib.closing(
        Terminal(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *here.command("board")], environment(here))
    ) as terminal:
        terminal.shows("Reserve")
        terminal.hang_up()
        assert terminal.ends(3.0) < 3.0


def test_ctrl_z_gives_the_terminal_back_and_the_board_comes_back_whole_until_q_leaves_at_once(opened: Terminal) -> None:
    opened.press(b"\x1a")
    until(lambda: state(opened.process.pid) == "T", "it stops")
    until(lambda: opened.restored, "the terminal is as it was")
    seen = len(opened.written)
    opened.process.send_signal(signal.SIGCONT)
    opened.shows("Reserve", since=seen)
    assert not opened.restored
    opened.press(b"q")
    assert opened.ends(LEAVE_S) < LEAVE_S
    assert (opened.process.returncode, opened.restored) == (0, True)


def test_stopped_without_notice_it_comes_back_whole_and_leaves_the_terminal_as_it_was(opened: Terminal) -> None:
    opened.process.send_signal(signal.SIGSTOP)
    until(lambda: state(opened.process.pid) == "T", "it stops")
    seen = len(opened.written)
    opened.process.send_signal(signal.SIGCONT)
    opened.shows("Reserve", since=seen)
    opened.process.send_signal(signal.SIGSTOP)
    until(lambda: state(opened.process.pid) == "T", "it stops again")
    opened.process.send_signal(signal.SIGTERM)
    opened.process.send_signal(signal.SIGCONT)
    assert opened.ends(LEAVE_S) < LEAVE_S
    assert (opened.process.returncode, opened.restored) == (128 + signal.SIGTERM, True)


def test_bytes_that_are_no_utf_8_are_passed_over(opened: Terminal) -> None:
    opened.press(b"\xff\xfe")
    opened.press(b"\xe9")  # é in Latin 1; in UTF-8 the start of a character: the next byte makes it invalid
    seen = len(opened.written)

    def asked() -> bool:
        opened.press(b"?")  # what is read together with such bytes is lost with them
        return "cluster.sort" in plain(opened.written[seen:])

    until(asked, "the help screen")
    assert opened.process.poll() is None


def test_keys_with_impossible_numbers_are_passed_over(opened: Terminal) -> None:
    opened.press(b"\x1b[1114112u\x1b[97::;;u")
    seen = len(opened.written)
    opened.press(b"?")
    opened.shows("cluster.sort", since=seen)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_place_text_gets_the_status(here: Here, term: str) -> None:
    env = environment(here, TERM=term)
    if not term:
        del env["TERM"]
    with contextlib.closing(Terminal(here.command("board"), env)) as terminal:
        terminal.ends(30)
        assert terminal.process.returncode == 0
        why = "TERM is 'dumb': this terminal cannot position text" if term else "TERM is not set"
        assert f"gpuboard: cannot show the board on this terminal: {why}; showing the status instead:" in terminal.text
        assert "free" in terminal.text
        assert b"\x1b[?1049h" not in terminal.written


def test_an_unexpected_exception_is_reported_on_a_restored_terminal(here: Here) -> None:
    program = (
        "import sys\n"
        "from gpuboard.board.widgets.single_node import MeterGrid\n"
        "def broken(self, *_): raise KeyError('[/x] of nobody')\n"
        "MeterGrid.on_key = broken\n"
        "from gpuboard.__main__ import main\n"
        "sys.argv[1:] = ['board']\n"
        "sys.exit(main())\n"
    )
    with contextlib.closing(Terminal([sys.executable, "-c", program], environment(here))) as terminal:
        terminal.shows("Reserve")
        terminal.press(b"x")
        terminal.ends(5)
        assert (terminal.process.returncode, terminal.restored) == (1, True)
        file = here.folder / ".local" / "state" / "gpuboard" / "crash.txt"
        output = " ".join(terminal.text.split())
        assert "gpuboard: this is a bug: KeyError at <string>:3: '[/x] of nobody' please report it with" in output
        assert file.name in output.replace(" ", "")  # a long path goes over the edge
        assert "Traceback" not in output
        assert "KeyError: '[/x] of nobody'" in file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600


async def test_a_lost_ledger_is_a_banner_and_nothing_is_free_until_it_is_back(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    claims = tmp_path / "claims"
    async with board(core) as (app, pilot):
        free = _free(app)
        assert free
        claims.chmod(0o777)  # not sticky: anybody could take anybody's claim away
        await settle(pilot, lambda: "no reservations on 2 of 2 nodes:" in screen(app))
        assert _free(app) == []
        assert app.scene is not None
        assert app.scene.leases.unread == ["sim01", "sim02"]
        await pilot.press("l")
        await settle(pilot, lambda: "Not read, so leases there are not listed: sim01, sim02" in screen(app))
        await pilot.press("escape")
        claims.chmod(0o1777)
        await settle(pilot, lambda: app.scene is not None and not app.scene.banners)
        await settle(pilot, lambda: _free(app) == free)
        assert "cannot hold" not in screen(app)


def _free(app: BoardApp) -> list[str]:
    assert app.scene is not None
    return [uuid for uuid, place in app.scene.places.items() if place.gpu.state == "free"]


def processes(variable: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    """Return what a process was started as, "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def state(pid: int) -> str:
    """Return the kernel's letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def blocked(pid: int) -> bool:
    """Tell whether a thread of a process is in a write to its terminal (the system call's number and descriptor)."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "syscall").read_text().split()[:2] == [WRITE, "0x2"]:
                return True
    return False
