"""What to try after an exception whose message does not say it (pure); docs/troubleshooting.md has the explanations."""

from __future__ import annotations

import re

_ADVICE = [
    (
        r"device-side assert triggered|illegal memory access",
        "the error may be of an earlier call: --env CUDA_LAUNCH_BLOCKING=1 shows which; often an index or label is out "
        "of range",
    ),
    (
        r"busy or unavailable",
        "`gpuboard status` shows the compute mode and the processes of the GPU; --exclude leaves it out",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "start processes by spawn (DataLoader: multiprocessing_context='spawn'), or use CUDA after the fork only",
    ),
    (r"invalid device ordinal", "the number of a rank's GPU is LOCAL_RANK, not RANK"),
    (
        r"enforce fail.*rank < size",
        "the script changes RANK or WORLD_SIZE, or passes others to init_process_group: leave them as they are set",
    ),
    (
        r"address already in use|EADDRINUSE",
        "leave MASTER_PORT as it is; a server in the script needs another port for each rank of a node",
    ),
    (
        r"connectFullMesh failed",
        "the ranks cannot reach the addresses that they chose: remove GLOO_SOCKET_IFNAME, which launch sets to the "
        "interface between the nodes; `gpuboard doctor --rank-map` tests the connections",
    ),
    (
        r"doesn't have NCCL built in",
        "install a torch with CUDA, or use the backend gloo with --device cpu",
    ),
    (
        r"Process group cannot be None",
        "destroy_process_group() was called twice, or without a group: call it once, if "
        "torch.distributed.is_initialized()",
    ),
    (
        r"context has already been set",
        "call multiprocessing.set_start_method() once, below `if __name__ == '__main__':`; mp.spawn needs no call",
    ),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        "the script uses CUDA, which this torch or this node lacks: take the device from torch.cuda.is_available(), or "
        "install a torch with CUDA",
    ),
    (
        r"not compatible with static_graph",
        "remove static_graph=True: with it, the same parameters must get a gradient in each step",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "use every parameter in each step, or pass find_unused_parameters=True to DistributedDataParallel",
    ),
    (
        r"inline_container.*unexpected pos|PytorchStreamWriter failed writing",
        "torch.save could not write the whole file: is the disk or the quota full?",
    ),
    (
        r"insufficient shared memory|unexpected bus error|out of shared memory",
        "fewer DataLoader workers, or a larger /dev/shm (docker: --shm-size)",
    ),
    (
        r"before the\s+current process has finished its bootstrapping",
        "put the start of the script below `if __name__ == '__main__':`",
    ),
    (r"Too many open files", "raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')"),
]  # fmt: skip
_KNOWN = [(re.compile(pattern, re.IGNORECASE | re.DOTALL), words) for pattern, words in _ADVICE]


def advice(text: str) -> str:
    """Return what to try after an exception with this type and message, "" if nothing is known."""
    return next((words for pattern, words in _KNOWN if pattern.search(text)), "")
