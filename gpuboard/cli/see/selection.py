"""Which GPUs `gpuboard status` lists, and in what order: --filter, --user, --free and --sort."""

from __future__ import annotations

import argparse

import msgspec

from gpuboard.board.arrange import SORTS, Matches, ViewState, arrange
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.filter.language import QueryError
from gpuboard.board.filter.matchers import ME
from gpuboard.board.scene import Place, Scene
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


class Selection:
    """What the options select."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UsageError for an invalid filter, user or key."""
        self._tests: list[Matches] = []
        self.keys: set[str] = set()  # of the filter and the order
        if args.filter:
            try:
                query = GPUS.parse(args.filter)
                self._tests.append(query.matches)
                self.keys |= query.keys
            except QueryError as error:
                raise UsageError(f"--filter: {error}") from None
        if args.user:
            self._tests.append(GPUS.parse("user:me").matches if args.user == ME else _of_user(args.user))
        if args.free:
            self._tests.append(GPUS.parse("state:free").matches)
        self._free: bool = args.free
        self._view = ViewState()
        if args.sort:
            key, _, direction = args.sort.partition(",")
            name = named(key.strip(), SORT_KEYS, "--sort", "a key to sort by")
            if direction.strip().lower() not in {"", "asc", "desc"}:
                raise UsageError(f"--sort: {quoted(direction.strip())} after the key; write {name} or {name},desc")
            self.keys.add(name)
            self._view = ViewState(sort=SORT_KEYS[name], reverse=direction.strip().lower() == "desc")

    @property
    def filters(self) -> bool:
        """Whether any GPU may be left out."""
        return bool(self._tests)

    @property
    def sorts(self) -> bool:
        """Whether an order was asked for."""
        return bool(self._view.sort)

    def listed(self, scene: Scene) -> Snapshot:
        """Return the snapshot with the GPUs that match, and the nodes that have such or match without any GPU."""
        if not self.filters:
            return scene.snapshot
        nodes: list[NodeView] = []
        for node in scene.snapshot.nodes:
            gpus = [self._part(gpu) for gpu in node.gpus if self._matches(node, gpu, scene)]
            if gpus or (not node.gpus and self._matches(node, None, scene)):
                nodes.append(msgspec.structs.replace(node, gpus=gpus))
        return msgspec.structs.replace(scene.snapshot, nodes=nodes)

    def ordered(self, scene: Scene) -> list[Place]:
        """Return the GPUs of ``scene`` in the order that was asked for."""
        return [row for row in arrange(scene, self._view) if isinstance(row, Place)]

    def _matches(self, node: NodeView, gpu: GpuView | None, scene: Scene) -> bool:
        return all(holds(node, gpu, scene) for holds in self._tests)

    def _part(self, gpu: GpuView) -> GpuView:
        """Return a GPU without the MIG devices that --free leaves out."""
        if not self._free or not gpu.mig:
            return gpu
        return msgspec.structs.replace(gpu, mig=[mig for mig in gpu.mig if mig.state == "free"])


def _of_user(user: str) -> Matches:
    """Return whether GPUs belong to a user, by full name. Raises UsageError."""
    if '"' in user:
        raise UsageError(f"--user: {quoted(user)} is not a user's name")
    return GPUS.parse(f'user="{user}"').matches
