"""What is kept between starts, and that a file in whatever state stops nothing."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from gpuboard.board import preferences
from gpuboard.board.arrange import ViewState
from gpuboard.board.filter.language import TEXT_MAX
from gpuboard.board.preferences import Preferences, ProcessOrder, SavedFilter
from tests.board.lab import board, make_core, notifications, settle
from tests.waiting import until

OTHER = Preferences(
    theme="light",
    view=ViewState(view="table", sort="power", reverse=True, group="model", filter="a b"),
    span="24 h",
    columns=("node", "user:14", "reason"),
    processes=ProcessOrder("memory", reverse=True, tree=True),
)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def test_what_was_kept_comes_back_from_a_private_file(env: dict[str, str]) -> None:
    assert preferences.load(env) == (Preferences(), None)
    assert preferences.save(env, OTHER) is None
    assert preferences.load(env) == (OTHER, None)
    file = preferences.path(env)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert os.listdir(file.parent) == ["board.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"theme": 3}', b'{"view": {"sort": []}}', b"\xff\xfe", b"x" * 5_000_000,
     b"[" * 60_000, b"{" * 100_000],
)  # fmt: skip
def test_garbage_is_skipped_and_reported(env: dict[str, str], content: bytes) -> None:
    file = preferences.path(env)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    what = ": larger than 4096 KiB" if len(content) > 4 << 20 else " is not valid"
    assert preferences.load(env) == (Preferences(), f"{file}{what}; using default sort, filter and theme")
    assert preferences.save(env, OTHER, Preferences()) is None
    assert preferences.load(env) == (OTHER, None)
    assert file.with_name("board.json.bad").read_bytes() == content  # perhaps saved filters with a typing error


@pytest.mark.parametrize(
    "view",
    [{"view": "globe"}, {"group": "age"}, {"sort": "luck"}, {"filter": "x" * 2000}, {"view": "table", "sort": "?"}],
)
def test_a_view_of_another_version_is_passed_over(env: dict[str, str], view: dict[str, str]) -> None:
    file = preferences.path(env)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"theme": "light", "view": view, "of a later version": 1}))
    assert preferences.load(env) == (Preferences(theme="light"), None)


def test_a_file_that_cannot_be_read_or_written_is_reported(env: dict[str, str]) -> None:
    file = preferences.path(env)
    file.mkdir(parents=True)  # root may read and write everything, but no folder as a file
    assert preferences.load(env) == (Preferences(), f"{file}: Is a directory; using default sort, filter and theme")
    assert preferences.save(env, OTHER) == f"{file}: Is a directory; sort, filter and theme were not saved"
    assert os.listdir(file.parent) == ["board.json"]
    nowhere = {"XDG_STATE_HOME": "/dev/null/state"}
    wrong = preferences.save(nowhere, OTHER)
    assert wrong == "/dev/null/state/gpuboard/board.json: Not a directory; sort, filter and theme were not saved"


def test_a_board_keeps_what_another_one_has_saved_meanwhile(env: dict[str, str]) -> None:
    old, free, mine, busy = (SavedFilter(name, f"state:{name}") for name in ("old", "free", "mine", "busy"))
    began = Preferences(theme="light", filters=(old, busy))
    preferences.save(env, began)
    preferences.save(env, Preferences(theme="light", filters=(old, busy, free)), began)  # one board adds a filter,
    preferences.save(env, Preferences(theme="light", filters=(old, busy), view=OTHER.view), began)  # another sorts,
    preferences.save(env, Preferences(theme="light", filters=(mine, busy)), began)  # a third one adds and deletes
    assert preferences.load(env) == (Preferences(theme="light", filters=(busy, free, mine), view=OTHER.view), None)


def test_as_many_filters_as_can_be_saved_are_loaded(env: dict[str, str]) -> None:
    kinds = ("GPUs", "leases", "runs", "processes", "events")
    filters = [SavedFilter(f"{n}", "ä" * TEXT_MAX, rows) for rows in kinds for n in range(50)]
    assert preferences.save(env, Preferences(filters=tuple(filters))) is None
    assert preferences.load(env) == (Preferences(filters=tuple(filters)), None)


def test_of_two_filters_with_one_name_the_last_is_loaded(env: dict[str, str]) -> None:
    mine, leases, again = SavedFilter("mine", "a"), SavedFilter("mine", "b", "leases"), SavedFilter("mine", "c")
    assert preferences.save(env, Preferences(filters=(mine, leases, again))) is None
    assert preferences.load(env) == (Preferences(filters=(again, leases)), None)


def test_of_two_boards_the_last_one_wins_and_the_file_is_always_whole(env: dict[str, str]) -> None:
    both = [Preferences(theme="a" * 3000), Preferences(theme="b")]
    preferences.save(env, both[0])

    def write(kept: Preferences) -> None:
        for _ in range(200):
            assert preferences.save(env, kept) is None

    writers = [threading.Thread(target=write, args=(kept,)) for kept in both]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        kept, wrong = preferences.load(env)
        assert wrong is None
        seen.add(kept)
    assert seen <= set(both)
    assert os.listdir(preferences.path(env).parent) == ["board.json"]


def test_an_order_of_processes_of_another_version_is_passed_over(env: dict[str, str]) -> None:
    file = preferences.path(env)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"theme": "light", "processes": {"sort": "luck", "tree": True}}))
    assert preferences.load(env) == (Preferences(theme="light"), None)


async def test_a_board_looks_as_it_did_when_it_was_left(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, pilot):
        await pilot.press("t", "g")
        await settle(pilot, lambda: app.preferences.view.view == "table")
        left = app.preferences
        app.use_theme("light")
        await pilot.press("q")  # sooner than it is written by itself
    until(
        lambda: preferences.load(app.core.env) == (Preferences(theme="light", view=left.view), None),
        "what was chosen last is kept",
    )
    async with board(make_core(tmp_path)) as (again, _):
        assert (again.theme, again.preferences.view) == ("light", left.view)


async def test_what_was_chosen_just_before_a_restart_is_kept(tmp_path: Path) -> None:
    async with board(make_core(tmp_path)) as (app, _):
        app.may_restart = True
        app.use_theme("light")
        app.restart("board")
        assert preferences.load(app.core.env) == (Preferences(theme="light"), None)


async def test_an_unwritable_state_folder_is_reported_once(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    (Path(core.env["XDG_STATE_HOME"])).write_text("a file where a folder should be")
    async with board(core) as (app, pilot):
        for theme in ("light", "dark"):
            app.use_theme(theme)
            await settle(pilot, lambda: app._save_timer is not None and not app._save_timer.is_alive())
        await settle(pilot, lambda: notifications(app))
        messages = [toast.message for toast in notifications(app) if "not saved" in toast.message]
        assert messages == [f"{preferences.path(core.env)}: Not a directory; sort, filter and theme were not saved"]
