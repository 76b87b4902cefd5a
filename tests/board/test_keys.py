"""Keys: every action has an id and a key of its own; the config's [keys] changes them, and what is wrong is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from subprocess import run

import pytest
from textual.binding import Binding

from gpuboard.board import keys
from gpuboard.board.screens.help import HelpScreen
from gpuboard.config import Settings, load
from gpuboard.errors import ConfigError
from tests.board.lab import board, make_core, notifications, screen, settle

keys.load_screens()


def test_every_binding_has_an_id_of_its_own_and_a_description() -> None:
    bindings = [
        (owner, binding)
        for owner in keys._owners()
        for binding in owner.BINDINGS
        if isinstance(binding, Binding) or print(f"{owner}: {binding} is no Binding")
    ]
    bad = [
        f"{owner.__name__}: {binding.key}"
        for owner, binding in bindings
        if not re.fullmatch(r"[a-z]+\.[a-z-]+", binding.id or "") or not binding.description
    ]
    assert bad == []
    assert len(bindings) == sum(len(owner.BINDINGS) for owner in keys._owners())
    ids = [binding.id for _, binding in bindings]
    assert sorted(ids, key=str) == sorted(set(ids), key=str)


def test_no_built_in_key_takes_another_action_s() -> None:
    """A focused widget may take a key from its screen on purpose (enter opens a row), never one from the app."""
    for context in keys._contexts():
        for part in (context.screen + context.app, *(widget + context.app for widget in context.widgets)):
            ids: dict[str, str] = {}
            assert all(ids.setdefault(key, action.id) == action.id for action in part for key in action.keys)


def test_every_action_exists() -> None:
    lacking = [
        f"{owner.__name__}.{binding.action}"
        for owner in keys._owners()
        for binding in owner.BINDINGS
        if isinstance(binding, Binding) and not binding.action.startswith("app.")
        if not hasattr(owner, f"action_{binding.action.partition('(')[0].rpartition('.')[2]}")
    ]
    assert lacking == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("r", "r"), ("R", "R"), ("shift+r", "R"), ("ctrl+R", "ctrl+r"), ("?", "question_mark"), ("/", "slash"),
        ("+", "plus"), ("ctrl++", "ctrl+plus"), (",", "comma"), ("F5", "f5"), ("PageDown", "pagedown"),
        ("shift+ctrl+up", "ctrl+shift+up"), ("question_mark", "question_mark"), ("é", "é"), ("alt+x", "alt+x"),
        ("", None), (" ", None), ("foo", None), ("hyper+x", None), ("ctrl+", None), ("ctrl+ctrl+x", None),
        ("\x01", None), ("xx", None),
    ],
)  # fmt: skip
def test_keys_are_named_as_textual_names_them(text: str, key: str | None) -> None:
    assert keys.normal(text) == key


def test_valid_keys_are_remapped_and_invalid_ones_are_reported() -> None:
    config: dict[str, dict[str, str | list[str]]] = {
        "app": {"quit": ["ctrl+x", "Q"], "hepl": "h"},
        "cluster": {"sort": "space", "group": "nokey", "view": "tab"},
        "grid": {"up": "f9", "down": "f9"},
        "dialog": {"yes": "n", "no": "y"},  # these two change places
        "leases": {"release": []},
    }
    keymap, problems = keys.remap(config)
    assert keymap == {"app.quit": "ctrl+x,Q", "grid.up": "f9", "dialog.yes": "n", "dialog.no": "y"}
    assert sorted(problems) == sorted(
        [
            "[keys] app.hepl: no such action; the help screen (?) lists the names",
            "[keys] cluster.group = 'nokey': not a key; write R, ctrl+r, f5 or question_mark",
            "[keys] leases.release = '': not a key; write R, ctrl+r, f5 or question_mark",
            "[keys] cluster.view = 'tab': this is the key of textual itself; cluster.view keeps t",
            "[keys] grid.down = 'f9': this is the key of grid.up (Up); grid.down keeps down, j",
            "[keys] cluster.sort = 'space': this is the key of grid.mark (Select); cluster.sort keeps s",
        ]
    )


def test_no_keys_cost_nothing() -> None:
    assert keys.remap({}) == keys.Remapped({}, [])


def test_the_config_takes_names_with_dots_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\n"cluster.sort" = "z"\ncluster.group = ["G", "ctrl+g"]\n[keys.app]\nquit = "Q"\n')
    configuration = load({"HOME": str(tmp_path)}, {}, file)
    assert configuration.settings.keys == {"cluster": {"sort": "z", "group": ["G", "ctrl+g"]}, "app": {"quit": "Q"}}
    assert configuration.origins["keys.cluster.sort"] == str(file)
    file.write_text("[keys]\ncluster.sort = 3\n")
    with pytest.raises(ConfigError, match=r"config\.toml: .*not a whole number"):
        load({"HOME": str(tmp_path)}, {}, file)
    file.write_text('[keys]\nsort = "z"\n')
    with pytest.raises(ConfigError, match="must be a table, not a string"):
        load({"HOME": str(tmp_path)}, {}, file)


async def test_remapped_keys_work_are_shown_and_the_old_ones_no_longer_do_it(tmp_path: Path) -> None:
    config: dict[str, dict[str, str | list[str]]] = {
        "app": {"help": "f5", "quit": "Q"},
        "cluster": {"reverse": "s", "sort": "S"},  # these two change places
        "nosuch": {"thing": "x"},
    }
    async with board(make_core(tmp_path, settings=Settings(keys=config)), (200, 60)) as (app, pilot):
        (toast,) = notifications(app)
        assert toast.message == "[keys] nosuch.thing: no such action; the help screen (?) lists the names"
        await pilot.press("question_mark", "f1", "q")
        assert app.is_running
        assert not isinstance(app.screen, HelpScreen)
        active = {key: active.binding.id for key, active in app.screen.active_bindings.items()}
        assert (active["s"], active["S"], active["f5"], active["Q"]) == (
            "cluster.reverse", "cluster.sort", "app.help", "app.quit",
        )  # fmt: skip
        assert "q" not in active
        await pilot.press("f5")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen))
        await settle(pilot, lambda: "f5" in screen(app))
        assert any("f5 Help" in " ".join(line.split()) for line in screen(app).splitlines())
        await pilot.press("escape", "Q")
        await settle(pilot, lambda: not app.is_running)
        assert app.return_code == 0


def test_config_reports_errors_in_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\n"cluster.sort" = "q"\n')
    command = [sys.executable, "-m", "gpuboard", "config", "--config", str(file)]
    words = "[keys] cluster.sort = 'q': this is the key of app.quit (Quit); cluster.sort keeps s"
    people = run(command, capture_output=True, text=True, timeout=60, check=True)
    assert people.stderr == f"gpuboard: {words}\n"
    data = run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(data.stdout)["problems"] == [words]
