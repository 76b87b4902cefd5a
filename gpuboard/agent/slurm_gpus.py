"""Which of a node's GPUs belong to a Slurm job, by the variables that Slurm sets for its processes. Pure.

SLURM_STEP_GPUS lists Slurm's numbers of a step's GPUs on its node. A batch script has SLURM_JOB_GPUS instead, which is
the same on the job's first node and wrong on the others. The numbers are positions in the device list of gres.conf
(Slurm 22.05: `File=/dev/nvidia[2-5]` gives 0 to 3) or, with AutoDetect, of NVML; never those of device files. Slurm
sets CUDA_VISIBLE_DEVICES to them, and CUDA reads them as its own indexes. Under device cgroups NVML shows the job's
GPUs only, and CUDA_VISIBLE_DEVICES counts from 0. Scripts may have overwritten it.
"""

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Mapping, Optional, Tuple


class JobGpus:
    """The GPUs of the job that a process with the environment ``environ`` is in; none without Slurm's variables."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        first = environ.get("SLURM_NODEID", "") == "0"
        text = environ.get("SLURM_STEP_GPUS") or (environ.get("SLURM_JOB_GPUS", "") if first else "")
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.count = len(text.split(",")) if text else 0
        self.indexes = _numbers(visible)
        if len(self.indexes) != self.count:  # set by a script
            self.indexes = _numbers(text.split(","))
        self.mig = {word for word in visible if word.startswith("MIG-")} if text else set()
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        # A requeued job counts as another one: its earlier claims have ended.
        self.tag = environ.get("SLURM_JOB_ID", "") + ("" if restarts == "0" else "." + restarts)

    def only(self, statics: "List[Dict[str, Any]]") -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        """Return (GpuStatics of the job's GPUs, why they cannot be determined)."""
        if self.mig:
            return self._mig_devices(statics), None
        if not self.count or not statics:
            return [], None
        if len(statics) == self.count:
            return statics, None
        found = [gpu for gpu in statics if gpu["index"] in self.indexes]
        if len(found) == self.count:
            return found, None
        message = "cannot match the job's GPUs: Slurm lists %d on this node, NVML shows %d"
        return [], message % (self.count, len(statics))

    def readings(self, readings: "List[Dict[str, Any]]", statics: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        """Return the GpuReadings of the GPUs that ``only`` returned."""
        known = {gpu["uuid"]: {device["uuid"] for device in gpu.get("mig") or ()} for gpu in statics}
        found = []
        for reading in readings:
            if reading["uuid"] in known:
                devices = known[reading["uuid"]]
                found.append(dict(reading, mig=[part for part in reading.get("mig", ()) if part["uuid"] in devices]))
        return found

    def _mig_devices(self, statics: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        found = []
        for gpu in statics:
            devices = [device for device in gpu.get("mig") or () if device["uuid"] in self.mig]
            if devices:
                found.append(dict(gpu, mig=devices))
        return found


def _numbers(texts: "List[str]") -> "List[int]":
    return [int(text) for text in texts if text.isdigit()]
