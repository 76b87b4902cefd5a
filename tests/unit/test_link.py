"""The protocol without I/O: bytes in, messages and errors out, whatever a node sends."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.model.reading import LateDelta, Pushed, Reading
from gpuboard.model.replies import Detail, Ends, Read, Touched
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.link import LINE_LIMIT, NOISE_LIMIT, AgentLink
from tests.waiting import until

HELLO = {"t": "hello", "hostname": "gpu01", "boot_id": "b", "uid": 1, "user": "alice", "pid": 2, "python": "3.6.8"}
READING = {"t": "reading", "seq": 1, "at": 1.5, "interval_s": 1.0}


class Wire:
    """A channel that records what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written.splitlines()]


class Setup:
    """A link over a Wire, with all its messages."""

    def __init__(self) -> None:
        self.messages: list[Pushed] = []
        self.ends: list[TransportError] = []
        self.wire = Wire()
        self.link = AgentLink("gpu01", "node", {"node": "gpu01"}, self.messages.append, self.ends.append)
        self.link.attach(self.wire)
        self.nonce = str(self.wire.lines()[0]["nonce"])

    def frame(self, message: Any) -> bytes:
        return f"@{self.nonce}{json.dumps(message)}\n".encode()

    def end(self) -> tuple[str, str] | None:
        assert len(self.ends) <= 1
        return (self.ends[0].kind, self.ends[0].words) if self.ends else None


def test_the_start_line_comes_first_with_a_new_nonce() -> None:
    one, two = Setup(), Setup()
    assert one.wire.lines() == [{"t": "start", "nonce": one.nonce, "role": "node", "config": {"node": "gpu01"}}]
    assert len(one.nonce) == 16
    assert one.nonce != two.nonce


@given(st.lists(st.integers(1, 60), max_size=30))
@settings(max_examples=60, deadline=None)
def test_messages_do_not_depend_on_how_bytes_are_split(cuts: list[int]) -> None:
    it = Setup()
    data = b"Welcome!\n" + it.frame(HELLO) + b"noise\n" + it.frame(READING) + it.frame({**READING, "seq": 2})
    for cut in cuts:
        it.link.received(data[:cut])
        data = data[cut:]
    it.link.received(data)
    assert [type(m).__name__ for m in it.messages] == ["Hello", "Reading", "Reading"]
    assert it.end() is None


def test_the_newest_of_readings_that_arrive_together_is_decoded() -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    ticket = it.link.submit("read", {})
    lines = [{**READING, "seq": 1}, {**READING, "seq": 2}, {"t": "reply", "id": 1, "value": {"seq": 2}},
             {**READING, "seq": 3}, {**READING, "seq": 4}]  # fmt: skip
    it.link.received(b"".join(f"@{it.nonce}{json.dumps(line, separators=(',', ':'))}\n".encode() for line in lines))
    assert [message.seq for message in it.messages if isinstance(message, Reading)] == [2, 4]
    assert ticket.settled


def test_a_delta_keeps_the_whole_reading_that_it_refers_to() -> None:
    it = Setup()
    lines = [HELLO, {**READING, "seq": 1}, {**READING, "seq": 2}, {"t": "delta", "seq": 3, "of": 2, "at": 3.5},
             {"t": "delta", "seq": 4, "of": 2, "at": 4.5}, {**READING, "seq": 5}]  # fmt: skip
    sent = [f"@{it.nonce}{json.dumps(line, separators=(',', ':'))}\n".encode() for line in lines]
    it.link.received(b"".join(sent[:5]))
    whole, late = it.messages[1:]
    assert isinstance(whole, Reading)
    assert isinstance(late, LateDelta)
    assert (whole.seq, late.decode().seq) == (2, 4)
    it.link.received(b"".join(sent[3:]))
    assert [type(message).__name__ for message in it.messages[3:]] == ["Reading"]


