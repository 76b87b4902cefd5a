"""Rank map + target + environment + options → launch plan (pure), with the start config of every node."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from gpuboard.errors import UsageError
from gpuboard.launch.environ import redacted
from gpuboard.launch.target import Target
from gpuboard.model.rankmap import RankMap, RankNode, problems
from gpuboard.model.text import clean

_SHOWN = 20  # errors of a rank map that a message lists
LOOPBACK = "127.0.0.1"
# Names that ssh, a hostfile and a shell accept unquoted; a leading dash would be read as an option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UUID = re.compile(r"[A-Za-z0-9_./-]+")


Device = Literal["cuda", "cpu"]


class LaunchOptions(msgspec.Struct, frozen=True):
    """The options of ``gpuboard launch`` for the run itself."""

    device: Device = "cuda"
    python: str | None = None  # the nodes' training interpreter; None: found on each node
    wrap: tuple[str, ...] = ()  # command put before the interpreter (a container's exec)
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    lost_head_s: float | None = 60.0  # a node without pings for this long ends its ranks; None: never
    timeout_s: float = 600.0  # of init_process_group, in function targets
    preimport: bool = True  # import torch before the target, unless that changes the environment first
    on_stall: Literal["report", "kill"] = "report"  # kill: a stalled run fails
    helper_grace_s: float = 30.0  # for processes that ranks leave running after success
    stdin_rank: int | None = None  # the rank that gets this process's standard input; None: no rank
    skip: tuple[str, ...] = ()  # checks that do not keep the gate closed
    preflight_only: bool = False  # start no rank
    max_restarts: int = 0  # further attempts after a failure
    min_ranks: int | None = None  # with which a restart goes on where GPUs are lost; None: as many as at first


class StartRank(msgspec.Struct, frozen=True):
    """One rank in the start config of its node's supervisor."""

    rank: int
    local_rank: int
    index: int
    uuid: str
    memory_fraction: float | None


class StartConfig(msgspec.Struct, frozen=True):
    """The start config of one supervisor (docs/launch-protocol.md)."""

    run: str
    secret: str
    lease: str | None
    node: str
    node_rank: int
    nodes: int
    world_size: int
    ranks: list[StartRank]
    cuda_visible_devices: str
    device: Device
    master_addr: str
    listen: bool
    target: Target
    python: str | None
    cwd: str
    environ: dict[str, str]
    wrap: list[str]
    backend: str
    timeout_s: float
    lost_head_s: float | None
    preimport: bool
    helper_grace_s: float
    stdin_rank: int | None
    attempt: int  # 1, 2, …: a restart of the run is another attempt
    max_restarts: int


class LaunchPlan(msgspec.Struct, frozen=True):
    """All decisions of a run, made before it starts. ``nodes`` is in the order of the node ranks."""

    run: str
    rank_map: RankMap
    options: LaunchOptions
    target: Target
    nodes: list[StartConfig]

    @property
    def attempt(self) -> int:
        """The attempt's number; 1: not a restart."""
        return self.nodes[0].attempt


def check_rank_map(rank_map: RankMap, known: Collection[str], where: str, device: Device) -> None:
    """Raise UsageError listing all errors of ``rank_map``; ``where`` is its source.

    ``known`` are the names of the inventory.
    """
    wrong = problems(rank_map, device)
    inventory = clean(", ".join(sorted(known)), 400) or "none"
    for node in rank_map.nodes:
        if not _HOST.fullmatch(node.name):
            wrong.append(f"node {node.name!r} is not a host name: only letters, digits, dots, dashes, underscores")
        elif node.name not in known:
            wrong.append(
                f"node {node.name!r} is not in the inventory ({inventory}); "
                "add it to `nodes` in the config file, or pass --nodes"
            )
        if not _host_or_address(node.address):
            wrong.append(f"node {node.name!r}: {node.address!r} is neither a host name nor an IP address")
        if not all(_UUID.fullmatch(device) for device in node.cuda_visible_devices.split(",") if device):
            wrong.append(
                f"node {node.name!r}: cuda_visible_devices {node.cuda_visible_devices!r} is not a list of GPUs"
            )
    if not _host_or_address(rank_map.master_addr):
        wrong.append(f"master_addr {rank_map.master_addr!r} is neither a host name nor an IP address")
    if wrong:
        more = [f"… and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise UsageError(f"{clean(where)}:\n" + "\n".join(f"  {clean(line)}" for line in [*wrong[:_SHOWN], *more]))


def _host_or_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text))
    return True


