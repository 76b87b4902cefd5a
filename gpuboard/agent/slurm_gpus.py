"""Which of a node's GPUs a Slurm job has there, by what Slurm tells the job's processes. Pure.

SLURM_STEP_GPUS are Slurm's numbers of the GPUs that a step has on its node; a batch script has no step's variables but
SLURM_JOB_GPUS, which is the same for the first node of the job and wrong on the others. The numbers are places in the
list of devices of gres.conf (Slurm 22.05: `File=/dev/nvidia[2-5]` gives 0 to 3) or, with AutoDetect, in NVML's, never
those of device files. CUDA takes them for its own indexes, and so does every program that Slurm starts: it sets
CUDA_VISIBLE_DEVICES to them. Under device cgroups NVML shows the job's GPUs only, and CUDA_VISIBLE_DEVICES counts from
0; scripts may also have set it to what they like.
"""

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Mapping, Optional, Tuple


class JobGpus:
    """The GPUs of the job that a process with the variables ``environ`` is in. Without any it has none."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        first = environ.get("SLURM_NODEID", "") == "0"
        text = environ.get("SLURM_STEP_GPUS") or (environ.get("SLURM_JOB_GPUS", "") if first else "")
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.count = len(text.split(",")) if text else 0
        self.indexes = _numbers(visible)
        if len(self.indexes) != self.count:  # a script's own
            self.indexes = _numbers(text.split(","))
        self.mig = {word for word in visible if word.startswith("MIG-")} if text else set()
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        # A job that was requeued is another one: what was reserved in it before is over.
        self.tag = environ.get("SLURM_JOB_ID", "") + ("" if restarts == "0" else "." + restarts)

    def only(self, statics: "List[Dict[str, Any]]") -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        """Return those of the node's GpuStatic that are the job's, and why they cannot be told."""
        if self.mig:
            return self._mig_devices(statics), None
        if not self.count or not statics:
            return [], None
        if len(statics) == self.count:
            return statics, None
        found = [gpu for gpu in statics if gpu["index"] in self.indexes]
        if len(found) == self.count:
            return found, None
        words = "Slurm says that the job has %d GPUs here, and NVML shows %d, which do not fit"
        return [], words % (self.count, len(statics))

    def readings(self, readings: "List[Dict[str, Any]]", statics: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        """Return the GpuReadings of what ``only`` has returned."""
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


def _numbers(words: "List[str]") -> "List[int]":
    return [int(word) for word in words if word.isdigit()]
