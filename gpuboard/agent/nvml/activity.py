"""What GPUs do beyond utilization: GPM's metrics (Hopper and later), PCIe and NVLink throughput. Imports pynvml.

GPM's metrics are averages between two samples and cost little, so all GPUs are measured. Without GPM only the GPU that
a person looks at is: PCIe throughput takes the driver 20 ms a call, and NVLinks are read one by one.
"""

import time

import pynvml  # always by full names: only what these name is sent (gpuboard/transport/bundle.py)

from gpuboard.agent.nvml.terms import RATE_SPAN_S, RATES

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    Rates = Dict[str, int]  # fields of Sensors (gpuboard/model/gpu.py)

_MIB = 2**20
_METRICS = (  # field of Sensors, GPM's metric, factor from its unit: percent and MiB/s
    ("sm_activity", pynvml.NVML_GPM_METRIC_SM_UTIL, 1),
    ("sm_occupancy", pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, 1),
    ("tensor_activity", pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 1),
    ("tensor_hmma", pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL, 1),
    ("tensor_imma", pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL, 1),
    ("tensor_dmma", pynvml.NVML_GPM_METRIC_DMMA_TENSOR_UTIL, 1),
    ("dram_activity", pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 1),
    ("pcie_sent", pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
    ("pcie_received", pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
    ("nvlink_sent", pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _MIB),
    ("nvlink_received", pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _MIB),
)
_ABSURD = 1e9  # metrics from here on, and NaN, are no measurement
_SHARE = 0.002  # of a core, at most, for GPM's metrics of all GPUs: a driver that takes longer is asked less often
_OLD_S = 20.0  # a counter read longer ago is no start of a rate


class ActivityMeter:
    """Adds to readings what the GPUs do. ``mark``: as of ``serve`` in reader.py."""

    def __init__(self, mark: "Any", handles: "Dict[int, Any]") -> None:
        self.mark = mark
        self.handles = handles
        self.due = 0.0  # when GPM is sampled next, monotonic
        self.gpm: "Dict[int, Optional[_Gpm]]" = {}  # None: not supported
        self.found: "Dict[int, Rates]" = {}  # of GPM, newest
        self.links: "Dict[int, _NvLinks]" = {}
        self.request = pynvml.c_nvmlGpmMetricsGet_t()
        self.request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self.request.numMetrics = len(_METRICS)
        for number, (_, metric, _) in enumerate(_METRICS):
            self.request.metrics[number].metricId = metric

    def add(self, values: "Dict[int, Dict[str, Any]]", looked: int) -> None:
        """Add to the sensors of ``values``, by index: GPM's metrics, and all that is known of GPU ``looked``."""
        self.mark[0] = RATES
        if time.monotonic() >= self.due:
            began, cpu_s = time.monotonic(), time.process_time()
            known = self.gpm.keys() >= values.keys()  # otherwise this round sets up GPM, which takes longer once
            self.found = {k: self._metrics(k) for k in values}
            self.due = began + max(RATE_SPAN_S, (time.process_time() - cpu_s) / _SHARE if known else 0.0)
        for k, value in values.items():
            rates = dict(self.found.get(k, ()))
            if k == looked:
                rates = dict(self._counted(k, rates), **rates)
            if rates:
                value["sensors"] = dict(value.get("sensors", ()), **rates)

    def _beat(self) -> None:
        self.mark[1] = (self.mark[1] + 1) % 256

    def _metrics(self, k: int) -> "Rates":
        self._beat()
        if k not in self.gpm:
            self.gpm[k] = _gpm(self.handles[k])
        gpm = self.gpm[k]
        try:
            return {} if gpm is None else gpm.metrics(self.request)
        except pynvml.NVMLError:
            return {}

    def _counted(self, k: int, known: "Rates") -> "Rates":
        """Return PCIe throughput unless ``known`` has it, NVLink's and its maximum."""
        self._beat()
        handle, found = self.handles[k], {}  # type: Any, Dict[str, Optional[int]]
        if "pcie_sent" not in known:  # NVML's unit is KB/s
            found["pcie_sent"] = _times(
                1000, pynvml.nvmlDeviceGetPcieThroughput, handle, pynvml.NVML_PCIE_UTIL_TX_BYTES
            )
            found["pcie_received"] = _times(
                1000, pynvml.nvmlDeviceGetPcieThroughput, handle, pynvml.NVML_PCIE_UTIL_RX_BYTES
            )
        self._beat()
        if k not in self.links:
            self.links[k] = _NvLinks(handle)
        found.update(self.links[k].rates(counted="nvlink_sent" not in known))
        return {name: value for name, value in found.items() if value is not None}


def _gpm(handle: "Any") -> "Optional[_Gpm]":
    """Return GPM of a GPU; None where GPU or driver do not support it."""
    try:
        return _Gpm(handle) if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice else None
    except pynvml.NVMLError:
        return None


class _Gpm:
    """GPM of one GPU: two samples, taken in turn."""

    def __init__(self, handle: "Any") -> None:
        self.handle = handle
        self.linked = bool(_active(handle))  # without NVLinks the driver reports their throughput as 0
        self.samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self.sampled = False

    def metrics(self, request: "Any") -> "Rates":
        """Return the averages since the last call; none at the first. Raises NVMLError, also in MIG mode."""
        self.samples.reverse()
        before, now = self.samples
        sampled, self.sampled = self.sampled, False
        pynvml.nvmlGpmSampleGet(self.handle, now)
        self.sampled = True
        if not sampled:
            return {}
        request.sample1, request.sample2 = before, now
        pynvml.nvmlGpmMetricsGet(request)
        found = {}
        for number, (name, _, factor) in enumerate(_METRICS):
            metric = request.metrics[number]
            if name.startswith("nvlink") and not self.linked:
                continue
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value < _ABSURD:
                found[name] = int(metric.value * factor + 0.5) if factor > 1 else min(100, int(metric.value + 0.5))
        return found


class _NvLinks:
    """The active NVLinks of one GPU, and the bytes that they have carried."""

    def __init__(self, handle: "Any") -> None:
        self.handle = handle
        self.links = _active(handle)
        speed = self._fields([pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]) if self.links else None  # of each, 10^6 B/s
        self.most = None if speed is None or not speed[0] else speed[0] * len(self.links) * 10**6
        self.last: "Optional[Tuple[float, int, int]]" = None  # monotonic s, bytes sent and received

    def rates(self, *, counted: bool) -> "Dict[str, Optional[int]]":
        """Return the sum of the links' speeds and, with ``counted``, the throughput since the last call."""
        if not self.links:
            return {}
        found = {"nvlink_max": self.most}
        if counted:
            sent = [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, link) for link in self.links]
            received = [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, link) for link in self.links]
            kib, at, last = self._fields(sent + received), time.monotonic(), self.last
            self.last = None
            if kib is not None:
                self.last = (at, 1024 * sum(kib[: len(sent)]), 1024 * sum(kib[len(sent) :]))
            if self.last is not None and last is not None and 0 < at - last[0] < _OLD_S:
                rates = [int((self.last[way] - last[way]) / (at - last[0])) for way in (1, 2)]
                if min(rates) >= 0:  # otherwise the counters were reset
                    found["nvlink_sent"], found["nvlink_received"] = rates
        return found

    def _fields(self, fields: "List[Any]") -> "Optional[List[int]]":
        """Return the numbers of NVML's fields; None where any of them is not reported."""
        try:
            values = pynvml.nvmlDeviceGetFieldValues(self.handle, fields)
        except pynvml.NVMLError:
            return None
        if any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
            return None
        return [int(value.value.ullVal) for value in values]


def _active(handle: "Any") -> "List[int]":
    found = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                found.append(link)
        except pynvml.NVMLError:
            break  # after the last link
    return found


def _times(factor: int, call: "Callable[..., Any]", *args: "Any") -> "Optional[int]":
    try:
        return factor * int(call(*args))
    except pynvml.NVMLError:
        return None