def is_loopback(address: str) -> bool:
    """Return whether ``address`` (IP address or name) is that of the local machine only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost" or address.startswith("localhost.")


def launch_plan(
    rank_map: RankMap,
    target: Target,
    *,
    run: str,
    secret: str,
    cwd: str,
    environ: Mapping[str, str],
    options: LaunchOptions,
    attempt: int = 1,
) -> LaunchPlan:
    """Return the plan of a run's first or later ``attempt`` on a valid rank map.

    A single node uses 127.0.0.1, not the address in the map: no name service, no firewall. Raises UsageError when the
    master address of several nodes is a loopback address, for links of one GPU, and for text that is not UTF-8.
    """
    _check_text({"the folder": cwd, "--python": options.python or "", "the target": target.name})
    _check_text({f"argument {at} of the target": word for at, word in enumerate(target.args, 1)})
    _check_text({f"the variable {name}": value for name, value in environ.items()})
    _check_text({"--wrap": " ".join(options.wrap)})
    if options.stdin_rank is not None and options.stdin_rank >= rank_map.world_size:
        raise UsageError(f"--stdin {options.stdin_rank}: the ranks are 0 to {rank_map.world_size - 1}")
    if target.kind == "builtin" and rank_map.world_size < 2:
        raise UsageError("links need two GPUs at least; pass --n 2 or more")
    nodes = sorted(rank_map.nodes, key=lambda n: n.node_rank)
    master = LOOPBACK if len(nodes) == 1 else rank_map.master_addr
    if is_loopback(master) and any(
        node.address != master for node in nodes[1:]
    ):  # if all are equal, it is one machine (the demo)
        raise UsageError(
            f"master_addr {master} is a loopback address, which {nodes[1].name} cannot reach; "
            f"set it to an address of {nodes[0].name} that the other nodes can reach"
        )

    def start(node: RankNode) -> StartConfig:
        ranks = sorted((r for r in rank_map.ranks if r.node == node.name), key=lambda r: r.local_rank)
        return StartConfig(
            run=run,
            secret=secret,
            lease=rank_map.lease,
            node=node.name,
            node_rank=node.node_rank,
            nodes=len(nodes),
            world_size=rank_map.world_size,
            ranks=[StartRank(r.rank, r.local_rank, r.index, r.uuid, r.memory_fraction) for r in ranks],
            cuda_visible_devices=node.cuda_visible_devices if options.device == "cuda" else "",
            device=options.device,
            master_addr=master,
            listen=node.node_rank == 0,
            target=target,
            python=options.python,
            cwd=cwd,
            environ=dict(environ),
            wrap=list(options.wrap),
            backend="nccl" if options.device == "cuda" else "gloo",
            timeout_s=options.timeout_s,
            lost_head_s=options.lost_head_s,
            preimport=options.preimport,
            helper_grace_s=options.helper_grace_s,
            stdin_rank=options.stdin_rank,
            attempt=attempt,
            max_restarts=options.max_restarts,
        )

    return LaunchPlan(run, rank_map, options, target, [start(node) for node in nodes])


def next_attempt(plan: LaunchPlan, rank_map: RankMap, secret: str) -> LaunchPlan:
    """Return the plan that restarts the run of ``plan``."""
    first = plan.nodes[0]
    return launch_plan(
        rank_map,
        plan.target,
        run=plan.run,
        secret=secret,
        cwd=first.cwd,
        environ=first.environ,
        options=plan.options,
        attempt=plan.attempt + 1,
    )


def _check_text(words: Mapping[str, str]) -> None:
    """Raise UsageError for bytes that are not UTF-8 (surrogates in Python), which JSON cannot represent."""
    for what, text in words.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what} is not UTF-8 and cannot be sent to the nodes: {text!r}") from None


def shown(plan: LaunchPlan) -> dict[str, object]:
    """Return the plan for printing and storing: without the run's secret and the values of keys and tokens."""
    raw: dict[str, object] = msgspec.to_builtins(plan)
    raw["nodes"] = [
        msgspec.to_builtins(msgspec.structs.replace(node, secret="(not shown)", environ=redacted(node.environ)))
        for node in plan.nodes
    ]
    return raw


def plan_text(plan: LaunchPlan) -> str:
    """Return the text that ``--dry-run`` prints."""
    first = plan.nodes[0]
    lines = [
        f"run {plan.run}: {shlex.join([*plan.target.words().split(), *plan.target.args])}",
        f"  ranks: {first.world_size}, nodes: {first.nodes}, {first.device} with {first.backend}"
        + (f", lease {first.lease}" if first.lease else ", no lease"),
        f"  master {first.master_addr}, port {plan.rank_map.master_port or 'chosen and bound at launch'}",
        f"  folder {first.cwd}, interpreter {first.python or 'of VIRTUAL_ENV, CONDA_PREFIX or PATH'}"
        + (f", wrapped in {shlex.join(first.wrap)}" if first.wrap else ""),
    ]
    for node in plan.nodes:
        lines.append(f"  {node.node}: CUDA_VISIBLE_DEVICES={node.cuda_visible_devices}")
        lines += [f"    rank {r.rank}  local rank {r.local_rank}  GPU {r.index}  {r.uuid}" for r in node.ranks]
    lines.append(f"  variables sent: {', '.join(first.environ) or 'none'}")
    return "\n".join(lines)
