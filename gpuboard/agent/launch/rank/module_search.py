"""Where the modules of a target are, found without importing the packages around them.

This source is executed in the training interpreter: in a rank, and by preflight.
"""

import importlib.machinery
import sys

MYPY = False
if MYPY:
    from typing import Iterator, Optional, Sequence


def specs(module: str, search: "Sequence[str]") -> "Iterator[importlib.machinery.ModuleSpec]":
    """Yield the specs of the packages around ``module`` and of itself, as far as they are found.

    Looked for in ``search``, in place of sys.path, then by the finders that installations add, as editable ones do.
    """
    places: "Optional[Sequence[str]]" = search
    name = ""
    for part in module.split("."):
        name += part
        if places is None:  # the one before is no package
            return
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        if spec is None:
            spec = _otherwise(name, places if "." in name else None)
        if spec is None:
            return
        yield spec
        places = spec.submodule_search_locations and list(spec.submodule_search_locations)
        name += "."


def _otherwise(name: str, places: "Optional[Sequence[str]]") -> "Optional[importlib.machinery.ModuleSpec]":
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, places)
        except Exception:  # whatever it is, the import itself reports it
            continue
        if spec is not None:
            return spec
    return None
