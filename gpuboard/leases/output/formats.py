"""An allocation as text: for shells, dotenv, JSON, Open MPI's hostfile and rankfile, DeepSpeed, UUIDs. Pure."""

from __future__ import annotations

import msgspec

from gpuboard.errors import UsageError
from gpuboard.leases.output.shell import SHELLS, assignments
from gpuboard.model.gpu import cuda_name, is_mig
from gpuboard.model.lease import Lease
from gpuboard.model.rankmap import RankMap, RankNode
from gpuboard.model.request import Refusal

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./,:@%+=-[]")


class Allocation(msgspec.Struct, frozen=True):
    """What was reserved: the lease, which rank gets which GPU, and why these."""

    lease: Lease
    rank_map: RankMap
    why: str
    rank_map_file: str = ""  # path of the rank map
    nodeset: str = ""  # the nodes, folded
    here: str | None = None  # its node that is this machine; None: it has no node here

    def on(self, node: str) -> Allocation:
        """Return the same allocation as ``node`` sees it."""
        return msgspec.structs.replace(self, here=node)


def render(allocation: Allocation, form: str, *, uuids: bool = False) -> str:
    """Return ``allocation`` in one of shell.FORMATS; ``uuids``: CUDA_VISIBLE_DEVICES by UUID instead of index.

    Raises UsageError for a format that cannot name what was reserved.
    """
    rank_map = allocation.rank_map
    if form in SHELLS:
        return assignments(form, variables(allocation, uuids=uuids))
    if form == "env":
        values = variables(allocation, uuids=uuids)
        return "".join(f"{name}={_dotenv(value)}\n" for name, value in values.items())
    if form == "json":
        value = {
            "schema": 1,
            "lease": msgspec.to_builtins(allocation.lease),
            "rank_map": rank_map,
            "why": allocation.why,
            "rank_map_file": allocation.rank_map_file,
        }
        try:
            return _json(value)
        except UnicodeEncodeError:
            raise UsageError(
                f"--format json: {allocation.rank_map_file}, the rank map's path, is not UTF-8; set XDG_STATE_HOME to "
                "a folder whose path is, or use --format shell"
            ) from None
    if form == "rank-map":
        return _json(rank_map)
    if form == "hostfile":  # https://docs.open-mpi.org/en/v5.0.x/launching-apps/scheduling.html#hostfiles
        return "".join(f"{node.name} slots={node.local_world_size}\n" for node in rank_map.nodes)
    if form == "rankfile":
        # mpirun(1), "Rankfiles": `slot=2` would bind a rank and its helpers to one core, --bind-to none or not, and
        # a missing core ends mpirun without a message. `S*`, all sockets, binds to nothing, in Open MPI 4 and 5
        return "".join(f"rank {rank.rank}={rank.node} slot=S*\n" for rank in rank_map.ranks)
    if form == "deepspeed":  # deepspeed --include: NODE_SPEC[@NODE_SPEC ...], NODE_SPEC=NAME[:SLOT[,SLOT ...]]
        if any(is_mig(rank.uuid) for rank in rank_map.ranks):
            raise UsageError(
                "--format deepspeed: MIG devices have no index, which DeepSpeed needs; use --format uuids or shell"
            )
        parts = [
            f"{node.name}:{','.join(str(rank.index) for rank in rank_map.ranks if rank.node == node.name)}"
            for node in rank_map.nodes
        ]
        return "@".join(parts) + "\n"
    if form == "uuids":  # a valid CUDA_VISIBLE_DEVICES
        return ",".join(cuda_name(rank.index, rank.uuid) for rank in rank_map.ranks) + "\n"
    raise ValueError(f"unknown format {form!r}")


def variables(allocation: Allocation, *, uuids: bool = False) -> dict[str, str]:
    """Return the environment of the lease on this machine; CUDA_VISIBLE_DEVICES is empty when it has no GPU here.

    Not MASTER_* nor WORLD_SIZE: they would make a plain ``python train.py`` wait for other ranks.
    """
    return {
        "GPUBOARD_LEASE": allocation.lease.id,
        "GPUBOARD_RANK_MAP": allocation.rank_map_file,
        "GPUBOARD_NODES": allocation.nodeset,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible_devices(allocation.rank_map, allocation.here, uuids=uuids),
    }


def visible_devices(rank_map: RankMap, node: str | None, *, uuids: bool = False) -> str:
    """Return CUDA_VISIBLE_DEVICES on ``node`` in the order of local ranks; "" if it has none of the GPUs."""
    if uuids:
        return ",".join(cuda_name(rank.index, rank.uuid) for rank in rank_map.ranks if rank.node == node)
    found: RankNode | None = next((entry for entry in rank_map.nodes if entry.name == node), None)
    return found.cuda_visible_devices if found else ""


def error_of(code: int, message: str, refusal: Refusal | None = None) -> dict[str, object]:
    """Return what the JSON of an allocation that failed has."""
    error = {
        "code": code,
        "message": message,
        "gpus": refusal.gpus if refusal else (),
        "nearest": refusal.nearest if refusal else "",
    }
    return {"schema": 1, "error": error}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode() + "\n"


def _dotenv(text: str) -> str:
    """Return ``text`` as a dotenv value, unquoted where every reader accepts that (docker accepts no quotes)."""
    if set(text) <= _PLAIN:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
