"""What a feed does when its ways change while something is under way; its links are stand-ins, since no real one can
be made to speak at such moments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.feed import NodeFeed
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.timing import TIMING
from gpuboard.model.gpu import GpuReading, GpuStatic
from gpuboard.model.reading import Claim, Hello, Reading, Static
from gpuboard.model.state import Thresholds
from gpuboard.transport.base import TransportError
from gpuboard.transport.link import AgentLink

HELLO = Hello("n1", "b", 1, "alice", 7, "3.11")
STATIC = Static(gpus=[GpuStatic(0, "GPU-a", "H100", "0:1:0")])
NO_PYTHON = TransportError("no-python", "python3 cannot be started there", "install it")


class Link(AgentLink):
    """A link that says what it is told to say."""

    def __init__(self, way: str, listener: Callable[[Any], None], ended: Callable[[TransportError], None]) -> None:
        super().__init__("n1", "node", {}, listener, ended)
        self.way = way

    def says(self, *messages: Hello | Static | Reading) -> None:
        for message in messages:
            if isinstance(message, Hello):
                self.hello = message
            self._listener(message)

    def look(self, now: float) -> None:
        """Nothing to do: that of a shell."""


class Ways:
    """Stands where a Connector would."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.hosts: list[str] = []

    def open(self, node: str, host: str, *, job: str | None, listener: Any, ended: Any, **rest: Any) -> Link:
        self.hosts.append(host)
        self.links.append(Link(f"agent {job or 'ssh'}", listener, ended))
        return self.links[-1]

    def open_shell(
        self, node: str, host: str, why: str, interval_s: Any, *, job: Any, listener: Any, ended: Any
    ) -> Link:
        self.hosts.append(host)
        self.links.append(Link(f"shell {job or 'ssh'}: {why}", listener, ended))
        return self.links[-1]

    @property
    def taken(self) -> list[str]:
        return [link.way for link in self.links]


@pytest.fixture
def ways() -> Ways:
    return Ways()


def feed(ways: Ways, interval_s: float | None = 1.0) -> NodeFeed:
    return NodeFeed(
        Node("n1", "n1"),
        ways,  # type: ignore[arg-type]
        claims_dir="/var/tmp",
        thresholds=Thresholds(),
        interval_s=interval_s,
        answer_s=10.0,
        changed=lambda: None,
    )


def reading(seq: int = 1) -> Reading:
    return Reading(seq=seq, at=0.0, interval_s=1.0)


def test_nothing_is_tried_before_it_is_permitted_and_everything_ends_when_it_is_not(ways: Ways) -> None:
    it = feed(ways)
    it.permit(ssh=False, jobs=[])
    it.open()
    assert (ways.taken, it.facts.closed, it.answered, it.retry_at) == ([], True, True, None)
    it.permit(ssh=True, jobs=["7"])
    assert (ways.taken, it.facts.closed, it.answered) == (["agent ssh"], False, False)
    ways.links[0].says(HELLO, STATIC, reading())
    assert it.answered
    it.permit(ssh=True, jobs=["7", "8"])
    assert len(ways.links) == 1  # it may stay
    it.permit(ssh=False, jobs=[])
    assert ways.links[0].over is not None
    assert (it.facts.closed, it.facts.error, it.link, it.retry_at) == (True, None, None, None)
    it.look(time.monotonic() + 1000)
    assert len(ways.links) == 1


def test_steps_are_asked_for_by_the_schedulers_name_of_the_node_and_ssh_by_ours(ways: Ways) -> None:
    it = feed(ways)
    it.permit(ssh=False, jobs=["7"], known_as="gpu01")
    ways.links[0]._ended(NO_PYTHON)
    it.permit(ssh=True, jobs=[], known_as="gpu01")
    assert list(zip(ways.taken, ways.hosts, strict=True)) == [
        ("agent 7", "gpu01"),
        ("shell 7: python3 cannot be started there; install it", "gpu01"),
        ("agent ssh", "n1"),
    ]


def test_what_a_link_says_after_it_was_left_is_not_heard(ways: Ways) -> None:
    it = feed(ways)
    it.open()
    ways.links[0].says(HELLO, STATIC, reading(1))
    it.permit(ssh=False, jobs=["7"])
    assert ways.taken == ["agent ssh", "agent 7"]
    ways.links[0].says(HELLO, STATIC, reading(2))
    ways.links[0]._ended(TransportError("lost", "late"))
    assert it.facts.reading is not None
    assert (it.facts.reading.seq, it.facts.error) == (1, None)
    assert it.facts.known.keys() == {"GPU-a"}


def test_gpus_that_a_job_does_not_show_are_not_lost_and_one_that_it_shows_no_more_is(ways: Ways) -> None:
    it = feed(ways)
    it.open()
    others = Static(gpus=[GpuStatic(0, "GPU-b", "H100", "0:2:0"), GpuStatic(1, "GPU-c", "H100", "0:3:0")])
    ways.links[0].says(HELLO, STATIC)
    ways.links[0].says(msgspec.structs.replace(HELLO, job="7"), others)
    assert it.facts.known.keys() == {"GPU-b", "GPU-c"}
    ways.links[0].says(Static(gpus=others.gpus[:1]))
    assert it.facts.known.keys() == {"GPU-b", "GPU-c"}


