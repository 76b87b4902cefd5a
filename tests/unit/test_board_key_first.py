"""Pauses of threads with much work: short ones, and one for each key."""

from __future__ import annotations

import threading

from gpuboard.board.terminal.key_first import KeyFirst


def test_a_thread_pauses_every_2_ms_and_once_for_each_key() -> None:
    now = 100.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(round(1e3 * seconds, 2))

    keys = KeyFirst(lambda: now, sleep)

    def work(milliseconds: int) -> list[float]:
        nonlocal now
        pauses.clear()
        for _ in range(milliseconds):
            now += 1e-3
            keys.make_way()
        return [*pauses]

    assert work(10) == []
    pressed = [keys.pressed]
    keys.key()
    pressed.append(keys.pressed)
    assert work(5) == [29.0, 0.05, 0.05]
    assert work(6) == [0.05] * 3
    keys.key()
    now += 0.02
    assert round(keys.quiet_s, 3) == 0.02
    assert work(3) == [9.0, 0.05]
    keys.key()
    now += 0.03
    assert work(1) == [0.05]  # it has been drawn
    now += 10.0
    assert work(10) == []
    assert [*pressed, keys.pressed] == [False, True, False]


def test_each_thread_pauses_for_a_key() -> None:
    pauses: list[str] = []
    keys = KeyFirst(lambda: 100.0, lambda _: pauses.append(threading.current_thread().name))

    def twice() -> None:
        keys.make_way()
        keys.make_way()

    keys.key()
    for name in ("a", "b"):
        thread = threading.Thread(target=twice, name=name)
        thread.start()
        thread.join()
    assert pauses == ["a", "b"]
