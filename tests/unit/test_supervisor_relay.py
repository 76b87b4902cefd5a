"""A rank's output on its way to the head: complete, in whole lines and characters."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from gpuboard.agent.launch.output import PIECE, Stream


def pipe() -> tuple[Stream, int]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return Stream(read_end, 0, "out"), write_end


def finish(stream: Stream, write_end: int) -> list[str]:
    os.close(write_end)
    return stream.read(0.0) or []


@given(st.text(alphabet="aé😀\n\r\x1b", max_size=200), st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_pieces_joined_are_the_output(text: str, sizes: list[int]) -> None:
    stream, write_end = pipe()
    data = text.encode()
    pieces: list[str] = []
    step = 0
    while data:
        size = sizes[step % len(sizes)]
        pieces += stream.feed(data[:size], 0.0)
        data = data[size:]
        step += 1
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces + finish(stream, write_end)) == text


def test_invalid_utf_8_is_replaced() -> None:
    stream, write_end = pipe()
    assert stream.feed(b"a\xff\n\xe2\x82", 0.0) == ["a\ufffd\n"]
    assert stream.feed(b"\xac", 0.0) == []
    assert finish(stream, write_end) == ["\u20ac"]


def test_a_progress_bar_waits_less_than_a_prompt() -> None:
    stream, write_end = pipe()
    stream.feed(b"name? ", 10.0)
    assert (stream.due(), stream.overdue(10.9), stream.overdue(11.0)) == (11.0, [], ["name? "])
    stream.feed(b"\r50%", 12.0)
    assert (stream.due(), stream.overdue(12.1), stream.overdue(12.2)) == (12.2, [], ["\r50%"])
    stream.feed(b"half", 13.0)
    stream.restart_wait(20.0)
    assert (stream.overdue(20.5), stream.overdue(21.0)) == ([], ["half"])
    assert (stream.due(), finish(stream, write_end)) == (None, [])


def test_pieces_have_a_limited_size() -> None:
    stream, write_end = pipe()
    lines = ("é" * 99 + "\n") * 2000
    pieces = stream.feed(lines.encode(), 0.0)
    assert "".join(pieces) == lines
    assert all(len(piece.encode()) <= PIECE and piece.endswith("\n") for piece in pieces)
    endless = "😀" * PIECE
    pieces = stream.feed(endless.encode(), 0.0)
    assert "".join(pieces) == endless
    assert all(len(piece.encode()) <= PIECE for piece in pieces)
    assert stream.due() is None
    finish(stream, write_end)


def test_an_empty_pipe_is_not_the_end() -> None:
    stream, write_end = pipe()
    assert stream.read(0.0) is None
    assert not stream.closed
    assert finish(stream, write_end) == []
    assert stream.closed
