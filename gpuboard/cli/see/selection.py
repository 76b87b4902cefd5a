"""Which GPUs `gpuboard status` lists, and in what order: --filter, --user, --free and --sort."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from gpuboard.board.arrange import SORTS, Matches, ViewState, in_order, matching, natural
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.filter.language import QueryError
from gpuboard.board.filter.matchers import ME
from gpuboard.board.scene import Place, Scene, without
from gpuboard.cli.see.columns import named
from gpuboard.errors import UsageError
from gpuboard.model.snapshot import GpuView, NodeView, Snapshot
from gpuboard.model.text import quoted

_SORTS = {"gpu": "index", "mem": "memory", "util": "utilization", "temp": "temperature"}  # column → key of SORTS
SORT_KEYS = {next((name for name, key in _SORTS.items() if key == sort), sort): sort for sort in SORTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--filter", metavar="TEXT",
        help="list only GPUs that match: 'state:free mem<40G model:H100 node:gpu[01-04]', the language of the board's "
        "filter; see docs/commands.md",
    )  # fmt: skip
    parser.add_argument("--user", metavar="U", help="list only GPUs that U holds or uses; me: you")
    parser.add_argument("--free", action="store_true", help="list only free GPUs and MIG devices")
    parser.add_argument("--sort", metavar="KEY[,desc]", help=f"one of {', '.join(SORT_KEYS)}; unknown values last")


class Listed(NamedTuple):
    """A node with those of its GPUs that are listed."""

    node: NodeView
    places: list[Place]  # each with the MIG devices that are left out

    def cut(self) -> NodeView:
        """Return the node with only these GPUs and MIG devices."""
        return msgspec.structs.replace(self.node, gpus=[without(place.gpu, place.hidden) for place in self.places])


class Selection:
    """What the options select; without any, every GPU."""

    def __init__(
        self, query: str | None = None, user: str | None = None, *, free: bool = False, sort: str | None = None
    ) -> None:
        """``query``: the value of --filter. Raises UsageError for an invalid filter, user or key."""
        self._tests: list[Matches] = []
        self.keys: set[str] = set()  # of the filter and the order
        if query:
            try:
                parsed = GPUS.parse(query)
                self._tests.append(parsed.matches)
                self.keys |= parsed.keys
            except QueryError as error:
                raise UsageError(f"--filter: {error}") from None
        if user:
            self._tests.append(GPUS.parse("user:me").matches if user == ME else _of_user(user))
        if free:
            self._tests.append(GPUS.parse("state:free").matches)
        self._view = ViewState()
        if sort:
            key, _, direction = sort.partition(",")
            name = named(key.strip(), SORT_KEYS, "--sort", "a key to sort by")
            if direction.strip().lower() not in {"", "asc", "desc"}:
                raise UsageError(f"--sort: {quoted(direction.strip())} after the key; write {name} or {name},desc")
            self.keys.add(name)
            self._view = ViewState(sort=SORT_KEYS[name], reverse=direction.strip().lower() == "desc")

    @property
    def sorts(self) -> bool:
        """Whether an order was asked for."""
        return bool(self._view.sort)

    def listed(self, scene: Scene) -> list[Listed]:
        """Return the nodes that have GPUs that match, with these, and the nodes that match without any GPU."""
        found: list[Listed] = []
        for node in scene.snapshot.nodes:
            places = [one for gpu in node.gpus if (one := matching(Place(node, gpu), scene, self._matches)) is not None]
            if places or (not node.gpus and self._matches(node, None, scene)):
                found.append(Listed(node, places))
        return found

    def snapshot(self, scene: Scene, listed: Sequence[Listed]) -> Snapshot:
        """Return the part of the scene's snapshot that is listed; the same one where nothing can be left out."""
        if not self._tests:
            return scene.snapshot
        return msgspec.structs.replace(scene.snapshot, nodes=[one.cut() for one in listed])

    def ordered(self, scene: Scene, listed: Iterable[Listed]) -> list[Place]:
        """Return the GPUs that are listed in the order that was asked for, by default by node and index."""
        nodes = sorted(listed, key=lambda one: natural(one.node.name))
        return in_order([place for node in nodes for place in node.places], self._view, scene)

    def _matches(self, node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
        return all(holds(node, gpu, scene) for holds in self._tests)


def _of_user(user: str) -> Matches:
    """Return whether GPUs belong to a user, by full name. Raises UsageError."""
    if '"' in user:
        raise UsageError(f"--user: {quoted(user)} is not a user's name")
    return GPUS.parse(f'user="{user}"').matches
