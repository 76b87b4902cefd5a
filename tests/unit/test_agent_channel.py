"""The agent's end of the connection, over real pipes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from gpuboard.agent.protocol import LINE_LIMIT, AgentChannel, BadStream
from gpuboard.transport import spawn


class Pipes:
    """A channel and the client's ends of it."""

    def __init__(self) -> None:
        fd_in, self.to_agent = os.pipe()
        self.from_agent, fd_out = os.pipe()
        fd_noise, self.noise = os.pipe()
        for fd in (fd_in, fd_out, fd_noise, self.from_agent):
            os.set_blocking(fd, False)
        self.open = {fd_in, self.to_agent, self.from_agent, fd_out, fd_noise, self.noise}
        self.channel = AgentChannel(fd_in, fd_out, fd_noise)
        self.channel.nonce = "ab"

    def close(self, fd: int) -> None:
        """Close one end; each once, for another thread may have a file of that number by then."""
        self.open.remove(fd)
        os.close(fd)

    def say(self, data: bytes) -> None:
        os.write(self.to_agent, data)

    def heard(self) -> list[object]:
        try:
            data = os.read(self.from_agent, 1 << 20)
        except BlockingIOError:
            return []
        *lines, rest = data.decode().split("\n")  # as AgentLink does: other characters that end lines do not
        assert rest == ""
        assert all(line.startswith("@ab") for line in lines)
        return [json.loads(line[3:]) for line in lines]


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    for fd in list(made.open):
        made.close(fd)


def test_lines_are_reassembled(pipes: Pipes) -> None:
    pipes.say(b'{"t":"tick","in_ms":')
    assert pipes.channel.read_available() == []
    pipes.say(b'5}\n\n{"t":"call"}\n{"a"')
    assert pipes.channel.read_available() == [{"t": "tick", "in_ms": 5}, {"t": "call"}]
    assert not pipes.channel.closed


def test_the_start_line_sets_the_nonce(pipes: Pipes) -> None:
    pipes.say(b'{"t":"start","nonce":"0f","role":"node","config":{}}\n{"t":"tick"}\n')
    start = pipes.channel.read_start()
    assert start is not None
    assert (start["role"], pipes.channel.nonce) == ("node", "0f")
    assert pipes.channel.read_available() == [{"t": "tick"}]


def test_end_of_file_closes(pipes: Pipes) -> None:
    pipes.close(pipes.to_agent)
    assert pipes.channel.read_start() is None
    assert pipes.channel.closed


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xff\n"])
def test_a_client_out_of_step_is_refused(pipes: Pipes, line: bytes) -> None:
    pipes.say(line)
    with pytest.raises(BadStream):
        pipes.channel.read_available()


def test_an_endless_line_is_refused(pipes: Pipes) -> None:
    with pytest.raises(BadStream, match="longer than"):
        for _ in range(LINE_LIMIT // 65536 + 2):
            pipes.say(b"x" * 65536)
            pipes.channel.read_available()


def test_a_client_that_does_not_read_blocks_nothing_and_gets_everything_later(pipes: Pipes) -> None:
    text = "x" * 300_000  # more than a pipe holds
    pipes.channel.event("output", {"text": text})
    pipes.channel.reply(3, {"seq": 1})
    assert pipes.channel.pending > 200_000
    data = b""
    while pipes.channel.pending or not data.endswith(b"\n"):
        data += os.read(pipes.from_agent, 1 << 20)
        pipes.channel.flush()
        if not pipes.channel.pending:
            data += os.read(pipes.from_agent, 1 << 20)
            break
    first, second = data.splitlines()
    assert json.loads(first[3:])["data"]["text"] == text
    assert json.loads(second[3:]) == {"t": "reply", "id": 3, "value": {"seq": 1}}


def test_a_client_that_is_gone_closes(pipes: Pipes) -> None:
    pipes.close(pipes.from_agent)
    pipes.channel.send({"t": "hello"})
    assert (pipes.channel.closed, pipes.channel.pending > 0) == (True, True)
    pipes.channel.drain(1.0)  # returns at once: the client is gone


def test_noise_becomes_events(pipes: Pipes) -> None:
    os.write(pipes.noise, b"warning: \xff\n")
    pipes.channel.pass_noise()
    assert pipes.heard() == [{"t": "event", "kind": "stderr", "data": {"text": "warning: \ufffd\n"}}]


def test_text_outside_ascii_and_line_ends_stay_in_one_line(pipes: Pipes) -> None:
    pipes.channel.event("output", {"text": "ü\u2028\n\x85"})
    assert pipes.heard() == [{"t": "event", "kind": "output", "data": {"text": "ü\u2028\n\x85"}}]


def agent(data: bytes) -> tuple[int, list[bytes]]:
    done = subprocess.run(spawn.agent_command(), input=data, capture_output=True, timeout=60)
    assert done.stderr == b""
    return done.returncode, done.stdout.splitlines()


def test_an_unknown_role_is_reported_and_exits_2() -> None:
    code, lines = agent(b'{"t":"start","nonce":"0f","role":"cook","config":{}}\n')
    assert code == 2
    assert lines[0] == b""
    assert [json.loads(line[3:])["data"]["text"] for line in lines[1:]] == [
        "gpuboard agent: no role 'cook'; this agent has node, launch, head, runs\n"
    ]


def test_no_start_line_at_all_is_no_error() -> None:
    assert agent(b"") == (0, [])


def test_an_exception_in_a_role_is_sent_with_its_traceback() -> None:
    code, lines = agent(b'{"t":"start","nonce":"0f","role":"node","config":{"simulate":{"count":1}}}\n')
    assert code == 1
    text = json.loads(lines[-1][3:])["data"]["text"]
    assert text.startswith("Traceback")
    assert "KeyError: 'cluster'" in text
