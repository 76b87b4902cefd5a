"""gpuboard: see, reserve and use the GPUs of a cluster.

The Python interface is two functions, imported on first use so that ``import gpuboard`` costs nothing:

``lease(n=2, ...)``
    a context manager that reserves GPUs for the ``with`` block and sets CUDA_VISIBLE_DEVICES in it.
``status(...)``
    the current state of the cluster, a :class:`gpuboard.model.snapshot.Snapshot`.
"""

# No `from __future__ import annotations`: a local agent may run under Python 3.6.
TYPE_CHECKING = False
__version__ = "0.1.0"
__all__ = ["__version__", "lease", "status"]

if TYPE_CHECKING:  # importing typing takes 6 ms and would delay the agent (gpuboard/__main__.py)
    from typing import Any

    from gpuboard.api import lease, status


def __getattr__(name: str) -> "Any":
    """Import the Python interface on first use."""
    if name in {"lease", "status"}:
        from gpuboard import api

        return getattr(api, name)
    raise AttributeError(f"module 'gpuboard' has no attribute {name!r}")
