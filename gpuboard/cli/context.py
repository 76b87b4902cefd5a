"""What a command works with: environment, settings and cluster, each created on first use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboard.errors import UsageError

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory.nodes import Node
    from gpuboard.config import Configuration, Settings
    from gpuboard.leases.composite import CompositeLedger
    from gpuboard.leases.ledger import Scope
    from gpuboard.model.snapshot import Snapshot
    from gpuboard.scheduler.base import Scheduler
    from gpuboard.scheduler.slurm.current_job import Inside


class Context:
    """Everything one command works with. ``nodesets``: the values of ``--nodes``."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.argv = list(argv)
        self.env: Mapping[str, str] = os.environ if env is None else env
        self.nodesets: list[str] = []
        self.config_file: Path | None = None

    @property
    def stdout_is_tty(self) -> bool:
        """Whether stdout is a terminal."""
        return sys.stdout.isatty()

    @property
    def stderr_is_tty(self) -> bool:
        """Whether stderr is a terminal."""
        return sys.stderr.isatty()

    @property
    def shows_progress(self) -> bool:
        """Whether stderr shows progress in place: a terminal, TERM other than ``dumb``."""
        return self.stderr_is_tty and self.env.get("TERM") != "dumb"

    @property
    def colour(self) -> bool:
        """Whether stdout takes colour: a terminal, TERM other than ``dumb``, no NO_COLOR (https://no-color.org)."""
        return self.stdout_is_tty and not self.env.get("NO_COLOR") and self.env.get("TERM") != "dumb"

    @property
    def width(self) -> int | None:
        """The width in cells of the terminal, else COLUMNS, else None (no limit)."""
        if self.stdout_is_tty or self.env.get("COLUMNS", "").isdigit():
            import shutil  # late: `allocate` and the board start quickly

            return max(24, shutil.get_terminal_size().columns)
        return None

    def folder(self) -> str:
        """Return the working directory under the shell's name (PWD), as links and automounts may differ between nodes.

        Raises UsageError.
        """
        named = self.env.get("PWD", "")
        with contextlib.suppress(OSError):
            if named.startswith("/") and os.path.samefile(named, "."):
                return named
        try:
            return os.getcwd()
        except FileNotFoundError:
            raise UsageError("the working directory was removed; cd to one that exists on every node") from None

    @cached_property
    def configuration(self) -> Configuration:
        """The settings with the origin of each. Raises ConfigError."""
        from gpuboard import config

        file = self.config_file
        if file is None and self.env.get("GPUBOARD_CONFIG"):
            file = Path(self.env["GPUBOARD_CONFIG"])
        return config.load(self.env, {}, file)

    @property
    def settings(self) -> Settings:
        """The settings in force. Raises ConfigError."""
        return self.configuration.settings

    @cached_property
    def job(self) -> Inside | None:
        """The Slurm job that this command runs in, if any. Raises GpuboardError where that cannot be determined."""
        from gpuboard.cli.stderr import report
        from gpuboard.cluster.inventory.slurm_job import current_job

        return current_job(self.settings, self.env, report)

    def scope(self) -> Scope:
        """Return the nodes that a command reserves or uses GPUs of: inside a Slurm job the job's, else all in scope."""
        from gpuboard.leases.ledger import Scope

        if self.job is None:
            return Scope(tuple(self.reach(self.nodes())), explicit=bool(self.nodesets))
        from gpuboard.cluster.inventory.slurm_job import job_nodes

        return Scope(tuple(job_nodes(self.job, self.nodesets)), explicit=True, job=self.job.job)

    def leased(self) -> Scope | None:
        """Return the nodes of the shell's own lease, where neither --nodes nor the settings name any; else None."""
        from gpuboard.cluster.inventory.nodes import inventory
        from gpuboard.leases.ledger import Scope

        nodeset = self.env.get("GPUBOARD_NODES") if self.env.get("GPUBOARD_LEASE") else None
        if not nodeset or self.nodesets or self.settings.nodes or self.env.get("GPUBOARD_INVENTORY") or self.job:
            return None
        return Scope(tuple(self.reach(inventory(self.settings, [nodeset]))))

    def scope_of(self, ids: Sequence[str]) -> Scope:
        """Return the nodes where leases are looked for by ids or their starts, or without ids all of the user's.

        The shell's own lease: its nodes. Others: the nodes in scope, with those of the own lease if it may be meant.
        """
        from gpuboard.leases.ledger import Scope

        own = self.env.get("GPUBOARD_LEASE", "")
        leased = self.leased() if not ids or any(text and own.startswith(text) for text in ids) else None
        if leased is None:
            return self.scope()
        if ids and all(text == own for text in ids):
            return leased
        scope = self.scope()
        known = {node.name for node in scope.nodes}
        more = (node for node in leased.nodes if node.name not in known)
        return Scope((*scope.nodes, *more), explicit=scope.explicit, job=scope.job)

    def known(self) -> list[Node]:
        """Return the nodes in scope, inside a Slurm job the job's; ssh has asked for nothing yet (:meth:`reach`)."""
        if self.job is None:
            return self.nodes()
        from gpuboard.cluster.inventory.slurm_job import job_nodes

        return job_nodes(self.job, self.nodesets)

    def named(self, nodeset: str) -> list[Node]:
        """Return the nodes of ``--node``: nodes in scope, or any other hosts. Raises UsageError."""
        from gpuboard.cluster.inventory.nodes import named

        return self.reach(named(nodeset, self.known()))

    def nodes(self) -> list[Node]:
        """Return the nodes in scope. Raises UsageError for an invalid nodeset or an unknown node."""
        if file := self.env.get("GPUBOARD_INVENTORY"):
            from gpuboard.cluster.inventory.file import read_nodes

            return read_nodes(Path(file), self.nodesets)
        from gpuboard.cluster.inventory.nodes import inventory

        scheduler = self.new_scheduler()
        return inventory(self.settings, self.nodesets, scheduler.look if scheduler else None)

    def reach(self, nodes: list[Node]) -> list[Node]:
        """Return ``nodes``, after ssh has asked on the terminal for the passwords and codes that they require.

        Only the system's ssh (``transport = "openssh"``) asks, and not with Slurm and ``ssh = "own"``: there Slurm
        decides which nodes accept the user.
        """
        hosts = [node.host for node in nodes if node.host is not None and node.job is None]
        if not hosts or self.settings.transport != "openssh" or not (sys.stdin.isatty() and self.stderr_is_tty):
            return nodes
        if self.settings.ssh == "own" and self.new_scheduler() is not None:
            return nodes
        from gpuboard.cli.stderr import report
        from gpuboard.transport.ssh.login import log_in

        log_in(hosts, self.settings, self.env, report)
        return nodes

    def new_scheduler(self) -> Scheduler | None:
        """Return a client of the cluster's scheduler, or None without a scheduler or with simulated nodes.

        The caller closes it. Creating one sends no query, and all clients of a user share one cache of answers.
        """
        make = self._scheduler_factory()
        return make() if make is not None else None

    def _scheduler_factory(self) -> Callable[[], Scheduler] | None:
        if self.settings.scheduler == "none" or self.env.get("GPUBOARD_INVENTORY"):
            return None
        from gpuboard.scheduler.find import finder

        return finder(self.settings, self.env)

    def ledger(
        self, scope: Callable[[], Scope] | None = None, *, settle: Callable[[Fleet], Snapshot] | None = None
    ) -> CompositeLedger:
        """Return the ledger of the nodes of ``scope`` (default: :meth:`scope`), which its ``with`` block closes.

        ``settle``: waits for the first readings and shows progress.
        """
        from gpuboard.cli.stderr import report
        from gpuboard.leases.composite import open_ledger

        make = self._scheduler_factory()
        return open_ledger(scope or self.scope, self.settings, self.env, make, settle=settle, warn=report)

    def fleet_of_run(self, nodes: Sequence[Node]) -> Fleet:
        """Return unstarted feeds of the nodes of a run, to be polled on request."""
        from gpuboard.cluster.fleet import Fleet

        # Inside a job the scheduler reports all of the job's GPUs as allocated, so only their readings count.
        if all(node.job is not None for node in nodes):
            return Fleet(nodes, self.settings, interval_s=None)
        return self.fleet(nodes)

    def fleet(
        self, nodes: Sequence[Node] | None = None, *, interval_s: float | None = None, one_shot: bool = True
    ) -> Fleet:
        """Return unstarted feeds of ``nodes`` (default: all in scope). ``interval_s`` None: poll on request."""
        from gpuboard.cluster.fleet import Fleet

        found = self.reach(self.nodes()) if nodes is None else nodes
        return Fleet(found, self.settings, interval_s=interval_s, one_shot=one_shot, scheduler=self.new_scheduler())
