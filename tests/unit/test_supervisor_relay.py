"""A rank's output on its way to the head: complete, in whole lines and characters."""

from __future__ import annotations

import base64
import os

from hypothesis import given
from hypothesis import strategies as st

from gpuboard.agent.launch.output import PIECE, Stream, content


def pipe() -> tuple[Stream, int]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return Stream(read_end, 0, "out"), write_end


def finish(stream: Stream, write_end: int) -> list[bytes]:
    os.close(write_end)
    return stream.read(0.0) or []


@given(st.text(alphabet="aé😀\n\r\x1b", max_size=200), st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_pieces_joined_are_the_output(text: str, sizes: list[int]) -> None:
    stream, write_end = pipe()
    data = text.encode()
    pieces: list[bytes] = []
    step = 0
    while data:
        size = sizes[step % len(sizes)]
        pieces += stream.feed(data[:size], 0.0)
        data = data[size:]
        step += 1
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces + finish(stream, write_end)) == text.encode()


@given(st.lists(st.binary(max_size=6) | st.sampled_from(["\u20ac".encode(), b"\n", b"\xf0\x9f"]), max_size=30))
def test_bytes_that_are_no_text_are_unchanged(parts: list[bytes]) -> None:
    stream, write_end = pipe()
    pieces = []
    for part in parts:
        pieces += stream.feed(part, 0.0) if part else stream.overdue(10.0)
    pieces += finish(stream, write_end)
    events = [content(piece) for piece in pieces]
    written = [base64.b64decode(e["data"]) if "data" in e else e["text"].encode() for e in events]
    assert b"".join(written) == b"".join(parts)


def test_a_character_is_not_cut() -> None:
    stream, write_end = pipe()
    assert stream.feed("a\u20ac".encode()[:-1], 0.0) == []
    assert stream.overdue(1.0) == [b"a"]
    assert stream.overdue(1.9) == []
    assert stream.overdue(2.0) == [b"\xe2\x82"], "a second later it is none"
    assert stream.feed(b"\xff\n\xe2\x82", 3.0) == [b"\xff\n"]
    assert stream.feed(b"\xac", 3.0) == []
    assert finish(stream, write_end) == ["\u20ac".encode()]
    assert content(b"a\xff") == {"data": "Yf8="}


def test_a_progress_bar_waits_less_than_a_prompt() -> None:
    stream, write_end = pipe()
    stream.feed(b"name? ", 10.0)
    assert (stream.due(), stream.overdue(10.9), stream.overdue(11.0)) == (11.0, [], [b"name? "])
    stream.feed(b"\r50%", 12.0)
    assert (stream.due(), stream.overdue(12.1), stream.overdue(12.2)) == (12.2, [], [b"\r50%"])
    stream.feed(b"half", 13.0)
    stream.restart_wait(20.0)
    assert (stream.overdue(20.5), stream.overdue(21.0)) == ([], [b"half"])
    assert (stream.due(), finish(stream, write_end)) == (None, [])


def test_pieces_have_a_limited_size() -> None:
    stream, write_end = pipe()
    lines = ("é" * 99 + "\n") * 2000
    pieces = stream.feed(lines.encode(), 0.0)
    assert b"".join(pieces) == lines.encode()
    assert all(len(piece) <= PIECE and piece.endswith(b"\n") for piece in pieces)
    endless = "😀" * PIECE
    pieces = stream.feed(endless.encode(), 0.0)
    assert b"".join(pieces) == endless.encode()
    assert all(len(piece) <= PIECE and "text" in content(piece) for piece in pieces)
    assert stream.due() is None
    finish(stream, write_end)


def test_an_empty_pipe_is_not_the_end() -> None:
    stream, write_end = pipe()
    assert stream.read(0.0) is None
    assert not stream.closed
    assert finish(stream, write_end) == []
    assert stream.closed
