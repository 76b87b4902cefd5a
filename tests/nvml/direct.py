"""A minimal reader of NVML for comparison."""

# A program that reads everything with nvidia-ml-py and prints it as JSON, with the keys of gpuboard/model/gpu.py.
DIRECT = """
import json
import pynvml as n
n.nvmlInit()
count = n.nvmlDeviceGetCount()
handles = [n.nvmlDeviceGetHandleByIndex(k) for k in range(count)]
uuids = [n.nvmlDeviceGetUUID(h) for h in handles]
def pids(h):
    rows = [[p.pid, "compute", p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]
    rows += [[p.pid, "compute", p.usedGpuMemory] for p in n.nvmlDeviceGetMPSComputeRunningProcesses_v3(h)]
    return rows + [[p.pid, "graphics", p.usedGpuMemory] for p in n.nvmlDeviceGetGraphicsRunningProcesses(h)]
gpus = []
for k, h in enumerate(handles):
    memory = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    rows = n.nvmlDeviceGetRemappedRows(h)
    gpus.append({
        "index": k, "uuid": uuids[k], "name": n.nvmlDeviceGetName(h), "pci_bus_id": n.nvmlDeviceGetPciInfo(h).busId,
        "memory_total": memory.total, "memory_reserved": memory.reserved, "memory_used": memory.used,
        "pcie_generation_max": n.nvmlDeviceGetMaxPcieLinkGeneration(h),
        "pcie_width_max": n.nvmlDeviceGetMaxPcieLinkWidth(h),
        "pcie_generation": n.nvmlDeviceGetCurrPcieLinkGeneration(h), "pcie_width": n.nvmlDeviceGetCurrPcieLinkWidth(h),
        "utilization": n.nvmlDeviceGetUtilizationRates(h).gpu, "temperature": n.nvmlDeviceGetTemperatureV(h, 0),
        "power": n.nvmlDeviceGetPowerUsage(h) / 1000, "power_limit": n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
        "compute_mode": n.nvmlDeviceGetComputeMode(h), "ecc_uncorrected": n.nvmlDeviceGetTotalEccErrors(h, 1, 0),
        "remap_pending": bool(rows[2]), "remap_failed": bool(rows[3]), "processes": pids(h),
        "affinity": [int(word) for word in n.nvmlDeviceGetCpuAffinity(h, 2)],
        "pci": {uuids[j]: n.nvmlDeviceGetTopologyCommonAncestor(h, o) for j, o in enumerate(handles) if j != k},
        "numa_node": n.nvmlDeviceGetMemoryAffinity(h, 1, 0)[0].bit_length() - 1,
    })
print(json.dumps({"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(), "gpus": gpus}))
"""
