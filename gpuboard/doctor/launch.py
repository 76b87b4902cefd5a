"""The checks of a launch without a launch: supervisors start on the nodes of a rank map, ranks do not."""

from __future__ import annotations

import contextlib
import queue
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gpuboard.cluster.inventory.nodes import Node
from gpuboard.launch.plan import LaunchOptions, launch_plan
from gpuboard.launch.preflight.check import Check
from gpuboard.launch.preflight.checks import preflight
from gpuboard.launch.preflight.collect import PreflightCalls
from gpuboard.launch.runs.folder import new_run_id
from gpuboard.launch.supervisors import CallReply, SupervisorLost, Supervisors
from gpuboard.launch.target import Target
from gpuboard.launch.timing import HeadTiming
from gpuboard.model.rankmap import RankMap
from gpuboard.model.snapshot import Snapshot
from gpuboard.transport.connector import Connector

_TIMING = HeadTiming(start_s=12.0)  # so that the whole command takes at most about 20 s
_ANY_TARGET = Target("script", "/dev/null")  # preflight reads the target; no rank runs it
_LEFT_OUT = {"script", "driver", "/dev/shm"}  # the placeholder above; checked for all nodes (doctor/nodes.py)


class LaunchProbe:
    """The supervisors of one rank map: ``start`` them, read the GPUs meanwhile, get the ``checks``, ``close``."""

    def __init__(
        self,
        rank_map: RankMap,
        nodes: Mapping[str, Node],
        connector: Connector,
        *,
        cwd: str,
        environ: Mapping[str, str],
        options: LaunchOptions,
        planned: bool = False,
    ) -> None:
        """``nodes``: how to reach the nodes of the map, by name. ``planned``: its GPUs are those that a launch would
        reserve. Raises UsageError as ``launch_plan``."""
        self._planned = planned
        self._plan = launch_plan(
            rank_map,
            _ANY_TARGET,
            run=new_run_id(),
            secret=secrets.token_hex(16),
            cwd=cwd,
            environ=environ,
            options=msgspec.structs.replace(options, preflight_only=True),
        )
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._supervisors = Supervisors(self._plan, nodes, connector, self._inbox, _TIMING)
        self._calls = PreflightCalls(self._plan, self._supervisors, _TIMING)

    def start(self) -> None:
        """Start the supervisors and request their facts, without waiting."""
        self._supervisors.open()
        self._calls.start()

    def checks(self, snapshot: Snapshot) -> list[Check]:
        """Wait for all replies and return the checks. ``snapshot``: the GPUs of the nodes."""
        calls = self._calls
        self._wait(calls.started)
        if len(self._plan.nodes) > 1:
            calls.probe_connect()
            self._wait(calls.probed)
        device = self._plan.options.device
        calls.snapshot = snapshot if device == "cuda" else None
        master, answers = self._plan.nodes[0].master_addr, calls.collect()
        found = preflight(self._plan.rank_map, master, device, answers, planned=self._planned)
        return [_without_ranks(check) for check in found if check.name not in _LEFT_OUT]

    def close(self) -> None:
        """Close the connections; the supervisors end with them."""
        self._supervisors.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        """Take replies until ``done()``: each call is answered or times out."""
        while not done():
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=_TIMING.poll_s)
                if isinstance(item, CallReply):
                    self._calls.take(item)
                elif isinstance(item, SupervisorLost):
                    self._calls.lost(item.node, item.error)


def _without_ranks(check: Check) -> Check:
    if check.name == "start" and check.status == "ok":
        return msgspec.structs.replace(check, evidence="the supervisor started, in the same folder as here")
    return check
