"""The difference between two readings, nearly always numbers alone. Sent to clients that ask for it."""

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

# Of a GPU, in the order in which they are sent: ``GpuNumbers`` and ``GpuDetails`` in gpuboard/model/reading.py.
NUMBERS = ("memory_used", "utilization", "temperature", "power", "pcie_generation")
DETAILS = ("sensors", "loads")  # which a client decodes only for GPUs that it shows
_MOVING = NUMBERS + DETAILS
_OF_NODE = ("nvml_error", "claims_error", "interval_s")  # what a delta does not change, beside the GPUs
CLAIMS_MOST = 64  # more of them make a reading large, with numbers or without


class Deltas:
    """Compares each reading of one connection with the last whole one."""

    def __init__(self) -> None:
        self._seq = 0  # of the last whole reading
        self._kept: "Optional[List[Any]]" = None  # all of it that is no number

    def shortened(self, reading: "Dict[str, Any]") -> "Dict[str, Any]":
        """Return the message to send for ``reading``: a delta where only numbers and claims have changed."""
        gpus = reading["gpus"]
        kept: "List[Any]" = [{name: gpu[name] for name in gpu if name not in _MOVING} for gpu in gpus]
        kept += [reading.get(name) for name in _OF_NODE]
        if kept != self._kept or len(reading["claims"]) > CLAIMS_MOST:
            self._seq, self._kept = reading["seq"], kept
            return reading
        delta = {name: reading[name] for name in reading if name not in _OF_NODE}
        delta.update(t="delta", of=self._seq, gpus=[_values(gpu, NUMBERS) for gpu in gpus])
        details = [_values(gpu, DETAILS) for gpu in gpus]
        if any(details):
            delta["details"] = details
        return delta


def _values(gpu: "Dict[str, Any]", names: "Tuple[str, ...]") -> "List[Any]":
    """Return a GPU's values of these names, without those at the end that are unknown or empty."""
    found = [gpu.get(name) for name in names]
    while found and (found[-1] is None or found[-1] == []):
        found.pop()
    return found
