"""Code that runs inside a rank beside its worker; no module here imports another one of gpuboard."""
