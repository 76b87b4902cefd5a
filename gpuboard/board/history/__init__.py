"""The past of GPUs and cluster: the last five minutes, hour and day (docs/board.md, History)."""

from gpuboard.board.history.records import HostSamples, Samples, is_current
from gpuboard.board.history.rings import DAY, FIVE_MINUTES, HOUR, SPAN_S, SPANS, Cluster, History, Span

__all__ = [
    "DAY",
    "FIVE_MINUTES",
    "HOUR",
    "SPANS",
    "SPAN_S",
    "Cluster",
    "History",
    "HostSamples",
    "Samples",
    "Span",
    "is_current",
]
