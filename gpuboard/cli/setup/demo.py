"""`gpuboard demo`: reserve, train and release on simulated GPUs, then open the board; all but the GPUs is real."""

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
from gpuboard.errors import UsageError
from gpuboard.model.lease import gpus_text
from gpuboard.model.snapshot import Snapshot

if TYPE_CHECKING:
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.leases.output.formats import Allocation

NAME = "demo"
HELP = "try gpuboard on simulated nodes: reserve, train, release, board"

_TRAINING = "gpuboard.demo_train"
_LEASE_S = 600.0
_PAUSE_S = 1.5  # between two steps on a terminal: time to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--steps", action="store_true", help="wait for Enter before each step (on a terminal)")
    parser.add_argument(
        "--board", action="store_true", help="open the board immediately, on a simulated cluster with activity"
    )
    parser.epilog = (
        "examples:\n  gpuboard demo\n  gpuboard demo --board\n\n"
        "The demo simulates two nodes with six GPUs, its board seven nodes with 48.\n"
        "Agent, claims, keeper, launcher and training (PyTorch DDP, gloo, CPU) are real.\n"
        "The demo does not use your GPUs or change your configuration.\n"
        "On the board, x launches the training; append --fail-at 30 to it to see how\n"
        "gpuboard explains a failure."
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Run the steps, then the board; return 0 when everything succeeded and was released."""
    from gpuboard.cli.setup import demo_board

    if context.nodesets:
        raise UsageError("the demo simulates its own nodes; leave out --nodes")
    if args.board:
        code = demo_board.run(context)
    else:
        own = Context(context.argv, demo_board.environment(context.env))
        own.config_file = context.config_file
        code = _run_steps(args, own)
        if code == 0 and demo_board.cannot_open(context) is None:
            print("\nNow the board, on a larger simulated cluster; q quits.", flush=True)
            if args.steps and sys.stdin.isatty():
                _wait_for_enter()
            else:
                time.sleep(2 * _PAUSE_S)
            code = demo_board.run(context)
    if code == 0:
        print('\nFor real nodes, set nodes = ["gpu01", …] in ~/.config/gpuboard/config.toml')
    return code


def _run_steps(args: argparse.Namespace, context: Context) -> int:
    """Reserve, train and release; return 0 when everything succeeded and was released."""
    from gpuboard.cluster.simulated import demo_nodes
    from gpuboard.keeper import holder, processes
    from gpuboard.leases.ledger import Scope
    from gpuboard.leases.reserve import release_own, reserve
    from gpuboard.leases.terms import Terms
    from gpuboard.model.request import Request

    output = _Output(context, waits=args.steps)
    nodes = demo_nodes()
    output.show(
        "gpuboard demo: a SIMULATED cluster. The GPUs are invented; the agent, the reservation, the launcher and "
        "the training are real."
    )
    output.step("1. Show every GPU and why it is or is not free", "gpuboard status")
    _show_status(context, nodes)

    output.step("2. Reserve two GPUs: the free pair with the fastest link", "gpuboard allocate --n 2 --purpose demo")
    scope = Scope(tuple(nodes))
    terms = Terms(_LEASE_S, holder.identify(os.getpid()), "demo")
    with context.ledger(lambda: scope) as ledger:
        with ledger.allocator() as allocator, reserve(allocator, Request(n=2), terms, notify=output.show) as allocation:
            pass
        try:
            devices = allocation.rank_map.nodes[0].cuda_visible_devices
            output.show(f"lease {allocation.lease.id}: {gpus_text(allocation.lease.gpus)}")
            output.show(f"CUDA_VISIBLE_DEVICES={devices}; {allocation.why}")
            output.show("Every user of these nodes sees it; only its owner can remove it:")
            for file in _claims(context, allocation.lease.id):
                output.show(f"  {file}  owner {file.owner()}")
            _show_status(context, nodes)
            code = _train(output, context, nodes, allocation)
        finally:
            try:
                output.step("4. Release", f"gpuboard release {allocation.lease.id}")
            finally:  # ctrl-C at the step's prompt, too
                release_own(ledger, allocation.lease, output.show)
    left = [str(path) for path in _claims(context, allocation.lease.id)]
    left += [f"process {pid}" for pid in processes.carriers(allocation.lease.id)]
    snapshot = _show_status(context, nodes)
    left += [f"{gpu.uuid} {gpu.state}" for node in snapshot.nodes for gpu in node.gpus if gpu.leases]
    if left:
        output.show(f"not everything was released: {', '.join(left)}")
        return 1
    output.show("\nEverything is released; no process of the demo is left.")
    return code


class _Output:
    """Prints the demo's text, with pauses on a terminal."""

    def __init__(self, context: Context, *, waits: bool) -> None:
        self._colour = context.colour
        self._width = context.width
        self.is_terminal = context.stdout_is_tty
        self._waits = waits and sys.stdin.isatty()

    def show(self, text: str) -> None:
        """Print text, wrapped at the terminal's width."""
        for line in text.split("\n"):
            print("\n".join([line] if self._width is None else wrap(line, self._width)), flush=True)

    def step(self, title: str, command: str) -> None:
        """Begin a step: print its title and the equivalent command."""
        if self.is_terminal:
            time.sleep(_PAUSE_S)
        print(f"\n{paint(title, '1', colour=self._colour)}\n$ {command}", flush=True)
        if self.is_terminal and self._waits:
            _wait_for_enter()


def _wait_for_enter() -> None:
    with contextlib.suppress(EOFError):  # ctrl-D continues, too
        input("  Press Enter to continue ")


def _show_status(context: Context, nodes: Sequence[Node]) -> Snapshot:
    scene = status_command.read(nodes, context)
    print("\n".join(status_command.table(scene, context.width, colour=context.colour)), flush=True)
    return scene.snapshot


def _claims(context: Context, lease: str) -> list[Path]:
    return sorted(Path(context.settings.claims_dir).glob(f"gpuboard.SIM-*.{lease}"))


def _train(output: _Output, context: Context, nodes: Sequence[Node], allocation: Allocation) -> int:
    """Launch two ranks on the lease; return the run's exit code, 0 without PyTorch."""
    arguments = ["--steps", "60", *(["--pause", "0.05"] if output.is_terminal else [])]
    output.step(
        "3. Train on these GPUs: one rank per GPU; gloo on the CPU replaces NCCL",
        f"gpuboard launch --lease {allocation.lease.id} --device cpu -m {_TRAINING} {' '.join(arguments)}",
    )
    if find_spec("torch") is None:
        output.show(
            "PyTorch is not installed beside gpuboard, so this step is skipped; to run it: "
            f"{shlex.quote(sys.executable)} -m pip install torch"
        )
        return 0
    from gpuboard.launch import environ, plan, target
    from gpuboard.launch.head import Head
    from gpuboard.launch.output import Screen
    from gpuboard.launch.runs import folder as run_folder
    from gpuboard.transport.connector import Connector

    by_name = {node.name: node for node in nodes}
    plan.check_rank_map(allocation.rank_map, by_name, "the demo's lease", "cpu")
    decided = plan.launch_plan(
        allocation.rank_map,
        target.parse_target(["-m", _TRAINING, *arguments]),
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
        run_folder.prune(context.env, *context.settings.runs.limits())
        return Head(decided, folder, screen, connector=connector, nodes=by_name, read_gpus=None).run()
    finally:
        connector.close()
        screen.close()