@pytest.mark.parametrize(
    ("sent", "kind", "words"),
    [
        ({"seq": "x", "of": 2, "at": 3.5}, "lost", "malformed answer: Expected `int`"),
        ({"seq": 3, "of": 2, "at": 3.5, "gpus": [[]] * 257}, "limits", "lists 257 GPUs"),
    ],
)
def test_a_delta_is_checked_when_it_is_decoded(sent: dict[str, Any], kind: str, words: str) -> None:
    it = Setup()
    it.link.received(it.frame(HELLO) + it.frame(READING))
    it.link.received(f'@{it.nonce}{{"t":"delta",{json.dumps(sent)[1:]}\n'.encode())
    late = it.messages[-1]
    assert isinstance(late, LateDelta)
    with pytest.raises(TransportError, match=words) as raised:
        late.decode()
    assert raised.value.kind == kind


def test_single_bytes_count_as_a_flood() -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    for _ in range(5000):
        it.link.received(b"x")
    assert it.end() == ("limits", "sent more data than an agent may")
    assert it.wire.closed


def test_replies_find_their_calls_in_any_order() -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    first, second, third = (it.link.submit(op, {"x": 1}) for op in ("touch", "take", "read"))
    sent = it.wire.lines()[1:]
    assert sent[0] == {"t": "call", "id": 1, "op": "touch", "args": {"x": 1}}
    it.link.received(
        it.frame({"t": "reply", "id": 2, "error": {"kind": "conflict", "message": "no", "detail": {"holder": "x"}}})
    )
    it.link.received(it.frame({"t": "reply", "id": 99, "value": 1}))
    it.link.received(it.frame({"t": "reply", "id": 1, "value": {"alive": ["a\x1b"], "lapsed": [], "missing": []}}))
    assert first.result(1, Touched) == Touched(["a"], [], [])
    with pytest.raises(CallFailed) as caught:
        second.result(1, Ends)
    assert (caught.value.kind, caught.value.message, caught.value.detail) == ("conflict", "no", Detail(holder="x"))
    with pytest.raises(LinkLost, match=r"gpu01: no answer in 0\.\d s"):
        third.result(0.01, Read)
    it.link.ended(TransportError("lost", "gone"))
    with pytest.raises(LinkLost, match="gpu01: gone"):
        third.result(1, Read)
    with pytest.raises(LinkLost, match="gpu01: gone"):
        it.link.call("read", {}, 1, Read)


def test_a_waiting_call_ends_with_the_link() -> None:
    it = Setup()
    threading.Timer(0.05, it.link.close).start()
    with pytest.raises(LinkLost, match="closed"):
        it.link.call("take", {}, 10, Ends)
    until(lambda: it.wire.closed, "the connection is closed, too")
    assert it.end() is None  # closed by this side


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"", b"[]", b"null", b'{"t":"reading"}', b'{"t":"nonsense"}',
        b'{"t":"reading","seq":"1","at":1,"interval_s":1}',
        b'{"t":"reading","seq":1,"at":1,"interval_s":NaN}', b"\xff\xfe", b"[" * 100_000, b'{"t":' * 50_000,
        b'{"t":"hello","hostname":"\xed\xa0\x80"}', b'{"t":"reply","id":1,"error":{"kind":1}}',
    ],
)  # fmt: skip
def test_a_malformed_frame_ends_the_link_with_the_reason(text: bytes) -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    it.link.received(b"@" + it.nonce.encode() + text + b"\n")
    it.link.received(it.frame(READING))
    end = it.end()
    assert end is not None
    assert end[0] == "lost"
    assert end[1].startswith("malformed answer: ")
    assert [type(m).__name__ for m in it.messages] == ["Hello"]
    assert it.wire.closed


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_no_bytes_of_a_node_raise(data: bytes) -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    it.link.received(b"@" + it.nonce.encode() + data + b"\n")
    assert len(it.ends) <= 1