def test_a_link_that_becomes_narrower_is_noticed_and_remembered_over_connections(ways: Ways) -> None:
    one = feed(ways)
    one.open()
    wide, narrow = (
        [msgspec.structs.replace(reading(seq), gpus=[GpuReading("GPU-a", pcie_width=width)]) for seq in (1, 2)]
        for width in (16, 4)
    )
    ways.links[0].says(HELLO, STATIC, *wide)
    assert one.facts.narrow == {}
    ways.links[0].says(narrow[0])
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    ways.links[0].says(narrow[1])
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    ways.links[0].says(HELLO, STATIC, narrow[0])  # a new agent there
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    ways.links[0].says(msgspec.structs.replace(HELLO, boot_id="c"), STATIC, wide[0], *narrow)
    ways.links[0].says(msgspec.structs.replace(HELLO, boot_id="d"), STATIC, narrow[0], wide[0], narrow[0])
    assert list(one.facts.narrow) == ["GPU-a"]
    one.close()


def test_without_python_a_shell_is_opened_at_once_and_the_agent_tried_again_later(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = feed(ways)
    it.open()
    ways.links[0].drop(NO_PYTHON)
    shell = "shell ssh: python3 cannot be started there; install it"
    assert (ways.taken, it.facts.error, it.answered) == (["agent ssh", shell], None, False)
    ways.links[1].says(HELLO, STATIC, reading())
    later = time.monotonic() + TIMING.agent_again_s + 1
    ways.links[1].last_line = later
    it.look(later - 10)
    assert len(ways.links) == 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    it.look(later)
    assert ways.taken[2:] == ["agent ssh"]
    ways.links[2].drop(NO_PYTHON)
    assert ways.taken[3:] == [shell]
    assert (it.facts.error, it.facts.reading) == (None, reading())


def test_also_who_looks_once_is_led_to_the_shell_and_told_when_that_fails_too(ways: Ways) -> None:
    it = feed(ways, interval_s=None)
    it.open()
    ways.links[0].drop(NO_PYTHON)
    ways.links[1].drop(TransportError("no-python", "nor is there nvidia-smi"))
    assert it.facts.error == "python3 cannot be started there, nor is there nvidia-smi; install it"
    assert (it.answered, it.retry_at, len(ways.links)) == (True, None, 2)


def test_a_node_that_wants_a_job_is_asked_again_when_there_is_one_and_not_before(ways: Ways) -> None:
    it = feed(ways)
    it.open()
    it.permit(ssh=True, jobs=[])
    before = time.monotonic()
    ways.links[0].drop(TransportError("no-job", "no job there"))
    assert it.retry_at is not None
    assert before + TIMING.no_job_s <= it.retry_at <= time.monotonic() + TIMING.no_job_s
    it.permit(ssh=True, jobs=[])
    it.look(time.monotonic() + TIMING.no_job_s - 10)
    assert (len(ways.links), it.facts.error) == (1, "no job there")
    it.permit(ssh=True, jobs=["7"])
    assert (ways.taken, it.facts.error) == (["agent ssh"] * 2, None)


def test_refused_ssh_leads_through_a_job_at_once_without_a_word(ways: Ways) -> None:
    it = feed(ways)
    it.permit(ssh=True, jobs=["7"])
    ways.links[0].drop(TransportError("auth", "no key was accepted"))
    assert (ways.taken, it.facts.error) == (["agent ssh", "agent 7"], None)
    ways.links[1].drop(TransportError("no-job", "it has ended"))
    assert it.facts.error == "it has ended"  # until the scheduler says so, too
    it.permit(ssh=False, jobs=[])
    assert it.facts.closed
    assert it.facts.error is None


def test_how_long_a_gpu_is_unused_begins_anew_with_a_lease_that_was_not_there(ways: Ways) -> None:
    def say(*leases: str, **more: Any) -> float:
        """Read the node with these leases on its GPU; return for how long it is unused, an hour ago being the first."""
        claims = [Claim(lease, "GPU-a", 7, "alice", "live", since=0.0, until=9.0) for lease in leases]
        ways.links[0].says(Reading(2, 0.0, 1.0, gpus=[GpuReading("GPU-a", processes=[])], claims=claims, **more))
        unused_s = time.monotonic() - it.facts.last_busy["GPU-a"]
        it.facts.last_busy["GPU-a"] = time.monotonic() - 3600
        return unused_s

    it = feed(ways)
    it.open()
    ways.links[0].says(HELLO, STATIC)
    say()
    assert say() > 3000
    assert say("k1") < 3000
    assert say("k1") > 3000
    assert say(claims_error="no answer") > 3000  # nothing was read of it
    assert say("k1") > 3000
    assert say("k1", "k2") < 3000
    assert say("k2") > 3000


def test_a_closed_feed_opens_nothing_more(ways: Ways) -> None:
    it = feed(ways)
    it.open()
    it.close()
    ways.links[0]._ended(NO_PYTHON)
    it.permit(ssh=True, jobs=["7"])
    it.look(time.monotonic() + 1000)
    assert len(ways.links) == 1
