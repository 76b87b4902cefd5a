"""The outcome of a launch: kept, and in the status file, also where ctrl-C comes again and again."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuboard.cli import status_file
from gpuboard.cli.context import Context
from gpuboard.cli.use.lead import lead
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Configuration, Settings
from gpuboard.launch.output import Screen
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import planned


def test_an_interrupt_while_connections_close_leaves_the_run_in_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Connector.close

    def close(connector: Connector) -> None:
        signal.raise_signal(signal.SIGINT)
        closed(connector)

    monkeypatch.setattr(Connector, "close", close)
    context = Context(["launch"], {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})
    context.configuration = Configuration(Settings(), {})
    plan = planned(preflight_only=True)
    nodes = {config.node: Node(config.node, None) for config in plan.nodes}
    outcome: dict[str, Any] = {}
    with closing(Screen(io.StringIO(), io.StringIO())) as screen:
        lead(plan, nodes, context, screen, outcome, lease=None, script_checks=[], line=None, detaching=None)
    assert outcome["run"]["id"] == plan.run


def test_an_interrupt_while_the_status_file_is_written_leaves_it_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opener(path: str, flags: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return os.open(path, flags, 0o666)

    monkeypatch.setattr(status_file, "_opener", opener)
    outcome = status_file.outcome_of("launch")
    with pytest.raises(KeyboardInterrupt), status_file.recorded(outcome, str(tmp_path / "outcome.json")):
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "outcome.json").read_bytes()) == outcome
