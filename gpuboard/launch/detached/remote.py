"""The command's end of a head that leads a detached run on another node (agent/launch/head_start.py)."""

from __future__ import annotations

import base64
import queue
import sys
import zlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gpuboard import __version__
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError
from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.preflight.check import Check
from gpuboard.model import replies
from gpuboard.model.decoding import from_json
from gpuboard.model.rankmap import RankMap
from gpuboard.model.reading import Event, Pushed
from gpuboard.model.replies import Done
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.connector import Connector
from gpuboard.transport.spawn import import_path

_START_S = 90.0  # to connect, and for two versions of gpuboard on a cold network home to start


class HeadConfig(msgspec.Struct, frozen=True):
    """What a head needs to lead a run: the first line that it reads, packed."""

    plan: LaunchPlan
    nodes: list[Node]  # those of the plan first, then others of its lease; as the first one reaches them
    settings: Settings
    script_checks: list[Check]
    status_file: str | None
    whole_lease: RankMap | None = None  # where it has GPUs that the run does not use, for restarts
    lease: dict[str, Any] | None = None  # the keeper's record of the lease to take over; its times count from now

    def packed(self) -> str:
        """Return it as text for a JSON line: the plans of many nodes differ little."""
        return base64.b64encode(zlib.compress(msgspec.json.encode(self))).decode()


def unpacked(text: str) -> HeadConfig:
    """Return what :meth:`HeadConfig.packed` packed."""
    return from_json(zlib.decompress(base64.b64decode(text)), HeadConfig)


class FromHead(msgspec.Struct, frozen=True):
    """A line of the head. ``message``: what it reports when it detaches, or its outcome if it ends before that."""

    kind: Literal["adopted", "started", "ended", "closed", "lost"]
    message: str = ""


class RemoteHead:
    """A head on another node, until it detaches; closing the connection before that ends its run."""

    def __init__(self, node: Node, connector: Connector, show: Callable[[str], None]) -> None:
        """``show`` gets the text that the head prints, in a thread of the transport."""
        self.node = node
        self._show = show
        self._inbox: queue.SimpleQueue[FromHead | None] = queue.SimpleQueue()
        config = {"version": __version__, "python": sys.executable, "path": import_path()}
        self._link = connector.open(
            node.name,
            node.host,
            role="head",
            config=config,
            listener=self._heard,
            ended=self._ended,
            job=node.job,
        )

    def start(self) -> None:
        """Start gpuboard there. Raises GpuboardError: no connection, or no gpuboard of this version."""
        name = self.node.name
        try:
            self._link.call("start", {}, _START_S, Done)
        except LinkLost as error:
            raise GpuboardError(f"cannot start the run's head on {name}: {error.words}") from error
        except CallFailed as error:
            raise GpuboardError(
                f"{name} cannot lead a detached run: gpuboard {__version__} is needed there ({error.message}); install "
                f"it on {name}, or run `gpuboard launch --detach` on {name} itself, or launch without --detach"
            ) from error

    def send(self, **line: object) -> None:
        """Send a line to the head."""
        self._link.submit("line", line)

    def interrupt(self) -> None:
        """Let ``wait`` return None, once; for signal handlers."""
        self._inbox.put(None)

    def wait(self) -> FromHead | None:
        """Return the next line of the head, or None after an ``interrupt``."""
        while True:
            try:
                return self._inbox.get(timeout=0.5)
            except queue.Empty:
                continue

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def _heard(self, message: Pushed) -> None:
        if not isinstance(message, Event):
            return
        try:
            if message.kind == "stderr":
                self._show(replies.parse(message.data, dict[str, str]).get("text", ""))
            elif message.kind == "head":
                self._inbox.put(replies.parse(message.data, FromHead))
        except replies.Malformed as error:
            self._inbox.put(FromHead("lost", f"malformed answer: {error}"))

    def _ended(self, error: TransportError) -> None:
        self._inbox.put(FromHead("lost", str(error)))
