"""`gpuboard demo`: the main job on a simulated cluster, then the board; the GPUs are invented, the rest is real."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboard.cli.context import Context
from gpuboard.cli.see import status as status_command
from gpuboard.cli.table import paint, wrap
from gpuboard.model.lease import gpus_text
from gpuboard.model.snapshot import Snapshot

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.output.formats import Allocation

NAME = "demo"
HELP = "see the main job on simulated nodes, then the board: reserve, train with DDP on CPU, release"

_TRAINING = "gpuboard.demo_train"
_LEASE_S = 600.0
_READ_S = 1.5  # for people: between two steps on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--steps", action="store_true", help="on a terminal: wait for Enter before each step")
    parser.add_argument(
        "--board", action="store_true", help="open the board at once, on a simulated cluster that lives"
    )
    parser.epilog = (
        "examples:\n  gpuboard demo\n  gpuboard demo --board\n\n"
        "Two nodes with six GPUs are simulated, seven with 48 for the board; their names and figures are invented.\n"
        "The agent, the reservation in the folder of claims, the keeper, the launcher and the training (PyTorch DDP,\n"
        "gloo, CPU) are the real ones. Your configuration and your GPUs are left alone.\n"
        "On the board, x launches that training; with --fail-at 30 behind it one sees how a failure is explained."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Show it, step by step and then as the board; return 0 when all went well and nothing was left behind."""
    from gpuboard.cli.setup import demo_board

    if args.board:
        code = demo_board.run(context)
    else:
        own = Context(context.argv, demo_board.environment(context.env))
        own.config_file = context.config_file
        code = _story(args, own)
        if code == 0 and demo_board.cannot_open(context) is None:
            print("\nNow the board, on a larger simulated cluster; q leaves it.", flush=True)
            if args.steps:
                input("  Enter goes on ")
            else:
                time.sleep(2 * _READ_S)
            code = demo_board.run(context)
    if code == 0:
        print('\nFor real nodes, write nodes = ["gpu01", …] into ~/.config/gpuboard/config.toml')
    return code


def _story(args: argparse.Namespace, context: Context) -> int:
    """Show the main job; return 0 when everything went well and nothing was left behind."""
    from gpuboard.cluster.simulated import demo_nodes
    from gpuboard.keeper import holder, processes
    from gpuboard.leases.ledger import Scope
    from gpuboard.leases.reserve import release_own, reserve
    from gpuboard.leases.terms import Terms
    from gpuboard.model.request import Request

    stage = _Stage(context, waits=args.steps)
    nodes = demo_nodes()
    stage.say(
        "gpuboard demo: a SIMULATED cluster. The GPUs are invented; the agent, the reservation, the launcher and "
        "the training are real."
    )
    stage.step("1. What is there, and why it is or is not free", "gpuboard status")
    _look(context, nodes)

    stage.step("2. Reserve two GPUs: the best linked pair that is free", "gpuboard allocate --n 2 --purpose demo")
    scope = Scope(tuple(nodes))
    terms = Terms(_LEASE_S, holder.identify(os.getpid()), "demo")
    with context.ledger(lambda: scope) as ledger:
        with ledger.allocator() as allocator, reserve(allocator, Request(n=2), terms, notify=stage.say) as allocation:
            pass
        try:
            devices = allocation.rank_map.nodes[0].cuda_visible_devices
            stage.say(f"lease {allocation.lease.id}: {gpus_text(allocation.lease.gpus)}")
            stage.say(f"CUDA_VISIBLE_DEVICES={devices}; {allocation.why}")
            stage.say("Everybody on these nodes sees it, and only its owner can remove it:")
            for file in _claims(context, allocation.lease.id):
                stage.say(f"  {file}  owner {file.owner()}")
            _look(context, nodes)
            code = _train(stage, context, nodes, allocation)
        finally:
            stage.step("4. Release", f"gpuboard release {allocation.lease.id}")
            release_own(ledger, allocation.lease, stage.say)
    left = [str(path) for path in _claims(context, allocation.lease.id)]
    left += [f"process {pid}" for pid in processes.carriers(allocation.lease.id)]
    snapshot = _look(context, nodes)
    left += [f"{gpu.uuid} {gpu.state}" for node in snapshot.nodes for gpu in node.gpus if gpu.leases]
    if left:
        stage.say(f"not everything was released: {', '.join(left)}")
        return 1
    stage.say("\nEverything is released; nothing of the demo is left running.")
    return code


class _Stage:
    """Where the demo speaks: with pauses for a person at a terminal, plain and at once elsewhere."""

    def __init__(self, context: Context, *, waits: bool) -> None:
        self._colour = context.colour
        self._width = context.width
        self.person = context.stdout_is_tty
        self._waits = waits and sys.stdin.isatty()

    def say(self, text: str) -> None:
        """Print words, broken at spaces where the terminal ends."""
        for line in text.split("\n"):
            print("\n".join([line] if self._width is None else wrap(line, self._width)), flush=True)

    def step(self, title: str, command: str) -> None:
        """Begin a step: what happens, and the command that does the same."""
        if self.person:
            time.sleep(_READ_S)
        print(f"\n{paint(title, '1', colour=self._colour)}\n$ {command}", flush=True)
        if self.person and self._waits:
            input("  Enter goes on ")


def _look(context: Context, nodes: Sequence[Node]) -> Snapshot:
    """Print the table of the simulated nodes as they are now."""
    with contextlib.closing(context.fleet(nodes)) as fleet:
        fleet.start()
        snapshot = status_command.settled(fleet, context)
    print("\n".join(status_command.table(snapshot, context.width, colour=context.colour)), flush=True)
    return snapshot


def _claims(context: Context, lease: str) -> list[Path]:
    """Return the claim files of a lease: one per GPU, in the folder of claims."""
    return sorted(Path(context.settings.claims_dir).glob(f"gpuboard.SIM-*.{lease}"))


def _train(stage: _Stage, context: Context, nodes: Sequence[Node], allocation: Allocation) -> int:
    """Launch two ranks on the lease; return the run's exit code, 0 where there is no PyTorch to run them with."""
    arguments = ["--steps", "60", *(["--pause", "0.05"] if stage.person else [])]
    stage.step(
        "3. Train on exactly those: one rank per GPU; gloo on CPU stands in for the GPUs",
        f"gpuboard launch --lease {allocation.lease.id} --device cpu -m {_TRAINING} {' '.join(arguments)}",
    )
    if find_spec("torch") is None:
        stage.say(
            "PyTorch is not installed beside gpuboard, so this step is left out; to see it: "
            f"{shlex.quote(sys.executable)} -m pip install torch"
        )
        return 0
    from gpuboard.launch import environ, plan, run_folder, target
    from gpuboard.launch.head import Head
    from gpuboard.launch.output import Screen
    from gpuboard.transport.connector import Connector

    by_name = {node.name: node for node in nodes}
    plan.check_rank_map(allocation.rank_map, by_name, "the demo's lease", "cpu")
    decided = plan.launch_plan(
        allocation.rank_map,
        target.parse_target([], [_TRAINING, *arguments]),
        run=run_folder.new_run_id(),
        secret=secrets.token_hex(16),
        cwd=os.getcwd(),
        environ=environ.sent(context.env, []),
        options=plan.LaunchOptions(device="cpu", python=sys.executable),
    )
    screen = Screen(sys.stdout, sys.stderr)
    connector = Connector(context.settings)
    try:
        folder = run_folder.RunFolder(context.env, decided.run)
        return Head(decided, folder, screen, connector=connector, nodes=by_name, read_gpus=None).run()
    finally:
        connector.close()
        screen.close()
