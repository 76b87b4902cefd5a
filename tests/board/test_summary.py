"""The header shows the free GPUs at any width."""

from __future__ import annotations

import re

import pytest

from gpuboard.board.arrange import ViewState, arrange, count
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.scene import Scene
from gpuboard.board.text.cells import width
from gpuboard.board.text.format import age, gib, pair
from gpuboard.board.widgets.header import header, picked
from gpuboard.model.gpu import short_model
from tests.board.made import GIB, awaited, busy, gpu, mig, node, scene, unread


def cluster(**changes: str) -> Scene:
    """Return a cluster with two models, a MIG GPU and an unreachable node."""
    h100 = [gpu("gpu01", 0), gpu("gpu01", 1, "reserved"), busy("gpu01", 2), gpu("gpu01", 3, "broken")]
    l40s = [gpu("gpu02", i, name="NVIDIA L40S") for i in range(3)] + [gpu("gpu02", 3, "unknown", name="NVIDIA L40S")]
    return scene(
        node("gpu01", h100, age_s=2.6, **changes),
        node("gpu02", l40s),
        node("gpu03", [mig("gpu03", 0, "free", "busy")]),
        unread("gpu04"),
    )


def texts(found: Scene, columns: int, *, tall: bool = True) -> list[str]:
    """Return the header's lines, the clock left out: it depends on where one is."""
    lines = ["".join(text for text, _ in runs) for runs in header(found, columns, tall=tall)]
    return [line[: -len("12:00:00")] if line.endswith(":00") else line for line in lines]


def test_a_wide_header_uses_two_lines() -> None:
    top, counts = texts(cluster(), 160)
    assert top.split() == ["lab", "4", "nodes", "·", "1", "unreachable", "·", "oldest", "3s", "·"]
    assert counts == (
        " H100 80GB 1 free of 4  1 reserved  1 busy  1 broken · L40S 3 free of 4  1 unknown"
        " · H100 80GB 3g.40gb 1 free of 2  1 busy"
    )


def test_states_that_have_no_room_beside_their_models_are_summed_above() -> None:
    states = ("free", "busy", "reserved", "occupied", "broken", "unknown", "free", "busy")
    many = [gpu("gpu01", k, name=f"NVIDIA Model{k} 80GB", state=state) for k, state in enumerate(states)]
    top, counts = texts(scene(node("gpu01", many)), 120)
    assert top.startswith(" lab   1 reserved · 3 busy · 1 broken · 1 unknown  ")
    assert counts.startswith(" free  Model0 1/1 · Model1 0/1 · ")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (99, " H100 80GB 1 free of 4 · L40S 3 free of 4 · H100 80GB 3g.40gb 1 free of 2      1 unreachable ·  3s"),
        (80, " free  H100 80GB 1/4 · L40S 3/4 · H100 80GB 3g.40gb 1/2     1 unreachable ·  3s"),
        (66, " free  H100 1/4 · L40S 3/4 · H100 3g.40gb 1/2  1 unreachable ·  3s"),
        (60, " 5 free of 10:  L40S 3  H100 1  …       1 unreachable ·  3s"),
        (50, " 5 free of 10:  L40S 3  …     1 unreachable ·  3s"),
        (40, " 5 free of 10       1 unreachable ·  3s"),
        (20, " 5 free of 10  "),
    ],
)
def test_a_narrow_header_drops_words_and_never_the_free_count(columns: int, line: str) -> None:
    assert [text.rstrip() for text in texts(cluster(), columns)] == [line.rstrip()]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 99, 100, 160])
def test_simulation_is_shown_at_any_width(columns: int) -> None:
    assert "SIMULATED" in "".join(texts(cluster(source="simulated"), columns))


def test_a_replay_has_one_time_and_keeps_what_is_wrong() -> None:
    stale = node("gpu01", [busy("gpu01", index) for index in range(4)], state="stale", age_s=9.0, source="simulated")
    replay = scene(stale, node("gpu02"), label="REPLAY 2026-01-31 12:00:00  10x  paused")
    for columns in (80, 100, 160):
        lines = "\n".join("".join(text for text, _ in runs) for runs in header(replay, columns, tall=True))
        assert lines.count(":00:00") == 1
        assert all(words in lines for words in ("1 stale", "paused", "SIMULATED"))


