"""Simulated GPUs for the demo, in place of NVML."""
