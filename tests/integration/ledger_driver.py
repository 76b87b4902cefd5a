"""Uses one ledger as commands do: reads ``[operation, {arguments}]`` lines and prints one JSON line for each.

Usage: ledger_driver.py LEDGER NODESET (LEDGER: the name of one, as ``Ledger.name``). An error is printed as
``{"error": …, "exit_code": …}``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from typing import Any

import msgspec

from gpuboard.cli.context import Context
from gpuboard.cluster.fleet import Fleet
from gpuboard.errors import GpuboardError
from gpuboard.keeper.holder import identify
from gpuboard.launch.preflight.gpus import gpu_checks
from gpuboard.launch.rank_map_source import nodes_of
from gpuboard.leases.ledger import NO_OPTIONS, Ledger, Scope
from gpuboard.leases.reserve import reserve, terms_of
from gpuboard.model.request import Request
from gpuboard.model.snapshot import Snapshot


class Stopped(Exception):
    """What a command that reserves may end with."""


class Driver:
    """The operations."""

    def __init__(self, name: str, nodeset: str) -> None:
        self.context = Context([])
        self.context.nodesets = [nodeset]
        self.scope: Scope = self.context.scope()
        composite = self.context.ledger(lambda: self.scope)
        self.ledger: Ledger = next(ledger for ledger in composite._ledgers if ledger.name == name)

    def reserve(self, n: int, *, held: bool = False, stop: bool = False, publish: bool = True) -> Any:
        """Reserve ``n`` GPUs: with this process as the holder, else without; ``stop``: fail before it is published."""
        terms = terms_of(600.0, identify(os.getpid()) if held else None, "a test", self.context.settings)
        notes: list[str] = []
        request = Request(n=n)
        with (
            self.ledger.allocator(self.scope, options=NO_OPTIONS, progress=lambda _: None) as allocator,
            reserve(allocator, request, terms, notify=notes.append) as allocation,
        ):
            if stop:
                raise Stopped(allocation.lease.id)
            if not publish:
                print(json.dumps(allocation.lease.id), flush=True)
                sys.stdin.read()
        return {"lease": allocation.lease, "ranks": allocation.rank_map.ranks}

    def plan(self, n: int) -> Any:
        """Return the choice."""
        with self.ledger.allocator(self.scope, options=NO_OPTIONS, progress=lambda _: None) as allocator:
            return allocator.plan(Request(n=n))

    def leases(self) -> Any:
        """Return everybody's leases."""
        with closing(self.context.fleet(self.scope.nodes)) as fleet:
            fleet.start()
            fleet.wait_all(fleet.connect_s + 15.0)
            fleet.freshen()
            return self.ledger.leases(fleet, fleet.snapshot(), fresh=True).leases

    def find(self, *ids: str) -> Any:
        """Return the caller's leases and the missing ids."""
        found = self.ledger.find(ids)
        return {"leases": found.leases, "missing": sorted(found.missing)}

    def release(self, lease: str) -> Any:
        """End one."""
        [found] = self.ledger.find([lease]).leases
        assert found.ledger == self.ledger.kind
        return self.ledger.release(found)

    def release_twice(self, lease: str) -> Any:
        """End one that was ended a moment ago."""
        [found] = self.ledger.find([lease]).leases
        self.ledger.release(found)
        return self.ledger.release(found)

    def renew(self, lease: str, for_s: float) -> Any:
        """Renew one."""
        [found] = self.ledger.find([lease]).leases
        return self.ledger.renew(found, for_s)

    def existing(self, lease: str, n: int | None = None) -> Any:
        """Return one as it was allocated."""
        allocation = self.ledger.existing(lease, n)
        return {"lease": allocation.lease, "ranks": allocation.rank_map.ranks}

    def shown(self) -> Any:
        """Return the GPUs that a snapshot of all nodes shows as held."""
        nodes = self._snapshot(self.context.fleet(self.scope.nodes)).nodes
        held = {"reserved", "allocated"}
        return sorted((node.name, gpu.index) for node in nodes for gpu in node.gpus if gpu.state in held)

    def preflight(self, lease: str) -> Any:
        """Return preflight's checks of the GPUs of one, as `launch --lease` makes them."""
        rank_map = self.ledger.existing(lease).rank_map
        nodes = nodes_of(rank_map, self.scope.nodes)
        fleet = self.context.fleet_of_run([nodes[entry.name] for entry in rank_map.nodes])
        return gpu_checks(rank_map, self._snapshot(fleet))

    def _snapshot(self, fleet: Fleet) -> Snapshot:
        with closing(fleet):
            fleet.start()
            fleet.wait_all(fleet.connect_s + 15.0)
            fleet.freshen()
            return fleet.snapshot()

    def covers(self) -> Any:
        """Return the nodes that are the ledger's."""
        return sorted(self.ledger.covers(self.scope.nodes))


def main(name: str, nodeset: str) -> None:
    driver = Driver(name, nodeset)
    for line in sys.stdin:
        operation, args = json.loads(line)
        try:
            answer = getattr(driver, operation)(*args.pop("ids", ()), **args)
        except Stopped as stopped:
            answer = {"stopped": str(stopped)}
        except GpuboardError as error:
            answer = {"error": str(error), "exit_code": error.exit_code}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    driver.ledger.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
