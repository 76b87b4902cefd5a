"""Which of a node's GPUs a Slurm job has there, by what Slurm tells the job's processes. Pure.

SLURM_STEP_GPUS are the numbers of the device files (/dev/nvidia3: 3) that the step has on this node; a batch script has
no step's variables but SLURM_JOB_GPUS, which is the same for the first node of the job and wrong on the others. NVML
tells a GPU's number as its minor number. CUDA_VISIBLE_DEVICES says nothing: it counts from 0 under device cgroups,
where NVML shows the job's GPUs only, and scripts set it to what they like; but MIG devices are named nowhere else.
"""

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Mapping, Optional, Tuple


class JobGpus:
    """The GPUs of the job that a process with the variables ``environ`` is in. Without any it has none."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        first = environ.get("SLURM_NODEID", "") == "0"
        text = environ.get("SLURM_STEP_GPUS") or (environ.get("SLURM_JOB_GPUS", "") if first else "")
        self.numbers = {int(word) for word in text.split(",") if word.isdigit()}
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        # A job that was requeued is another one: what was reserved in it before is over.
        self.tag = environ.get("SLURM_JOB_ID", "") + ("" if restarts == "0" else "." + restarts)
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.mig = {word for word in visible if word.startswith("MIG-")} if text else set()

    def only(self, statics: "List[Dict[str, Any]]") -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        """Return those of the node's GpuStatic that are the job's, and why they cannot be told."""
        if self.mig:
            return self._mig_devices(statics), None
        if not self.numbers or not statics:
            return [], None
        found = [gpu for gpu in statics if gpu.get("minor") in self.numbers]
        if len(found) == len(self.numbers):
            return found, None
        numbered = [gpu for gpu in statics if gpu.get("minor") is not None]
        if not found and len(statics) == len(self.numbers):
            return statics, None  # numbered anew, as in a container: what NVML shows is what there is
        if not numbered:
            words = "which of the %d GPUs here are the job's cannot be told: NVML does not tell their device files"
            return [], words % len(statics)
        # one that NVML cannot read has no number: it may be the one that is missing
        unread = [gpu for gpu in statics if gpu.get("minor") is None]
        return [gpu for gpu in statics if gpu in found or gpu in unread], None

    def _mig_devices(self, statics: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        found = []
        for gpu in statics:
            devices = [device for device in gpu.get("mig") or () if device["uuid"] in self.mig]
            if devices:
                found.append(dict(gpu, mig=devices))
        return found

    def readings(self, readings: "List[Dict[str, Any]]", statics: "List[Dict[str, Any]]") -> "List[Dict[str, Any]]":
        """Return the GpuReadings of what ``only`` has returned."""
        known = {gpu["uuid"]: {device["uuid"] for device in gpu.get("mig") or ()} for gpu in statics}
        found = []
        for reading in readings:
            if reading["uuid"] in known:
                devices = known[reading["uuid"]]
                found.append(dict(reading, mig=[part for part in reading.get("mig", ()) if part["uuid"] in devices]))
        return found
