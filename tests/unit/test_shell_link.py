"""Output of a node's shell, split anywhere and with any text inserted, is read or ends the link."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.model.reading import Hello, Pushed, Reading, Static
from gpuboard.shellprobe import readings
from gpuboard.shellprobe.link import ShellLink
from gpuboard.shellprobe.script import COMMAND, SCRIPT, Frames, MalformedFrame, ShellFrame
from gpuboard.transport.base import TransportError
from tests.unit.test_smi_properties import TEXT

LISTING = (Path(__file__).parent.parent / "data/nvidia-smi/v13-h100-590.xml").read_bytes()
BUSY = "GPU-5eed0001-0000-4000-8000-000000000001"
HELLO = b"hostname n1\nuid 1001\nuser alice\npid 7\nboot b\n0::/system.slice/slurmstepd.scope/job_5/step_extern\n"
FACTS = (
    b"\n@N names\n/proc/4242/status:Name:\tpython\n/proc/4242/status:Uid:\t1002\t1002\t1002\t1002\n"
    b"/proc/99/status:Name:\tXorg\n/proc/99/status:Uid:\t0\t0\t0\t0\n"
    b"\n@N groups\n/proc/4242/cgroup:0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"
    b"/proc/99/cgroup:0::/docker/" + b"ab" * 32 + b"\n"
    b"\n@N stats\n/proc/4242/stat:4242 (two\n/proc/4242/stat:lines) S 1 " + b"0 " * 17 + b"5000 0 0\n"
    b"\n@N args\n 4242 python train.py --lr 3e-4\n   99 /usr/lib/xorg/Xorg :0\n"
    b"\n@N users\nbob:x:1002:1002::/home/bob:/bin/sh\n"
    b"\n@N host\nat 1795283079\nhz 100\n3.73 4.56 3.79 14/336 17373\ncpu  10 0 10 80 0 0 0 0 0 0\nbtime 1795257384\n"
    b"MemTotal:       1000 kB\nMemAvailable:   400 kB\n"
    b"\n@N end 0\n"
)


class Wire:
    """A channel without a node, and a link on it that records its messages."""

    def __init__(self) -> None:
        self.written = b""
        self.messages: list[Pushed] = []
        self.error: TransportError | None = None
        self.link = ShellLink("n1", "no python3", None, self.messages.append, self._ended)
        self.link.attach(self)
        self.nonce = self.written.removeprefix(SCRIPT).strip()

    def _ended(self, error: TransportError) -> None:
        self.error = error

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        """Nothing to close."""

    def receive(self, data: bytes) -> None:
        self.link.received(data.replace(b"@N ", b"@" + self.nonce + b" "))


def transcript(listing: bytes = LISTING) -> bytes:
    return b"\n@N hello\n" + HELLO + b"\n@N end 0\n\n@N messages\n\n@N listing\n" + listing + FACTS


def free(messages: list[Pushed]) -> set[str]:
    found = [message for message in messages if isinstance(message, Reading)]
    return {gpu.uuid for reading in found for gpu in reading.gpus if gpu.processes == [] and gpu.error is None}


def test_the_command_line_has_no_character_that_a_shell_would_read() -> None:
    inside = COMMAND.removeprefix("exec sh -c '").removesuffix("'")
    assert not set(inside) & set("!\\`\n'")
    assert SCRIPT.count(b"\n") == 2


def test_processes_are_described_as_the_agent_does() -> None:
    wire = Wire()
    wire.receive(transcript())
    hello, reading = wire.messages[0], wire.messages[-1]
    assert isinstance(hello, Hello)
    assert isinstance(reading, Reading)
    assert (hello.hostname, hello.uid, hello.pid, hello.job) == ("n1", 1001, 7, "5")
    python, xorg = reading.gpus[1].processes or []
    assert (python.user, python.uid, python.name, python.job) == ("bob", 1002, "python", "77")
    assert (python.command, python.started) == ("python train.py --lr 3e-4", 1795257434.0)
    assert (xorg.user, xorg.uid, xorg.container) == (None, 0, "ab" * 6)  # root in a container: the owner is unknown
    assert (reading.load1, reading.memory_used, reading.memory_total) == (3.73, 600 * 1024, 1000 * 1024)
    assert wire.written.endswith(b"\n-q -x\n")


@given(st.lists(st.integers(1, 400), max_size=60))
def test_messages_do_not_depend_on_how_bytes_are_split(sizes: list[int]) -> None:
    wire, data = Wire(), transcript()
    data = data.replace(b"@N ", b"@" + wire.nonce + b" ")
    for size in sizes:
        wire.receive(data[:size])
        data = data[size:]
    wire.receive(data)
    assert [type(message) for message in wire.messages] == [Hello, Static, Reading]
    assert wire.error is None


@settings(max_examples=120)
@given(st.integers(0, len(transcript())), TEXT, st.booleans())
def test_text_inserted_anywhere_is_read_or_ends_the_link(at: int, text: str, ours: bool) -> None:
    data, wire = transcript(), Wire()
    put = text.encode("utf-8", "surrogatepass")
    wire.receive(data[:at] + (b"\n@N " if ours else b"") + put + data[at:])
    assert BUSY not in free(wire.messages)


@given(st.dictionaries(st.sampled_from(["names", "groups", "stats", "args", "users", "host"]), TEXT))
def test_no_text_makes_the_readers_raise(sections: dict[str, str]) -> None:
    readings.processes(sections)
    readings.host(sections, (1, 100))


def test_frames_are_split_at_marked_lines_only() -> None:
    frames = Frames(b"ff")
    assert frames.take(b"noise\n@ee listing\n\n@ff listing\nline @ff end 0\n@ee end 0\n\n@ff end 137") == []
    assert frames.take(b"\n") == [ShellFrame({"listing": b"line @ff end 0\n@ee end 0\n"}, 137)]
    assert frames.take(b"\n@ff end x\n\n@ff end 0\n") == [ShellFrame({}, -1), ShellFrame({}, 0)]
    with pytest.raises(MalformedFrame, match="start-up files"):
        Frames(b"ff").take(b"x" * 70000)
