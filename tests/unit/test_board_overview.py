"""The plots of the cluster's past in the overview."""

from __future__ import annotations

import pytest

from gpuboard.board.history import FIVE_MINUTES, HOUR, Cluster, History, Span
from gpuboard.board.overview.facts import Gatherer
from gpuboard.board.overview.log import EventLog
from gpuboard.board.text.overview import past_lines, past_note
from gpuboard.board.theme.styles import ASCII, UNICODE, Glyphs
from tests.board import made


@pytest.mark.parametrize(
    ("span", "cells", "glyphs", "most"),
    [(FIVE_MINUTES, 47, UNICODE, 85), (FIVE_MINUTES, 90, ASCII, 86), (HOUR, 47, UNICODE, 300)],
)
def test_the_past_is_counted_for_each_change_of_its_plots_alone(
    span: Span, cells: int, glyphs: Glyphs, most: int
) -> None:
    counted = 0

    class Counted(History):
        def cluster(self, span: Span = FIVE_MINUTES) -> Cluster:
            nonlocal counted
            counted += 1
            return super().cluster(span)

    history, log = Counted(), EventLog({}, {}, kept=False)
    gatherer, counts = Gatherer(history, log), 0
    for second in range(300):  # then the fresh one has lost parts of its oldest bin
        free, used = second % 50 <= 30, second % 90
        gpus = [made.gpu("n", 0), made.gpu("n", 1, "busy", utilization=used)]
        shown = made.scene(made.node("n", gpus[not free :]))
        history.add(shown.snapshot, 1000.0 + second)
        found, fresh = gatherer.facts(shown, span), Gatherer(history, log).facts(shown, span)
        counted = 0
        lines = past_lines(found, cells, 8, glyphs)
        counts += counted
        assert lines == past_lines(fresh, cells, 8, glyphs)
        assert past_note(found) == f"{used / (1 + free):.0f}% utilized  {free:d} free"
    assert counts == most
