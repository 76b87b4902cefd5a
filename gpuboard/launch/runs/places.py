"""Where a rank ran when it wrote a part of its logs: a restart may use other GPUs (pure, but for sizes of files)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuboard.launch.runs.folder import FormerPlace, RankView, RunView


def moved(before: RunView, ranks: Mapping[int, RankView]) -> list[FormerPlace]:
    """Return the places that ranks had in earlier attempts; ``before``: the run at the end of the newest of them."""
    places = list(before.former)
    for old in before.ranks:
        now = ranks.get(old.rank)
        if now is None or (now.node, now.index) != (old.node, old.index):
            sizes = [_size(Path(before.folder) / f"rank-{old.rank}.{stream}") for stream in ("out", "err")]
            places.append(FormerPlace(old.rank, old.node, old.index, before.attempt, *sizes))
    return places


def labelled(view: RunView, rank: int, stream: str, offset: int, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of ``data`` by the GPU on which the rank wrote them, as ``gpu02:1``.

    ``offset``: where ``data`` starts in the log of ``stream`` ("out" or "err").
    """
    for place in view.former:
        end = place.out if stream == "out" else place.err
        if place.rank == rank and offset < end and data:
            yield f"{place.node}:{place.index}", data[: end - offset]
            data, offset = data[end - offset :], end
    if data:
        now = next((one for one in view.ranks if one.rank == rank), None)
        yield f"{now.node}:{now.index}" if now else "?", data


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the rank has written nothing
        return 0
