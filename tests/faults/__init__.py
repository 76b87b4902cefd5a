"""Faults of distributed programs: each is started once, and gpuboard must explain it."""
