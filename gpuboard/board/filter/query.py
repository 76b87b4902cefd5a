"""The filter's language → a predicate (pure).

    user:alice state:free,busy mem>40G -model:L40S node:gpu[01-04] util<10 age>5s "python train"

All terms must match. A plain word matches any text shown of a GPU. ``key:value`` matches a part (or the beginning),
``key=value`` the whole value, and numbers also take ``< <= > >=``. A comma means or, a leading ``-`` means not, quotes
keep spaces, ``?`` as a value means unknown. An unknown number matches no comparison, also after ``-``. Case is ignored.
"""

from __future__ import annotations

from typing import TypeAlias

from gpuboard.board.filter import language
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.filter.language import TEXT_MAX, QueryError
from gpuboard.board.scene import Scene
from gpuboard.model.snapshot import GpuView, NodeView

__all__ = ["TEXT_MAX", "Query", "QueryError", "parse"]

Query: TypeAlias = language.Query[[NodeView, GpuView | None, Scene]]  # of GPUs, or of a node without known GPUs
parse = GPUS.parse  # lists of other rows have languages of their own
