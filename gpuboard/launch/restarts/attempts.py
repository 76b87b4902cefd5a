"""The attempts of a run, one after the other: each has a head of its own, another secret and another store."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuboard.launch.plan import LaunchPlan, next_attempt
from gpuboard.launch.restarts.spares import reassigned
from gpuboard.model.rankmap import RankMap

if TYPE_CHECKING:
    from gpuboard.launch.head import Head

MakeHead = Callable[[LaunchPlan, "Head | None", str], "Head"]  # of the plan, the attempt before, what has changed


class Attempts:
    """A run and its restarts. ``lease``: its whole lease, where restarts may use other GPUs of it, or fewer."""

    def __init__(self, plan: LaunchPlan, make: MakeHead, lease: RankMap | None) -> None:
        self._plan = plan
        self._make = make
        self._lease = lease
        self._ranks = plan.rank_map.world_size
        self.head = make(plan, None, "")  # of the newest attempt
        self.logs_complete = True  # all output of the ranks of all attempts is in the run's folder

    def run(self) -> int:
        """Run until an attempt succeeds, none is left or the user stops the run; return the exit code of the last one.

        To be called in the main thread.
        """
        code = self._run()
        while self.head.continues:
            try:
                self.head = self._next()
            except BaseException:
                self.head.abandon()
                raise
            code = self._run()
        return code

    def _run(self) -> int:
        try:
            return self.head.run()
        finally:
            self.logs_complete = self.logs_complete and self.head.logs_complete

    def _next(self) -> Head:
        rank_map, change, reading = self._plan.rank_map, "", self.head.lease_reading
        if self._lease is not None and reading is not None:
            options = self._plan.options
            least = self._ranks if options.min_ranks is None else options.min_ranks
            rank_map, change = reassigned(rank_map, self._lease, reading, options.device, most=self._ranks, least=least)
        self._plan = next_attempt(self._plan, rank_map, secrets.token_hex(16))
        return self._make(self._plan, self.head, change)

    def stop(self, reason: str) -> None:
        """Stop the run as `gpuboard stop` does; from any thread and at any time."""
        self.head.stop(reason)
