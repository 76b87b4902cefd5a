"""When passes of the cycle collector are made: between keys, and seldom."""

from __future__ import annotations

from gpuboard.board.terminal.gc import Passes


def test_passes_wait_for_the_end_of_typing_and_reach_older_objects_at_times() -> None:
    now = 100.0
    made: list[int] = []
    key_at = 0.0
    frozen: list[float] = []
    passes = Passes(lambda: now - key_at, lambda: now, made.append, lambda: frozen.append(now))

    def at(seconds: float) -> list[int]:
        nonlocal now
        now = 100.0 + seconds
        made.clear()
        passes.make()
        return [*made]

    assert [at(seconds) for seconds in (5, 9.9, 10, 11)] == [[], [], [0], []]
    for second in range(12, 60):
        now = 100.0 + second
        key_at = now
        assert at(second + 0.9) == []
    assert at(61.0) == [0]
    generations = [at(61.0 + 10 * number)[0] for number in range(1, 51)]
    assert [generations.count(each) for each in (0, 1, 2)] == [40, 8, 2]
    assert frozen == [110.0]  # after the first pass, never again
