"""NVML on the node: a process that reads it, and the monitor that replaces that process when it hangs."""
