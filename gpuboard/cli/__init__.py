"""The commands: one module each; stdout is data, stderr is for people."""
