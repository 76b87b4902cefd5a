"""Sequences that are made when they are first looked at."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from gpuboard.model.late import Late, base_of, plain


def test_elements_are_made_once_and_only_when_looked_at() -> None:
    calls: list[int] = []

    def make() -> list[str]:
        calls.append(1)
        return ["a2", "b2"]

    late = Late(["a1", "b1"], make)
    assert (len(late), bool(late), base_of(late), calls) == (2, True, ["a1", "b1"], [])
    assert (late[0], late[-1], late[1:], [*late], [*reversed(late)]) == ("a2", "b2", ["b2"], ["a2", "b2"], ["b2", "a2"])
    assert late == ["a2", "b2"] == late
    assert late == Late([], lambda: ["a2", "b2"])
    assert late != ["a1", "b1"]
    assert calls == [1]
    assert base_of(["x"]) == ["x"]


def test_two_threads_get_the_same_elements() -> None:
    together = threading.Barrier(4)

    def make() -> list[object]:
        time.sleep(0.01)  # others come meanwhile
        return [object()]

    late = Late([object()], make)
    found: list[object] = []

    def look() -> None:
        together.wait()
        found.append(late[0])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1
    assert len(found) == 4


def test_elements_may_be_made_of_other_ones() -> None:
    below = Late([1], lambda: [2])
    assert Late([0], lambda: [3 * one for one in below])[0] == 6


def test_they_are_encoded_as_lists() -> None:
    assert msgspec.json.encode({"gpus": Late([1], lambda: [2])}, enc_hook=plain) == b'{"gpus":[2]}'
    with pytest.raises(NotImplementedError):
        msgspec.json.encode(object(), enc_hook=plain)
