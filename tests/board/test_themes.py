"""Themes: what ours promise, what is wrong with others, and how they are changed."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from subprocess import run

import pytest
from rich.segment import Segment
from textual.color import Color
from textual.command import CommandPalette
from textual.filter import ANSIToTruecolor
from textual.screen import ModalScreen

from gpuboard.board.app import BoardApp
from gpuboard.board.core import Core
from gpuboard.board.screens.cluster import ClusterScreen
from gpuboard.board.screens.help import HelpScreen
from gpuboard.board.terminal.guard import is_utf8
from gpuboard.board.theme import themes
from gpuboard.board.theme.styles import ROLES, THEMED, UNICODE
from gpuboard.board.theme.themes import BoardTheme
from gpuboard.board.widgets.grid import Grid
from gpuboard.board.widgets.pane import Pane
from gpuboard.config import Settings
from tests.board.lab import board, environment, make_core, notifications, screen, settle
from tests.board.made import busy, gpu, lease, node, scene, still

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#ffffff"}
COLOURED = ("colour-blind", "dark", "high-contrast", "light")
ALL = (*COLOURED, "plain", "terminal")


def ours() -> dict[str, BoardTheme]:
    found, problems = themes.load_all({"HOME": "/nonexistent"})
    assert problems == []
    return found


def contrast(one: Color, other: Color) -> float:
    """Return the contrast of two colours as WCAG 2.1 defines it: from 1 to 21."""

    def luminance(color: Color) -> float:
        parts = [part / 255 for part in (color.r, color.g, color.b)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_ours_have_every_state_and_role() -> None:
    assert {name: set(theme.styles) for name, theme in ours().items()} == {key: {*THEMED, *ROLES} for key in ALL}


def test_the_linux_console_has_ascii_only() -> None:
    utf8 = {"LANG": "de_DE.UTF-8"}
    found = [is_utf8({**utf8, "TERM": term}) for term in ("xterm", "screen", "linux")]
    assert (found, is_utf8({"LC_ALL": "C", "TERM": "xterm"})) == ([True, True, False], False)


@pytest.mark.parametrize("name", COLOURED)
def test_every_text_can_be_read_on_every_ground_and_in_rows_under_the_cursor_or_marked(name: str) -> None:
    theme = ours()[name]
    grounds = [Color.parse(getattr(theme.textual, part) or "") for part in ("background", "surface", "panel")]
    for role in ("cursor", "marked"):  # what is in such a row keeps its own colour
        row = theme.styles[role].bgcolor
        assert row is not None
        grounds.append(Color.from_rich_color(row))
    least = 7.0 if name == "high-contrast" else 4.5
    poor = {
        f"{role} on {ground.hex}: {contrast(text, ground):.2f}"
        for role, style in theme.styles.items()
        if style.color is not None
        for text in [Color.from_rich_color(style.color)]
        for ground in ([Color.from_rich_color(style.bgcolor)] if style.bgcolor else grounds)
        if contrast(text, ground) < least
    }
    assert poor == set()


def test_the_colour_blind_theme_draws_states_in_the_colours_of_okabe_and_ito_alone() -> None:
    styles = [ours()["colour-blind"].styles[state] for state in THEMED]
    used = [Color.from_rich_color(c).hex.lower() for style in styles for c in (style.color, style.bgcolor) if c]
    assert set(used) <= OKABE_ITO
    assert len({(style.color, style.bgcolor) for style in styles}) == len(THEMED)


@pytest.mark.parametrize("name", COLOURED)
def test_no_two_states_look_the_same(name: str) -> None:
    assert len({str(ours()[name].styles[state]) for state in THEMED}) == len(THEMED)


@pytest.mark.parametrize("name", ALL)
def test_states_have_no_ground_of_their_own_so_that_empty_bars_look_empty(name: str) -> None:
    assert [state for state in THEMED if ours()[name].styles[state].bgcolor or ours()[name].styles[state].reverse] == []


def test_plain_has_no_colour() -> None:
    assert [role for role, style in ours()["plain"].styles.items() if style.color or style.bgcolor] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = 'x", "not valid TOML"),
        ("like = 'dark'\n[states]\nfree = 'gren'\n", "states.free = 'gren' is not a colour"),
        ("like = 'dark'\n[states]\nfree = '#12345g'\n", "states.free = '#12345g' is not a colour"),
        ("like = 'dark'\n[states]\nfree = 'bold #ffffff on'\n", "no colour after `on`"),
        ("like = 'dark'\n[states]\nfree = 'bold not #ffffff'\n", "no attribute after `not`"),
        ("like = 'dark'\n[states]\nfree = '#ffffff #000000'\n", "write it as: bold #ff7b7b on #000000"),
        ("like = 'dark'\n[states]\nfine = '#ffffff'\n", "[states] has no key 'fine'"),
        ("like = 'dark'\n[colors]\nprimary = 'rgb(1,2)'\n", "colors.primary = 'rgb(1,2)' is not a colour"),
        ("like = 'dark'\n[variables]\nborders = '#ffffff'\n", "variables.borders: textual has no such variable"),
        ("like = 'dark'\n[variables]\nborder = 'auto 200%'\n", "variables.border"),
        ("like = 'dark'\n[variables]\nblock-cursor-text-style = 'bald'\n", "'bald' is not one of"),
        ("like = 'drak'\n", "like = 'drak' is not one of"),
        ("dark = 'yes'\n", "Expected `bool`"),
        ("colour = 1\n", "unknown key `colour`"),
        ("[states]\nfree = '#ffffff'\n", "lacks primary"),
        ("x = '" + 70_000 * "x" + "'", "larger than 64 KiB"),
    ],
)
def test_a_bad_theme_file_is_reported_by_name_and_the_others_load(tmp_path: Path, text: str, words: str) -> None:
    folder = tmp_path / "gpuboard" / "themes"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(text)
    (folder / "other.toml").write_text("title = 'Other'\nlike = 'light'\n[states]\nfree = 'bold #004400 on #ffffff'\n")
    (folder / "latin.toml").write_bytes(b"title = '\xe9'")
    found, problems = themes.load_all({"XDG_CONFIG_HOME": str(tmp_path)})
    assert set(found) == {*ALL, "other"}
    assert problems[0] == "latin.toml: not UTF-8"
    assert problems[1].startswith("mine.toml: ")
    assert words in problems[1]
    assert str(found["other"].styles["free"]) == "bold #004400 on #ffffff"
    assert found["other"].styles["busy"] == found["light"].styles["busy"]
    assert (found["other"].textual.dark, found["other"].title) == (False, "Other")


def test_a_theme_of_the_users_replaces_ours_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "gpuboard" / "themes"
    folder.mkdir(parents=True)
    (folder / "dark.toml").write_text("title = 'Mine'\nlike = 'dark'\n[states]\nfree = '#ffffff'\n")
    found, problems = themes.load_all({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (problems, found["dark"].title, str(found["dark"].styles["free"])) == ([], "Mine", "#ffffff")


def test_which_theme_a_board_starts_with() -> None:
    known = ours()
    many, few = {"TERM": "xterm-256color"}, {"TERM": "linux"}
    assert themes.choose(many, "auto", None, known) == "dark"
    assert themes.choose(few, "auto", None, known) == "terminal"
    assert themes.choose({**few, "COLORTERM": "truecolor"}, "auto", None, known) == "dark"
    assert themes.choose(many, "auto", "light", known) == "light"
    assert themes.choose(many, "high-contrast", "light", known) == "high-contrast"
    assert themes.choose(many, "auto", "gone", known) == "dark"
    assert themes.choose({**many, "NO_COLOR": "1"}, "high-contrast", "light", known) == "plain"


def test_the_wheel_holds_the_themes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(themes.__file__).parents[3]
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=root, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".toml")} == {f"gpuboard/board/themes/{name}.toml" for name in ALL}


async def test_the_palette_shows_a_theme_while_it_is_highlighted_and_escape_brings_the_old_one_back(
    tmp_path: Path,
    core: Core,
) -> None:
    async with board(core) as (app, pilot):
        assert (app.theme, app.look) == ("dark", ours()["dark"].look(UNICODE))
        await pilot.press("ctrl+t")
        await settle(pilot, lambda: isinstance(app.screen, CommandPalette) and "Colour-blind" in screen(app))
        assert app.theme == "dark"  # the first in the list, then the others by name
        await pilot.press("down")
        await settle(pilot, lambda: app.theme == "colour-blind")
        await pilot.press("down", "down")
        await settle(pilot, lambda: app.theme == "light")
        assert app.look == ours()["light"].look(UNICODE)
        await pilot.press("escape")
        await settle(pilot, lambda: app.theme == "dark")
        assert app.look == ours()["dark"].look(UNICODE)
        assert app.preferences.theme is None
        await pilot.press("ctrl+p", *"high")
        await settle(pilot, lambda: app.theme == "high-contrast")
        await pilot.press("enter")
        await settle(pilot, lambda: not isinstance(app.screen, CommandPalette))
        await settle(pilot, lambda: app.preferences.theme == "high-contrast")
        assert app.theme == "high-contrast"
        await pilot.press("q")
    again = BoardApp(make_core(tmp_path))
    assert again.theme == "high-contrast"
    again.core.close()


def test_an_exact_theme_has_no_colour_of_the_terminal() -> None:
    assert {name for name, theme in ours().items() if theme.exact} == set(COLOURED)


async def test_textual_has_nothing_to_translate_in_lines_of_an_exact_theme(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("space")  # a selected row, too
        await settle(pilot, lambda: "1 selected" in screen(app))
        for name in COLOURED:
            app.use_theme(name)
            await pilot.pause()
            translation = ANSIToTruecolor(app.ansi_theme)
            drawn = [widget for kind in (Grid, Pane) for widget in app.screen.query(kind) if widget.size.height]
            assert len(drawn) >= 3
            for widget in drawn:
                assert not any(isinstance(one, ANSIToTruecolor) for one in widget.get_line_filters()), name
                for line in widget.render_lines(widget.size.region):
                    assert [*line] == translation.apply([*line], widget.background_colors[1]), name


async def test_the_cells_of_states_have_the_theme_s_colours(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        assert _color_of(app, "F") == "#57d38c"
        app.use_theme("light")
        await settle(pilot, lambda: _color_of(app, "F") == "#116329")


PLACES = {
    "slash s t a": "tab: state:", "r": "e.g. H100", "x": "e.g. train.py", "C": "Columns of the table",
    "ctrl+p": "Search for",
}  # fmt: skip


async def test_examples_suggestions_and_disabled_buttons_can_be_read_too(tmp_path: Path) -> None:
    poor: set[str] = set()
    async with board(make_core(tmp_path), size=(110, 34)) as (app, pilot):
        for name in COLOURED:
            app.use_theme(name)
            for keys, words in PLACES.items():
                await pilot.press(*keys.split())
                await settle(pilot, lambda words=words: words in screen(app))  # type: ignore[misc]
                poor |= {f"{name}: {text}" for text in _poor_texts(app)}
                await pilot.press("escape")
                await settle(pilot, lambda words=words: words not in screen(app))  # type: ignore[misc]
    assert poor == set()


async def test_the_cursor_of_a_list_and_a_disabled_button_are_visible(tmp_path: Path) -> None:
    async with board(make_core(tmp_path), size=(110, 34)) as (app, pilot):

        def stands_out(line: str) -> bool:
            return any(_stands_out(segment) for segment in _segments(app) if segment.text.strip() == line)

        for name in ("plain", "terminal"):
            app.use_theme(name)
            await pilot.press("y")
            await settle(pilot, lambda: stands_out("UUIDs"))
            await pilot.press("escape", "ctrl+p")
            await settle(pilot, lambda: stands_out("Reserve"))
            await pilot.press("escape", "x")
            await settle(pilot, lambda: re.search(r"Cancel +Launch *│", screen(app)))
            await pilot.press("escape")


def _stands_out(segment: Segment) -> bool:
    style = segment.style
    return bool(style and (style.underline or style.reverse or (style.bgcolor and not style.bgcolor.is_default)))


def _poor_texts(app: BoardApp) -> set[str]:
    """Return the texts on the screen, or in the dialog on top, that are too faint."""
    top = app.screen.children[0] if isinstance(app.screen, ModalScreen) else app.screen
    poor: set[str] = set()
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        x = 0
        for segment in strip:
            x += segment.cell_length
            style = segment.style
            if style is None or style.color is None or style.bgcolor is None or not top.region.contains(x - 1, y):
                continue
            found = contrast(Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor))
            if any(map(str.isalnum, segment.text)) and found < 4.5:
                poor.add(f"{segment.text.strip()} {found:.1f}")
    return poor


async def test_one_toast_reports_bad_theme_files_and_an_unknown_theme(tmp_path: Path) -> None:
    core = make_core(tmp_path, settings=Settings(theme="mine"))
    folder = Path(core.env["XDG_CONFIG_HOME"]) / "gpuboard" / "themes"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("like = 'dark'\n[states]\nfree = '[/x]'\n")
    (folder / "worse.toml").write_text("=")
    async with board(core) as (app, _):
        (toast,) = notifications(app)
        assert toast.message.splitlines()[0] == (
            "mine.toml: states.free = '[/x]' is not a colour; write #57d38c, ansi_green or a CSS name"
        )
        assert toast.message.splitlines()[1].startswith("worse.toml: not valid TOML")
        assert toast.message.splitlines()[2].startswith("theme = 'mine' is not one of: auto, ")
        assert app.theme == "dark"


async def test_with_no_color_nothing_is_coloured(tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    core.env = {**environment(tmp_path), "NO_COLOR": "1"}
    async with board(core) as (app, pilot):
        assert app.theme == "plain"
        for key, kind in (("", ClusterScreen), ("question_mark", HelpScreen), ("ctrl+p", CommandPalette)):
            await pilot.press(*filter(None, [key]))
            await settle(pilot, lambda: isinstance(app.screen, kind))  # noqa: B023
            coloured = {str(s.style) for s in _segments(app) if s.style and (s.style.color or s.style.bgcolor)}
            assert coloured == set(), key
        await pilot.press("escape", "escape")
        app.use_theme("light")
        await settle(pilot, lambda: app.theme == "light" and isinstance(app.screen, ClusterScreen))
        assert not any(s.style and (s.style.color or s.style.bgcolor) for s in _segments(app))


async def test_the_plain_theme_takes_all_colour_away_when_it_is_chosen(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        assert any(s.style and s.style.color for s in _segments(app))
        app.use_theme("plain")
        await settle(pilot, lambda: not any(s.style and s.style.color for s in _segments(app)))
        assert re.search(r"sim01 +up +F +─+ +0% B .*F +─+ +0% F +─", screen(app))


def _segments(app: BoardApp) -> list[Segment]:
    return [segment for strip in app.screen._compositor.render_strips() for segment in strip]


def _color_of(app: BoardApp, letter: str) -> str:
    for segment in _segments(app):
        if segment.text.strip() == letter and segment.style and segment.style.color and segment.style.color.triplet:
            return segment.style.color.triplet.hex
    return ""


@pytest.mark.parametrize("name", ["terminal", "plain"])
async def test_what_is_wrong_with_a_node_is_not_dim_in_its_dim_row(tmp_path: Path, name: str) -> None:
    nodes = [node("gpu1", [gpu("gpu1", 0)]), node("gpu2", [gpu("gpu2", 0)], state="stale", error="no answer")]
    async with still(tmp_path, scene(*nodes), (100, 30), settings=Settings(theme=name)) as (app, _):
        styles = [segment.style for segment in _segments(app) if "no answer" in segment.text]
        assert styles and not any(style is None or style.dim for style in styles)


@pytest.mark.parametrize("name", ALL)
def test_the_cursor_has_a_background(name: str) -> None:
    cursor = themes.load_all({})[0][name].styles["cursor"]
    assert cursor.reverse or cursor.bgcolor is not None


async def test_the_cursor_of_the_terminal_theme_colours_no_blanks(tmp_path: Path) -> None:
    shown = scene(node("gpu1", [gpu("gpu1", 0)]), node("gpu2", [gpu("gpu2", 0)]))
    async with still(tmp_path, shown, (160, 48), settings=Settings(theme="terminal")) as (app, _):
        cursor = [one for one in _segments(app) if one.style and one.style.reverse]
        usual = {one.style.color for one in _segments(app) if one.style and one.text.strip() == "gpu2"}
        assert [one.text for one in cursor if one.text.strip()]
        assert {one.style.color for one in cursor if one.style and not one.text.strip()} <= usual


async def test_the_high_contrast_theme_underlines_no_blanks_of_own_leases(tmp_path: Path) -> None:
    gpus = [gpu("gpu1", k, "reserved", utilization=50, links={f"GPU-gpu1-{1 - k}": 12}) for k in range(2)]
    nodes = [node("gpu1", gpus), node("gpu2", [gpu("gpu2", 0)])]
    own = [lease("k3f9", "me", [("gpu1", 0), ("gpu1", 1)]), lease("k3fa", "me", [("gpu2", 0)])]
    shown = scene(*nodes, leases=own, uids={"gpu1": 1001, "gpu2": 1001})
    async with still(tmp_path, shown, (160, 48), settings=Settings(theme="high-contrast")) as (app, pilot):

        def of_role() -> list[str]:
            found = [s for s in _segments(app) if s.style and s.style.underline]
            return [s.text for s in found if s.style and s.style.bgcolor != app.look.style("cursor").bgcolor]

        for keys, words in (((), "me"), (("v",), "me"), (("escape", "enter"), "NV12"), (("escape", "l"), "k3fa")):
            await pilot.press(*keys)
            await settle(pilot, lambda words=words: words in map(str.strip, of_role()))  # type: ignore[misc]
            underlined = of_role()
            assert not [text for text in underlined if text != text.strip()]
            assert not set("".join(underlined)) & set("━╸─"), "a line below a bar"


async def test_the_plain_theme_underlines_no_blanks(tmp_path: Path) -> None:
    gpus = [
        gpu("gpu1", 0, "reserved", utilization=50),
        gpu("gpu1", 1, "broken"),
        gpu("gpu1", 2, "allocated"),
        busy("gpu1", 3),
    ]
    nodes = [node("gpu1", gpus), node("gpu2", [gpu("gpu2", 0, name="NVIDIA A100-SXM4-80GB")])]
    async with still(tmp_path, scene(*nodes), settings=Settings(theme="plain")) as (app, pilot):
        for size in ((80, 24), (100, 40), (160, 48)):
            await pilot.resize_terminal(*size)
            underlined = [segment.text for segment in _segments(app) if segment.style and segment.style.underline]
            assert {"R", "X", "A"} <= {text.strip() for text in underlined}
            assert not [text for text in underlined if not text.strip() or text[0] == " "]
            assert not set("".join(underlined)) & set("━╸─"), "a line below a meter"