@pytest.mark.parametrize("columns", range(20, 200, 7))
def test_the_header_never_wraps(columns: int) -> None:
    for tall in (True, False):
        assert all(len(line) <= columns for line in texts(cluster(), columns, tall=tall))


@pytest.mark.parametrize("columns", range(20, 200, 7))
def test_the_filter_of_a_count_finds_exactly_what_is_counted(columns: int) -> None:
    named = [("NVIDIA A100-SXM4-80GB", "free"), ("NVIDIA A100-PCIE-40GB", "busy"), ("V's, x", "free")]
    others = [gpu("gpu05", k, state, name=name) for k, (name, state) in enumerate(named)]
    found = scene(*cluster().snapshot.nodes, node("gpu05", [*others, mig("gpu05", 4), mig("gpu05", 5, "busy")]))
    for tall in (True, False):
        for y, runs in enumerate(header(found, columns, tall=tall)):
            x = 0
            for text, _ in runs:
                if query := picked(found, columns, x, y, tall=tall):
                    matches = GPUS.parse(query).matches
                    gpus, nodes = count(arrange(found, ViewState(), matches))
                    numbers = re.findall(r"^(?:free|[ /]|of)*([0-9]+)", text)
                    if query not in {"state:mig", "state:unknown"}:  # also GPUs with devices, and nodes without GPUs
                        assert all(int(number) == gpus + nodes for number in numbers), (text, query)
                x += width(text)


def test_before_the_first_reading_it_shows_that() -> None:
    (line,) = texts(scene(awaited("gpu01"), awaited("gpu02")), 80)
    assert line.split() == ["no", "GPU", "seen", "2", "nodes", "·", "2", "connecting", "·", "oldest", "?", "·"]
    (line,) = texts(scene(awaited("gpu01"), unread("gpu02")), 80)
    assert " · 1 unreachable · 1 connecting · " in line
    assert (scene(awaited("gpu01"), unread("gpu02")).sums.unreachable, cluster().sums.connecting) == (1, 0)


def test_the_oldest_values_are_those_of_a_gpu_on_which_a_call_hangs() -> None:
    found = scene(node("gpu01", [gpu("gpu01", 0), gpu("gpu01", 1, delay_s=70.0)], age_s=2.0), node("gpu02", age_s=9.0))
    assert found.sums.oldest_s == 72.0
    assert texts(found, 160)[0].split()[-2:] == ["1m", "·"]


def test_sums_count_mig_devices_and_not_their_parents() -> None:
    counts = {count.model: dict(count.states) for count in cluster().sums.models}
    assert counts == {
        "H100 80GB": {"free": 1, "reserved": 1, "busy": 1, "broken": 1},
        "L40S": {"free": 3, "unknown": 1},
        "H100 80GB 3g.40gb": {"free": 1, "busy": 1},
    }


def test_a_mig_gpu_without_devices_is_not_free() -> None:
    empty = scene(node("gpu01", [gpu("gpu01", 0, "mig", flags=["mig"])])).sums
    assert [(count.total, count.states["free"]) for count in empty.models] == [(1, 0)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA", "NVIDIA"),
        ("", "?"),
    ],
)
def test_models_by_the_names_people_use(name: str, short: str) -> None:
    assert short_model(name) == short


def test_text_of_numbers() -> None:
    assert [age(value) for value in (None, 0.0, 1.4, 1.6, 59.4, 90.0)] == ["?", "1s", "1s", "2s", "59s", "1m"]
    assert [gib(value) for value in (None, 0, 100, GIB, 61 * GIB)] == ["?", "0", "<1", "1", "61"]
    assert [pair(None, 80 * GIB, 3), pair(7 * GIB, None, 3)] == ["  ?/80G", "  7/?G"]
