"""`gpuboard launch --head`: the head of a detached run, started on its first node by a command elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from gpuboard.cli.context import Context
from gpuboard.cli.status_file import outcome_of, recorded
from gpuboard.cli.stderr import report
from gpuboard.cli.use.lead import lead
from gpuboard.config import Configuration
from gpuboard.errors import GpuboardError
from gpuboard.keeper.logind import kills_at_logout
from gpuboard.launch.detached.served import ServedHead
from gpuboard.launch.output import Screen
from gpuboard.leases.terms import uninterrupted


def serve_head(context: Context) -> int:
    """Lead the run that standard input describes; return its exit code."""
    served = ServedHead()
    context.configuration = Configuration(served.config.settings, {})
    outcome = outcome_of("launch")
    try:
        with recorded(outcome, served.config.status_file):
            outcome["exit_code"] = _lead(served, context, outcome)
    except GpuboardError as error:
        report(str(error))
    except KeyboardInterrupt:
        report("interrupted")
    finally:
        if not served.left:
            with uninterrupted():  # else the command reports that this head was killed
                served.ended(outcome)
    return int(outcome["exit_code"])


def _lead(served: ServedHead, context: Context, outcome: dict[str, Any]) -> int:
    config = served.config
    node = config.plan.nodes[0].node
    if kills_at_logout(os.geteuid()):
        raise GpuboardError(
            f"logind on {node} kills all processes of a user who logs out (KillUserProcesses=yes), and with them a "
            f"detached run; on {node}, run `loginctl enable-linger`, then "
            "`systemd-run --user --scope gpuboard launch --detach …`"
        )
    with contextlib.closing(Screen(sys.stderr, sys.stderr)) as screen:
        served.adopt(context.env, lambda text: screen.lines("err", [f"gpuboard: {text}"]))
        code, in_logs = lead(
            config.plan,
            {node.name: node for node in config.nodes},
            context,
            screen,
            outcome,
            lease=config.whole_lease,
            script_checks=config.script_checks,
            line=served.line,
            detaching=served,
        )
    return code or int(served.left and not in_logs)
