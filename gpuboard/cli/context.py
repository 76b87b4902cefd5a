"""What a command gets to work with: environment, settings and the cluster, each made when first asked for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuboard.cluster.fleet import Fleet
    from gpuboard.cluster.inventory import Node
    from gpuboard.config import Configuration, Settings


class Context:
    """The world of one command. ``said`` holds the nodesets that ``--nodes`` named: the scope within the inventory."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.argv = list(argv)
        self.env: Mapping[str, str] = os.environ if env is None else env
        self.said: list[str] = []
        self.config_file: Path | None = None

    @property
    def stdout_is_tty(self) -> bool:
        """Whether a person reads stdout as it is."""
        return sys.stdout.isatty()

    @property
    def stderr_is_tty(self) -> bool:
        """Whether progress may be shown on stderr."""
        return sys.stderr.isatty()

    @property
    def colour(self) -> bool:
        """Whether stdout takes colour: a terminal that is not dumb, and no NO_COLOR (https://no-color.org)."""
        return self.stdout_is_tty and not self.env.get("NO_COLOR") and self.env.get("TERM") != "dumb"

    @property
    def width(self) -> int | None:
        """The terminal's width in cells; without a terminal that of COLUMNS, or None: whoever reads it cuts it."""
        if self.stdout_is_tty or self.env.get("COLUMNS", "").isdigit():
            return max(24, shutil.get_terminal_size().columns)
        return None

    @cached_property
    def configuration(self) -> Configuration:
        """The settings with their origins. Raises ConfigError."""
        from gpuboard import config

        file = self.config_file
        if file is None and self.env.get("GPUBOARD_CONFIG"):
            file = Path(self.env["GPUBOARD_CONFIG"])
        return config.load(self.env, {}, file)

    @property
    def settings(self) -> Settings:
        """The settings in force. Raises ConfigError."""
        return self.configuration.settings

    def nodes(self) -> list[Node]:
        """Return the nodes in scope. Raises UsageError for a nodeset that cannot be read or names an unknown node."""
        if handed := self.env.get("GPUBOARD_INVENTORY"):
            from gpuboard.cluster.handed import read_nodes

            return read_nodes(Path(handed), self.said)
        from gpuboard.cluster.inventory import inventory

        return inventory(self.settings, self.said)

    def fleet(
        self, nodes: Sequence[Node] | None = None, *, interval_s: float | None = None, one_shot: bool = True
    ) -> Fleet:
        """Return the feeds of ``nodes`` (default: all in scope), not yet started. ``interval_s`` None: read on call."""
        from gpuboard.cluster.fleet import Fleet

        return Fleet(self.nodes() if nodes is None else nodes, self.settings, interval_s=interval_s, one_shot=one_shot)
