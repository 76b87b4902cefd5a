"""What a feed does when its routes change while something is under route; its links are stand-ins, because a real
one cannot be made to send at such moments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.feed import NodeFeed
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.cluster.snapshot.views import NodeFacts
from gpuboard.cluster.timing import TIMING
from gpuboard.errors import ConfigError
from gpuboard.model.gpu import GpuReading, GpuStatic, Process
from gpuboard.model.late import base_of
from gpuboard.model.reading import Claim, GpuNumbers, Hello, Pushed, Reading, ReadingDelta, Static
from gpuboard.model.state import Thresholds
from gpuboard.transport.base import TransportError
from gpuboard.transport.limits import Exceeded
from gpuboard.transport.link import AgentLink

HELLO = Hello("n1", "b", 1, "alice", 7, "3.11")
STATIC = Static(gpus=[GpuStatic(0, "GPU-a", "H100", "0:1:0")])
NO_PYTHON = TransportError("no-python", "python3 cannot be started there", "install it")


class Link(AgentLink):
    """A link that sends what a test gives it."""

    def __init__(self, route: str, listener: Callable[[Any], None], ended: Callable[[TransportError], None]) -> None:
        super().__init__("n1", "node", {}, listener, ended)
        self.route = route

    def sends(self, *messages: Pushed) -> None:
        for message in messages:
            if isinstance(message, Hello):
                self.hello = message
            self._listener(message)

    def look(self, now: float) -> None:
        """Does nothing; a shell's link has it."""