def test_noise_is_skipped_up_to_its_limit() -> None:
    it = Setup()
    it.link.received(b"x" * 1000 + b"\n" + b"y" * 60_000 + b"\n" + it.frame(HELLO))
    assert [type(m).__name__ for m in it.messages] == ["Hello"]
    it = Setup()
    for _ in range(NOISE_LIMIT // 1000 + 1):
        it.link.received(b"x" * 999 + b"\n")
    assert it.end() == ("lost", "malformed answer: the node's shell start-up files print more than 64 kB")


def test_a_line_without_end_is_not_kept() -> None:
    it = Setup()
    it.link.received(b"x" * (NOISE_LIMIT + 1))
    assert it.end() == ("lost", "malformed answer: a line without end")
    it = Setup()
    it.link.received(it.frame(HELLO))
    for _ in range(LINE_LIMIT // 65536 + 1):
        it.link.received(b"@" * 65536)
    assert it.end() == ("lost", "malformed answer: a line without end")


def test_the_agents_stderr_is_in_the_error() -> None:
    it = Setup()
    it.link.received(it.frame({"t": "event", "kind": "stderr", "data": {"text": "Traceback\nOSError: \x1b[2Jdisk\n"}}))
    it.link.received(it.frame({"t": "event", "kind": "stderr", "data": {"text": 5}}))
    it.link.ended(TransportError("exited", "the agent ended with exit code 1"))
    assert it.end() == ("exited", "the agent ended with exit code 1: OSError: [2Jdisk")


def test_an_agent_that_ran_is_not_without_python() -> None:
    it = Setup()
    it.link.received(it.frame(HELLO))
    it.link.received(it.frame({"t": "event", "kind": "stderr", "data": {"text": "Traceback\nOSError: disk\n"}}))
    it.link.ended(TransportError("no-python", "python3 cannot be started there", "install python3"))
    assert it.end() == ("exited", "the agent ended: OSError: disk")


def test_output_of_a_shell_that_started_no_agent_is_in_the_error() -> None:
    remedy = "the agent did not start: does `python3 --version` work on gpu01 without a terminal?"
    for printed, words in (
        (b"Welcome\nThis account is \x1b[1mnot available.\n\n", "exit code 1: This account is [1mnot available."),
        (b"Welcome\nno line end", "exit code 1: no line end"),
        (b"", "exit code 1"),
    ):
        it = Setup()
        it.link.received(printed)
        it.link.ended(TransportError("exited", "the agent ended with exit code 1"))
        assert it.end() == ("exited", f"the agent ended with {words}")
        assert it.ends[0].remedy == remedy
    it = Setup()
    it.link.received(b"Welcome\n")
    it.link.ended(TransportError("exited", "the agent ended with exit code 1: the last line of stderr"))
    assert it.end() == ("exited", "the agent ended with exit code 1: the last line of stderr")


def test_ticks_are_sent_as_lines() -> None:
    it = Setup()
    it.link.tick(413)
    assert it.wire.lines()[-1] == {"t": "tick", "in_ms": 413}


def test_nothing_is_sent_after_the_end() -> None:
    it = Setup()
    it.link.drop(TransportError("timeout", "no reading"))
    written = it.wire.written
    it.link.tick(1)
    it.link.submit("claims", {})
    assert it.wire.written == written
    assert it.end() == ("timeout", "no reading")


def test_a_frame_behind_output_without_a_line_end_is_read() -> None:
    it = Setup()
    it.link.received(b"\x1b]0;gpu01\x07" + it.frame(HELLO) + b"later " + it.frame(READING) + b"noise\n")
    assert [type(m).__name__ for m in it.messages] == ["Hello", "Reading"]
    assert it.end() is None


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([READING], "the first message is not a hello"),
        ([{"t": "static"}], "the first message is not a hello"),
        ([{"t": "reply", "id": 1}], "the first message is not a hello"),
        ([HELLO, {**HELLO, "uid": 0}], "a second hello"),
    ],
)
def test_a_link_has_one_hello_and_it_comes_first(frames: list[dict[str, Any]], words: str) -> None:
    it = Setup()
    it.link.submit("read", {})
    for frame in frames:
        it.link.received(it.frame(frame))
    end = it.end()
    assert end is not None
    assert end[1] == f"malformed answer: {words}"
