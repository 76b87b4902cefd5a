"""Commands that run something on GPUs: run, launch, runs, logs, attach, stop, explain."""
