"""The past of GPUs and cluster: the last five minutes, hour and day (docs/board.md, History)."""

from gpuboard.board.history.bins import slices
from gpuboard.board.history.records import MEMORY, POWER, UTILIZATION, HostSamples, Samples
from gpuboard.board.history.rings import DAY, FIVE_MINUTES, HOUR, SPAN_S, SPANS, Cluster, History, Span

__all__ = [
    "DAY",
    "FIVE_MINUTES",
    "HOUR",
    "MEMORY",
    "POWER",
    "SPANS",
    "SPAN_S",
    "UTILIZATION",
    "Cluster",
    "History",
    "HostSamples",
    "Samples",
    "Span",
    "slices",
]
