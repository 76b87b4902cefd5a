"""Target, variables and rank map → launch plan."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gpuboard.cli.context import Context
from gpuboard.cli.options import Parser, add_common
from gpuboard.cli.use import launch
from gpuboard.errors import UsageError
from gpuboard.launch import environ
from gpuboard.launch.plan import LaunchOptions, LaunchPlan, StartRank, launch_plan, plan_text, shown
from gpuboard.launch.target import Target, parse_target
from gpuboard.model.rankmap import Rank, RankMap, RankNode

MAP = RankMap(
    schema=1,
    lease="k3f9",
    master_addr="10.0.0.1",
    master_port=0,
    world_size=3,
    nodes=[RankNode("gpu02", "10.0.0.2", 1, 1, "GPU-c"), RankNode("gpu01", "10.0.0.1", 0, 2, "0,3")],
    ranks=[Rank(0, "gpu01", 0, 0, "GPU-a"), Rank(2, "gpu02", 0, 7, "GPU-c"), Rank(1, "gpu01", 1, 3, "GPU-b", 0.5)],
)


def planned(rank_map: RankMap = MAP, **changes: object) -> LaunchPlan:
    """Return a plan for ``rank_map``."""
    options = msgspec.structs.replace(LaunchOptions(), **changes)
    sent = {"PATH": "/bin", "WANDB_API_KEY": "t0ken"}
    target = Target("script", "train.py", ["--lr", "3e-4"])
    return launch_plan(rank_map, target, run="rabc", secret="5ec", cwd="/exp", environ=sent, options=options)


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["train.py"], Target("script", "train.py")),
        (["--", "train.py", "--", "-x"], Target("script", "train.py", ["--", "-x"])),
        (["out/3:4.py"], Target("script", "out/3:4.py")),
        (["./torchrun"], Target("script", "./torchrun")),
        (["pkg.mod:main", "1"], Target("function", "pkg.mod:main", ["1"])),
        (["pkg.mod:Class.run"], Target("function", "pkg.mod:Class.run")),
        (["-m", "pkg.mod", "--n", "3"], Target("module", "pkg.mod", ["--n", "3"])),
    ],
)
def test_a_target_has_three_forms(words: list[str], target: Target) -> None:
    assert parse_target(words) == target


def test_a_program_is_a_target_of_its_own() -> None:
    assert parse_target(["./pkg.mod:main", "-x"], program=True) == Target("program", "./pkg.mod:main", ["-x"])
    with pytest.raises(UsageError, match="-m names a Python module"):
        parse_target(["-m", "pkg"], program=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to launch"),
        (["--"], "nothing to launch"),
        (["-m"], "needs a module"),
        (["-m=", "x"], "needs a module"),
        (["-m", "train.py/x"], "needs a module"),
        (["--lr", "3"], "--lr is not an option of launch"),
        (["a b:c"], "neither a script nor"),
        (["torchrun", "--nproc_per_node", "2", "train.py"], "launch takes the place of torchrun: pass only the script"),
        (["python3.11", "train.py"], "launch takes the place of python3.11"),
    ],
)
def test_invalid_targets(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_target(words)


@pytest.mark.parametrize(
    ("line", "n", "target"),
    [
        ("--n 2 train.py --n 3 -h --json", 2, Target("script", "train.py", ["--n", "3", "-h", "--json"])),
        ("train.py --nodes x -m y", None, Target("script", "train.py", ["--nodes", "x", "-m", "y"])),
        ("--n 2 -m pkg.train --n 3 --help", 2, Target("module", "pkg.train", ["--n", "3", "--help"])),
        ("train.py --re --gra -- --device", None, Target("script", "train.py", ["--re", "--gra", "--", "--device"])),
        ("--n 2 -m pkg.args a -- b -- c", 2, Target("module", "pkg.args", ["a", "--", "b", "--", "c"])),
        ("--n 2 -mpkg.args x -- y", 2, Target("module", "pkg.args", ["x", "--", "y"])),
        ("-m=pkg.args x", None, Target("module", "pkg.args", ["x"])),
        ("--n 2 -- -m pkg.args x", 2, Target("module", "pkg.args", ["x"])),
        ("--n 2 train.py a -- b -- c", 2, Target("script", "train.py", ["a", "--", "b", "--", "c"])),
        ("--n 2 -- train.py -x", 2, Target("script", "train.py", ["-x"])),
    ],
)  # fmt: skip
def test_arguments_of_the_target_are_passed_unchanged(line: str, n: int | None, target: Target) -> None:
    parser = Parser("gpuboard launch", launch.HELP)
    launch.add_arguments(parser)
    add_common(parser)
    args = parser.read(line.split())
    assert (args.n, parse_target(args.target), args.device) == (n, target, "cuda")


@pytest.mark.parametrize(
    ("line", "lease", "message"),
    [
        ("--lease k3 --gpus gpu02:0 train.py", "", "--gpus cannot be combined with --lease"),
        ("--lease k3 --topology any train.py", "m4", "--topology cannot be combined with --lease"),
        ("--n 4 --per-node 2 --model A100 x.py", "k3", "--per-node, --model cannot be combined with GPUBOARD_LEASE=k3"),
        ("--rank-map map.json --exclude gpu01 train.py", "", "--exclude cannot be combined with --rank-map"),
    ],
)  # fmt: skip
def test_options_that_select_gpus_are_not_ignored_where_the_gpus_are_given(line: str, lease: str, message: str) -> None:
    parser = Parser("gpuboard launch", launch.HELP)
    launch.add_arguments(parser)
    add_common(parser)
    args = parser.read(line.split())
    context = Context([], {"GPUBOARD_LEASE": lease})
    with pytest.raises(UsageError, match=message), launch._rank_map(args, context, None):
        pass


@pytest.mark.parametrize("line", ["--n 2 -1 train.py", "- --n 2 train.py"])
def test_a_word_that_is_no_option_is_not_lost(line: str) -> None:
    parser = Parser("gpuboard launch", launch.HELP)
    launch.add_arguments(parser)
    add_common(parser)
    with pytest.raises(UsageError):
        parser.read(line.split())


def test_each_node_gets_its_own_start_config() -> None:
    first, second = planned(lost_head_s=None).nodes
    assert (first.node, first.node_rank, first.nodes, first.world_size, first.listen) == ("gpu01", 0, 2, 3, True)
    assert first.ranks == [StartRank(0, 0, 0, "GPU-a", None), StartRank(1, 1, 3, "GPU-b", 0.5)]
    assert (first.cuda_visible_devices, first.backend, first.lost_head_s) == ("0,3", "nccl", None)
    assert (second.node, second.listen, second.ranks) == ("gpu02", False, [StartRank(2, 0, 7, "GPU-c", None)])
    assert {first.master_addr, second.master_addr} == {"10.0.0.1"}


def test_the_start_config_is_that_of_the_protocol() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch-protocol.md").read_text(encoding="utf-8")
    described = page.partition("## start config")[2].partition("## Calls")[0]
    keys = set(msgspec.to_builtins(planned().nodes[0])) | {"kind", "name", "args"}
    keys |= {"rank", "local_rank", "index", "uuid", "memory_fraction"}
    assert set(re.findall(r'"([a-z_]+)":', described)) | {"master_addr", "listen"} == keys


def test_without_gpus_the_ranks_see_none_and_use_gloo() -> None:
    node = planned(device="cpu").nodes[0]
    assert (node.cuda_visible_devices, node.backend, node.device) == ("", "gloo", "cpu")


def test_a_single_node_uses_the_loopback_address() -> None:
    alone = msgspec.structs.replace(MAP, nodes=[MAP.nodes[1]], ranks=[MAP.ranks[0], MAP.ranks[2]], world_size=2)
    assert planned(alone).nodes[0].master_addr == "127.0.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_several_nodes_cannot_use_a_loopback_address(address: str) -> None:
    with pytest.raises(UsageError, match=r"gpu02 cannot reach; set it to an address of gpu01"):
        planned(msgspec.structs.replace(MAP, master_addr=address))


def test_a_printed_plan_contains_no_secret() -> None:
    text = str(shown(planned())) + plan_text(planned())
    assert "5ec" not in text
    assert "t0ken" not in text
    assert "/bin" in text
    assert "rank 2  local rank 0  GPU 7  GPU-c" in plan_text(planned())


def test_known_and_requested_variables_are_sent() -> None:
    env = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "EDITOR": "vi", "DATA": "/d", "RANK": "3"}
    sent = environ.sent(env, ["DATA", "SEED=1=2", "HF_HOME="])
    assert sent == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "HF_HOME": "", "DATA": "/d", "SEED": "1=2"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("NOT_THERE", "NOT_THERE: not set in your environment"),
        ("A-B=1", "not a variable name"),
        ("RANK=1", "gpuboard sets RANK"),
        ("CUDA_VISIBLE_DEVICES=0", "gpuboard sets"),
    ],
)
def test_invalid_variables(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        environ.sent({}, [word])


def test_stale_variables_of_another_launcher() -> None:
    assert environ.stale({"MASTER_PORT": "29500", "RANK": "1", "HOME": "/"}) == ["RANK", "MASTER_PORT"]


def test_variables_of_the_slurm_job_are_sent_to_all_nodes() -> None:
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1",
        "SLURM_SUBMIT_DIR": "/home/alice", "SLURM_JOB_GPUS": "0,1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
        "SLURM_STEP_GPUS": "0", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/alice",
    }  # fmt: skip
    assert set(environ.of_job(env)) == {
        "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_SUBMIT_DIR",
    }  # fmt: skip
