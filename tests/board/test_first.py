"""The first frame: what the board draws then, on a terminal that is left as it was whatever comes meanwhile."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import run

import pytest

from gpuboard.board import preferences
from gpuboard.board.arrange import ViewState
from gpuboard.board.core import Core
from gpuboard.board.terminal.first_frame import draw, look_for
from gpuboard.board.theme import themes
from gpuboard.board.theme.styles import UNICODE
from gpuboard.cluster.simulated import demo_nodes
from gpuboard.config import Settings
from tests.board.lab import SELDOM, board, claims_folder, environment, make_core, screen, settle
from tests.board.pty_lab import Terminal, plain
from tests.integration.here import Here
from tests.nvml import GIB, Gpu
from tests.waiting import until

LEAVE_S = 1.0


class Held(Terminal):
    """The board of this machine on a terminal, with its first frame drawn and textual not imported yet."""

    def __init__(self, here: Here, **env: str) -> None:
        self.go = here.folder / "go"
        program = f"""
import sys, time
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
go = Path({str(self.go)!r})
class Held(SourceFileLoader):
    def exec_module(self, module):
        while not go.exists():
            time.sleep(0.01)
        if go.read_text():
            raise ImportError(go.read_text())
        super().exec_module(module)
class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "textual" else None
        if spec is not None:
            spec.loader = Held(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
from gpuboard.__main__ import main
sys.argv[1:] = ["board"]
sys.exit(main())
"""
        kept = {key: value for key, value in here.env.items() if key not in {"NO_COLOR", "LC_ALL", "LC_CTYPE"}}
        super().__init__([sys.executable, "-c", program], kept | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | env)
        self.shows("Utilization")

    def release(self, error: str = "") -> None:
        """Let textual be imported, or fail with an error."""
        written = self.go.with_suffix(".new")
        written.write_text(error)
        written.rename(self.go)


@pytest.fixture
def held(here: Here) -> Iterator[Held]:
    """The first frame, and nothing after it until it is released."""
    with contextlib.closing(Held(here)) as terminal:
        yield terminal


def one_node(folder: Path) -> Core:
    return make_core(folder, demo_nodes(claims_dir=str(claims_folder(folder)))[:1], SELDOM)


def lines_of(frame: str) -> list[str]:
    return [plain(line.encode()).rstrip() for line in re.split(r"\x1b\[\d+;1H", frame)[1:]]


@pytest.mark.parametrize(
    "view", [ViewState(), ViewState(group="state"), ViewState(sort="memory", reverse=True), ViewState(pane="below")]
)
async def test_it_is_what_the_board_draws(tmp_path: Path, view: ViewState) -> None:
    core = one_node(tmp_path)
    preferences.save(core.env, preferences.Preferences(view=view))
    async with board(core, twice=True) as (app, pilot):

        def same(size: tuple[int, int]) -> bool:
            assert app.scene is not None
            frame = lines_of(draw(app.scene, core, size))
            shown = [line.rstrip() for line in screen(app).splitlines()]
            drawn = [(early, late) for early, late in zip(frame, shown, strict=True) if early]
            return len(drawn) >= 3 and all(late.startswith(early) for early, late in drawn)

        for size in ((40, 12), (80, 24), (80, 40), (120, 40), (200, 60)):
            await pilot.resize_terminal(*size)
            await settle(pilot, partial(same, size))


@pytest.mark.parametrize("view", [ViewState(view="table"), ViewState(filter="state:free")])
async def test_of_other_views_it_is_the_header(tmp_path: Path, view: ViewState) -> None:
    core = one_node(tmp_path)
    preferences.save(core.env, preferences.Preferences(view=view))
    async with board(core, (80, 24), twice=True) as (app, _):
        assert app.scene is not None
        frame = lines_of(draw(app.scene, core, (80, 24)))
        assert (frame[0], len(frame)) == (screen(app).splitlines()[0].rstrip(), 24)
        assert not any(frame[1:])


def test_it_needs_no_textual() -> None:
    program = (
        "import sys, gpuboard.board.terminal.first_frame\n"
        "print({'textual', 'asyncio', 'rich.console'} & set(sys.modules))"
    )
    assert run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_it_has_the_themes_own_look(tmp_path: Path) -> None:
    known, _ = themes.load_all(environment(tmp_path))
    assert len(known) >= 5
    for name, theme in known.items():
        core = make_core(tmp_path, settings=Settings(theme=name))
        look, _ = look_for(core, None, UNICODE)
        for role, style in theme.styles.items():
            wanted = style.without_color if name == "plain" else style
            assert look.style(role).render("x") == wanted.render("x"), (name, role)


def test_a_theme_that_cannot_be_read_is_drawn_plain(tmp_path: Path) -> None:
    core = make_core(tmp_path, settings=Settings(theme="mine"))
    folder = Path(core.env["XDG_CONFIG_HOME"]) / "gpuboard" / "themes"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("like = 3")
    assert look_for(core, None, UNICODE)[0].styles == {}


def test_the_board_takes_over_without_blanking_it(held: Held) -> None:
    held.release()
    held.shows("Reserve")
    assert held.written.count(b"\x1b[?1049h") == 1
    assert b"\x1b[2J" not in held.written
    held.press(b"q")
    held.ends(LEAVE_S)
    assert (held.process.returncode, held.restored) == (0, True)


def test_what_is_typed_meanwhile_waits_and_is_not_shown(held: Held) -> None:
    held.press(b"\x1c~?")  # ctrl-\ would kill it
    held.release()
    held.shows("Reserve")
    assert "~" not in held.text
    held.press(b"\x03")
    held.ends(2 * LEAVE_S)
    assert (held.process.returncode, held.restored) == (0, True)


def test_ctrl_z_waits_and_gives_the_terminal_back(held: Held) -> None:
    held.press(b"\x1a")
    held.release()
    until(lambda: held.restored, "the terminal is as it was")
    assert held.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_the_terminal_as_it_was(held: Held, number: signal.Signals) -> None:
    held.process.send_signal(number)
    held.ends(LEAVE_S)
    assert (held.process.returncode, held.restored) == (128 + number, True)


def test_ctrl_c_leaves_at_once(held: Held) -> None:
    held.press(b"\x03")
    held.ends(LEAVE_S)
    assert (held.process.returncode, held.restored) == (130, True)


def test_a_dropped_terminal_ends_it(held: Held) -> None:
    held.hang_up()
    held.ends(LEAVE_S)
    assert held.process.returncode == 128 + signal.SIGHUP


def test_a_failing_import_is_reported_on_a_restored_terminal(held: Held) -> None:
    held.release("textual is broken")
    held.ends(2 * LEAVE_S)
    assert (held.process.returncode, held.restored) == (1, True)
    after = plain(held.written[held.written.rfind(b"\x1b[?1049l") :])
    assert "ImportError" in after
    assert "textual is broken" in after


def test_without_colour_and_in_ascii(here: Here) -> None:
    here.gpus([Gpu(name="NVIDIA H100é 80GB HBM3", used=GIB)])
    with contextlib.closing(Held(here, NO_COLOR="1", LANG="C")) as terminal:
        assert terminal.written.isascii()
        assert re.findall(rb"\x1b\[[0-9;]*[34]8;", terminal.written) == []
