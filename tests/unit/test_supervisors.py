"""Calls of the head to supervisors that are not connected yet."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.launch.supervisors import CallReply, SupervisorLost, Supervisors
from gpuboard.launch.timing import HeadTiming
from gpuboard.model.reading import Hello
from gpuboard.model.replies import Done
from gpuboard.transport.base import LinkLost, TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.link import AgentLink
from tests.unit.test_plan import planned


class Connecting(Connector):
    """Opens links that connect, or end, when the test says so."""

    def __init__(self) -> None:
        super().__init__(Settings())
        self.links: list[AgentLink] = []

    def open(
        self,
        node: str,
        host: str | None,
        *,
        role: str,
        config: dict[str, Any],
        listener: Callable[..., None],
        ended: Callable[[TransportError], None],
        job: str | None = None,
    ) -> AgentLink:
        self.links.append(AgentLink(node, role, config, listener, ended))
        return self.links[-1]


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (AgentLink.connected, "gpu01: connected, but"),
        (lambda link: link.drop(TransportError("timeout", "no answer within 60 s")), "gpu01: no answer within 60 s"),
    ],
    ids=["connected", "not reached"],
)
def test_the_timeout_of_a_call_counts_from_the_connection(happens: Callable[[AgentLink], None], reason: str) -> None:
    connector, inbox = Connecting(), queue.SimpleQueue[Any]()
    plan = planned()
    plan = msgspec.structs.replace(plan, nodes=plan.nodes[:1])
    supervisors = Supervisors(plan, {"gpu01": Node("gpu01", "gpu01")}, connector, inbox)
    supervisors.open()
    supervisors.call("gpu01", "check", {}, 0.1, Done)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.5)
    happens(connector.links[0])
    reply = next(item for item in iter(lambda: inbox.get(timeout=60), None) if isinstance(item, CallReply))
    assert isinstance(reply.value, LinkLost)
    assert str(reply.value).startswith(reason)
    supervisors.close()


def test_a_silent_node_whose_connection_ends_meanwhile_is_lost_once() -> None:
    """A second report would be taken for the end of the sweep."""
    connector = Connecting()

    class Inbox(queue.SimpleQueue[Any]):
        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            connector.links[0].drop(TransportError("lost", "the connection was reset"))

    inbox = Inbox()
    plan = planned()
    options = msgspec.structs.replace(plan.options, lost_head_s=0.1)
    plan = msgspec.structs.replace(plan, nodes=plan.nodes[:1], options=options)
    supervisors = Supervisors(plan, {"gpu01": Node("gpu01", "gpu01")}, connector, inbox, HeadTiming(ping_s=0.05))
    supervisors.open()
    connector.links[0].hello = Hello("gpu01", "b", 0, "root", 1, "3.11")
    assert inbox.get(timeout=60) == SupervisorLost("gpu01", "no response for 0 s")
    supervisors.close()
    assert inbox.empty()
