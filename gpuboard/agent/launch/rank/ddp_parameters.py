"""The names of the parameters that an error of DistributedDataParallel gives as numbers.

This source is executed in the rank, before ``exception``. torch names them with TORCH_DISTRIBUTED_DEBUG only.
"""

import re
import sys
import traceback

MYPY = False
if MYPY:
    from types import TracebackType
    from typing import Any, List, Optional

_NO_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_SHOWN = 8  # names


def without_gradient(message: str, trace: "Optional[TracebackType]") -> str:
    """Return the names of the parameters that a message numbers, as text; "" for other messages and without names.

    The error is raised in the next forward(), so a frame has the model.
    """
    found = _NO_GRADIENT.search(message)
    names = _names(trace) if found else []
    indices = [int(index) for index in found.group(1).split()] if found else []
    if not indices or max(indices) >= len(names):  # requires_grad has changed since
        return ""
    listed = ", ".join(names[index] for index in indices[:_SHOWN])
    more = len(indices) - _SHOWN
    return "parameters without a gradient: %s%s" % (listed, " and %d more" % more if more > 0 else "")


def _names(trace: "Optional[TracebackType]") -> "List[str]":
    """Return the names of the model's parameters in the order of the reducer's indices."""
    kind: "Any" = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    models: "List[Any]" = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    for model in reversed(models):
        if issubclass(type(model), kind):
            named = model.module.named_parameters()
            return [name for name, one in named if one.requires_grad and name not in model.parameters_to_ignore]
    return []