class FakeConnector:
    """Stands in for a Connector."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.hosts: list[str] = []
        self.has_ssh = True

    def open(self, node: str, host: str, *, job: str | None, listener: Any, ended: Any, **rest: Any) -> Link:
        if job is None and not self.has_ssh:
            raise ConfigError("no ssh here")
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
        return [link.route for link in self.links]


@pytest.fixture
def connector() -> FakeConnector:
    return FakeConnector()


def feed(connector: FakeConnector, interval_s: float | None = 1.0) -> NodeFeed:
    return NodeFeed(
        Node("n1", "n1"),
        connector,  # type: ignore[arg-type]
        claims_dir="/var/tmp",
        thresholds=Thresholds(),
        interval_s=interval_s,
        answer_s=10.0,
        changed=lambda: None,
    )


def reading(seq: int = 1) -> Reading:
    return Reading(seq=seq, at=0.0, interval_s=1.0)


def test_no_route_is_tried_before_it_is_permitted_and_links_end_when_none_is(connector: FakeConnector) -> None:
    it = feed(connector)
    it.permit(ssh=False, jobs=[])
    it.open()
    assert (connector.taken, it.facts.closed, it.answered, it.retry_at) == ([], True, True, None)
    it.permit(ssh=True, jobs=["7"])
    assert (connector.taken, it.facts.closed, it.answered) == (["agent ssh"], False, False)
    connector.links[0].sends(HELLO, STATIC, reading())
    assert it.answered
    it.permit(ssh=True, jobs=["7", "8"])
    assert len(connector.links) == 1  # it may stay
    it.permit(ssh=False, jobs=[])
    assert connector.links[0].over is not None
    assert (it.facts.closed, it.facts.error, it.link, it.retry_at) == (True, None, None, None)
    it.check(time.monotonic() + 1000)
    assert len(connector.links) == 1


def test_the_last_reading_of_a_node_without_a_route_counts_until_its_claims_may_have_expired(
    connector: FakeConnector,
) -> None:
    it = feed(connector)
    it.open()
    connector.links[0].sends(HELLO, STATIC, reading())
    it.permit(ssh=False, jobs=[])
    it.check(it.facts.arrived + TIMING.closed_s)
    assert it.facts.reading == reading()
    it.check(it.facts.arrived + TIMING.closed_s + 1)
    facts = it.facts
    assert (facts.reading, set(facts.known), facts.closed) == (None, {"GPU-a"}, True)


def test_a_delta_counts_on_the_link_that_has_sent_the_reading(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    first = connector.links[0]
    first.sends(HELLO, STATIC, msgspec.structs.replace(reading(7), gpus=[GpuReading("GPU-a", power=70.0)]))
    first.sends(ReadingDelta(8, 7, 1.0, [GpuNumbers(power=71.0)]), ReadingDelta(9, 7, 2.0, [GpuNumbers(power=72.0)]))
    facts = it.facts
    assert facts.reading == Reading(9, 2.0, 1.0, [GpuReading("GPU-a", power=72.0)])
    assert facts.previous == Reading(8, 1.0, 1.0, [GpuReading("GPU-a", power=71.0)])
    assert base_of(facts.reading.gpus) is base_of(facts.previous.gpus)
    for delta in (ReadingDelta(10, 9, 3.0, [GpuNumbers()]), ReadingDelta(10, 7, 3.0)):
        it = feed(connector)
        it.open()
        link = connector.links[-1]
        link.sends(HELLO, STATIC, msgspec.structs.replace(reading(7), gpus=[GpuReading("GPU-a")]), delta)
        assert it.facts.reading == Reading(7, 0.0, 1.0, [GpuReading("GPU-a")])
        it.check(time.monotonic())
        assert link.over is not None
        facts = it.facts
        assert (link.over.kind, facts.reading) == ("limits", None)
        assert f"sent changes to reading {delta.of}, which is not its last one" in (facts.error or "")


def test_a_delta_is_of_no_use_on_another_link_than_its_reading(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    connector.links[0].sends(HELLO, STATIC, msgspec.structs.replace(reading(7), gpus=[GpuReading("GPU-a")]))
    connector.links[0].drop(TransportError("lost", "reset"))
    it.check(time.monotonic() + 1000)
    with pytest.raises(Exceeded, match="sent changes to reading 7"):
        connector.links[1].sends(HELLO, STATIC, ReadingDelta(10, 7, 3.0, [GpuNumbers()]))
    assert it.facts.reading == Reading(7, 0.0, 1.0, [GpuReading("GPU-a")])


def test_a_single_reading_is_checked_at_once(connector: FakeConnector) -> None:
    it = feed(connector, None)
    it.open()
    connector.links[0].sends(HELLO, STATIC, reading(7))
    with pytest.raises(Exceeded, match="sent changes to reading 6"):
        connector.links[0].sends(ReadingDelta(8, 6, 1.0))


def test_the_last_two_readings_count_also_where_nobody_looked_at_those_before(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    link = connector.links[0]
    gpu = GpuReading("GPU-a", memory_used=0, processes=[Process(7, "compute")])
    link.sends(HELLO, STATIC, msgspec.structs.replace(reading(7), gpus=[gpu]))
    first = it.facts
    for seq in (8, 9, 10):
        link.sends(ReadingDelta(seq, 7, 1.0, [GpuNumbers(memory_used=seq)]))
    sent = time.monotonic()
    facts = it.facts
    assert facts.reading is not None
    assert facts.previous is not None
    assert [(r.seq, [gpu.memory_used for gpu in r.gpus]) for r in (facts.previous, facts.reading)] == [
        (9, [9]),
        (10, [10]),
    ]
    assert first.arrived < facts.arrived <= sent
    assert facts.last_busy == {"GPU-a": facts.arrived}
    assert it.facts is facts
    link.sends(ReadingDelta(11, 7, 1.0, [GpuNumbers()]), msgspec.structs.replace(reading(12), gpus=[]))
    last = it.facts
    assert (last.reading, last.previous and last.previous.seq) == (reading(12), 11)
    link.sends(ReadingDelta(13, 12, 1.0))
    link.drop(TransportError("limits", "sent more data than an agent may"))
    facts = it.facts
    assert facts == NodeFacts(name="n1", error=facts.error)


def test_steps_use_the_schedulers_name_of_a_node_and_ssh_uses_ours(connector: FakeConnector) -> None:
    it = feed(connector)
    it.permit(ssh=False, jobs=["7"], known_as="gpu01")
    connector.links[0]._ended(NO_PYTHON)
    it.permit(ssh=True, jobs=[], known_as="gpu01")
    assert list(zip(connector.taken, connector.hosts, strict=True)) == [
        ("agent 7", "gpu01"),
        ("shell 7: python3 cannot be started there; install it", "gpu01"),
        ("agent ssh", "n1"),
    ]


def test_messages_of_an_earlier_link_are_ignored(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    connector.links[0].sends(HELLO, STATIC, reading(1))
    it.permit(ssh=False, jobs=["7"])
    assert connector.taken == ["agent ssh", "agent 7"]
    connector.links[0].sends(HELLO, STATIC, reading(2))
    connector.links[0]._ended(TransportError("lost", "late"))
    assert it.facts.reading is not None
    assert (it.facts.reading.seq, it.facts.error) == (1, None)
    assert it.facts.known.keys() == {"GPU-a"}


def test_gpus_outside_a_job_are_not_lost_and_one_that_left_the_job_is(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    others = Static(gpus=[GpuStatic(0, "GPU-b", "H100", "0:2:0"), GpuStatic(1, "GPU-c", "H100", "0:3:0")])
    connector.links[0].sends(HELLO, STATIC)
    connector.links[0].sends(msgspec.structs.replace(HELLO, job="7"), others)
    assert it.facts.known.keys() == {"GPU-b", "GPU-c"}
    connector.links[0].sends(Static(gpus=others.gpus[:1]))
    assert it.facts.known.keys() == {"GPU-b", "GPU-c"}


def test_a_gpu_is_lost_until_a_boot_with_another_one_in_its_slot(connector: FakeConnector) -> None:
    def rebooted(boot_id: str, *gpus: GpuStatic) -> set[str]:
        connector.links[0].sends(msgspec.structs.replace(HELLO, boot_id=boot_id), Static(gpus=list(gpus)))
        return set(it.facts.known)

    it = feed(connector)
    it.open()
    a, b = STATIC.gpus[0], GpuStatic(1, "GPU-b", "H100", "0:2:0")
    rebooted("1", a, b)
    assert rebooted("2", a) == {"GPU-a", "GPU-b"}
    assert rebooted("3", a, GpuStatic(1, "GPU-c", "H100", "0:2:0")) == {"GPU-a", "GPU-c"}
    assert rebooted("4", GpuStatic(0, "GPU-d", "GB10", "")) == {"GPU-a", "GPU-c", "GPU-d"}  # its slot is unknown
    assert rebooted("5") == {"GPU-a", "GPU-c", "GPU-d"}


def test_a_gpu_that_cannot_be_read_is_listed_once(connector: FakeConnector) -> None:
    unread = GpuStatic(0, "unread-n1-0", "GPU that cannot be read", "")
    a, b = STATIC.gpus[0], GpuStatic(1, "GPU-b", "H100", "0:2:0")
    hung = [GpuReading("unread-n1-0", error="hangs"), GpuReading("GPU-b", utilization=3)]
    it = feed(connector)
    it.open()

    def shown(*gpus: GpuStatic) -> list[str]:
        connector.links[0].sends(HELLO, Static(gpus=list(gpus)), msgspec.structs.replace(reading(), gpus=hung))
        return sorted(it.facts.known)

    def read() -> list[tuple[str, str | None]]:
        assert it.facts.reading is not None
        return [(gpu.uuid, gpu.error) for gpu in it.facts.reading.gpus]

    assert shown(unread, b) == ["GPU-b", "unread-n1-0"]
    assert read() == [("unread-n1-0", "hangs"), ("GPU-b", None)]
    assert shown(a, b) == ["GPU-a", "GPU-b"]
    for _ in range(2):
        assert shown(unread, b) == ["GPU-a", "GPU-b"]
        assert read() == [("GPU-a", "hangs"), ("GPU-b", None)]
        assert it.facts.static == Static(gpus=[a, b])
    connector.links[0].sends(ReadingDelta(2, 1, 1.0, [GpuNumbers(), GpuNumbers()]))
    assert read() == [("GPU-a", "hangs"), ("GPU-b", None)]
    moved = msgspec.structs.replace(b, index=0)
    assert shown(moved) == shown() == ["GPU-a", "GPU-b"]  # GPU-a is lost, then NVML fails
    assert shown(unread) == ["GPU-a", "GPU-b"]  # and now GPU-b, which had that index last
    assert read()[0] == ("GPU-b", "hangs")
    assert shown(a, moved, msgspec.structs.replace(unread, index=7)) == ["GPU-a", "GPU-b", "unread-n1-0"]


def test_a_link_that_becomes_narrower_is_noticed_and_remembered_over_connections(connector: FakeConnector) -> None:
    one = feed(connector)
    one.open()
    wide, narrow = (
        [msgspec.structs.replace(reading(seq), gpus=[GpuReading("GPU-a", pcie_width=width)]) for seq in (1, 2)]
        for width in (16, 4)
    )
    connector.links[0].sends(HELLO, STATIC, *wide)
    assert one.facts.narrow == {}
    connector.links[0].sends(narrow[0])
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    connector.links[0].sends(narrow[1])
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    connector.links[0].sends(HELLO, STATIC, narrow[0])  # a new agent there
    assert one.facts.narrow == {"GPU-a": "PCIe x4 of x16: narrower than before"}
    connector.links[0].sends(msgspec.structs.replace(HELLO, boot_id="c"), STATIC, wide[0], *narrow)
    connector.links[0].sends(msgspec.structs.replace(HELLO, boot_id="d"), STATIC, narrow[0], wide[0], narrow[0])
    assert list(one.facts.narrow) == ["GPU-a"]
    one.close()


def test_without_python_a_shell_is_opened_at_once_and_the_agent_tried_again_later(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    connector.links[0].drop(NO_PYTHON)
    shell = "shell ssh: python3 cannot be started there; install it"
    assert (connector.taken, it.facts.error, it.answered) == (["agent ssh", shell], None, False)
    connector.links[1].sends(HELLO, STATIC, reading())
    later = time.monotonic() + TIMING.agent_again_s + 1
    connector.links[1].last_line = later
    it.check(later - 10)
    assert len(connector.links) == 2
    it.check(later)
    assert connector.taken[2:] == ["agent ssh"]
    connector.links[2].drop(NO_PYTHON)
    assert connector.taken[3:] == [shell]
    assert (it.facts.error, it.facts.reading) == (None, reading())


def test_a_one_shot_feed_falls_back_to_the_shell_and_reports_both_failures(connector: FakeConnector) -> None:
    it = feed(connector, interval_s=None)
    it.open()
    connector.links[0].drop(NO_PYTHON)
    connector.links[1].drop(TransportError("no-python", "nor is there nvidia-smi"))
    assert it.facts.error == "python3 cannot be started there, nor is there nvidia-smi; install it"
    assert (it.answered, it.retry_at, len(connector.links)) == (True, None, 2)


def test_a_node_that_requires_a_job_is_retried_when_there_is_one(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    it.permit(ssh=True, jobs=[])
    before = time.monotonic()
    connector.links[0].drop(TransportError("no-job", "no job there"))
    assert it.retry_at is not None
    assert before + TIMING.no_job_s <= it.retry_at <= time.monotonic() + TIMING.no_job_s
    it.permit(ssh=True, jobs=[])
    it.check(time.monotonic() + TIMING.no_job_s - 10)
    assert (len(connector.links), it.facts.error) == (1, "no job there")
    it.permit(ssh=True, jobs=["7"])
    assert (connector.taken, it.facts.error) == (["agent ssh"] * 2, None)


def test_refused_ssh_falls_back_to_a_job_at_once_without_an_error(connector: FakeConnector) -> None:
    it = feed(connector)
    it.permit(ssh=True, jobs=["7"])
    connector.links[0].drop(TransportError("auth", "no key was accepted"))
    assert (connector.taken, it.facts.error) == (["agent ssh", "agent 7"], None)
    connector.links[1].drop(TransportError("no-job", "it has ended"))
    assert it.facts.error == "it has ended"  # until the scheduler's answer lacks it too
    it.permit(ssh=False, jobs=[])
    assert it.facts.closed
    assert it.facts.error is None


def test_a_transport_that_cannot_be_used_is_the_nodes_error_and_raised_to_who_opens_it(
    connector: FakeConnector,
) -> None:
    it = feed(connector)
    connector.has_ssh = False
    with pytest.raises(ConfigError):
        it.open()
    it.permit(ssh=True, jobs=[])
    assert (it.answered, it.facts.error, str(it.failure), connector.links) == (True, "no ssh here", "no ssh here", [])
    it.permit(ssh=False, jobs=["7"])
    assert (it.facts.error, connector.taken) == (None, ["agent 7"])


def test_a_new_lease_restarts_the_time_that_a_gpu_is_unused(connector: FakeConnector) -> None:
    def read(*leases: str, **more: Any) -> float:
        """Read the node with these leases on its GPU, last used an hour ago; return how long it is unused then."""
        claims = [Claim(lease, "GPU-a", 7, "alice", "live", since=0.0, until=9.0) for lease in leases]
        connector.links[0].sends(Reading(2, 0.0, 1.0, gpus=[GpuReading("GPU-a", processes=[])], claims=claims, **more))
        unused_s = time.monotonic() - it.facts.last_busy["GPU-a"]
        it.facts.last_busy["GPU-a"] = time.monotonic() - 3600
        return unused_s

    it = feed(connector)
    it.open()
    connector.links[0].sends(HELLO, STATIC)
    read()
    assert read() > 3000
    assert read("k1") < 3000
    assert read("k1") > 3000
    assert read(claims_error="no answer") > 3000  # its claims were not read
    assert read("k1") > 3000
    assert read("k1", "k2") < 3000
    assert read("k2") > 3000


def test_a_closed_feed_opens_nothing_more(connector: FakeConnector) -> None:
    it = feed(connector)
    it.open()
    it.close()
    connector.links[0]._ended(NO_PYTHON)
    it.permit(ssh=True, jobs=["7"])
    it.check(time.monotonic() + 1000)
    assert len(connector.links) == 1
