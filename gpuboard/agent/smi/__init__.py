"""nvidia-smi on the node, where NVML cannot be loaded: the process that runs it, and pure readers of its output."""
