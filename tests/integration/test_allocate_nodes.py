"""Allocations over ssh, on real hosts: several nodes, the words where a lease has no GPU, `run` on another machine."""

from __future__ import annotations

import json
import signal
import subprocess

import msgspec
import pytest

from gpuboard.model.rankmap import RankMap, problems
from tests.nodes import Cluster
from tests.nvml import Gpu
from tests.waiting import Stopwatch, read_line, until

pytestmark = pytest.mark.nodes
SCOPE = "gpu[01-03]"


def gpuboard(nodes: Cluster, *args: str, user: str) -> subprocess.CompletedProcess[str]:
    return nodes["login1"].run(["gpuboard", *args], user=user)


@pytest.fixture
def small(nodes: Cluster) -> Cluster:
    """5 + 3 + 2 GPUs."""
    for name, count in (("gpu01", 5), ("gpu02", 3), ("gpu03", 2)):
        nodes[name].script([Gpu() for _ in range(count)])
    return nodes


def test_uneven_nodes_give_a_sound_rank_map_and_others_see_the_owner(small: Cluster) -> None:
    script = f"""
        export CUDA_VISIBLE_DEVICES=stale
        eval "$(gpuboard allocate --n 8 --nodes '{SCOPE}')" || exit
        echo "$GPUBOARD_LEASE|$GPUBOARD_NODES|$CUDA_VISIBLE_DEVICES"; cat "$GPUBOARD_RANK_MAP"
        read line"""
    with small["login1"].popen(["bash", "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdout and process.stdin and process.stderr
        lease, nodeset, visible = process.stdout.readline().strip().split("|")
        rank_map = msgspec.json.decode(process.stdout.readline(), type=RankMap)
        seen = json.loads(gpuboard(small, "status", "--nodes", SCOPE, "--json", user="bob").stdout)
        asked = ["allocate", "--n", "3", "--nodes", SCOPE, "--format", "json", "--detach", "--for", "1m"]
        refused = json.loads(gpuboard(small, *asked, user="bob").stdout)["error"]
        process.stdin.close()
        errors = process.stderr.read()
    assert (nodeset, visible) == ("gpu[01-02]", "")
    assert "has no GPU on this machine" in errors
    assert f"gpuboard env {lease} --node gpu01" in errors
    assert problems(rank_map) == []
    assert [(n.name, n.local_world_size, n.address) for n in rank_map.nodes] == [
        ("gpu01", 5, "10.88.0.11"), ("gpu02", 3, "10.88.0.12"),
    ]  # fmt: skip
    states = {n["name"]: {(g["state"], tuple(g["leases"])) for g in n["gpus"]} for n in seen["nodes"]}
    assert states == {"gpu01": {("reserved", (lease,))}, "gpu02": {("reserved", (lease,))}, "gpu03": {("free", ())}}
    assert refused["code"] == 4
    assert {g["reason"].partition(",")[0] for g in refused["gpus"] if g["node"] != "gpu03"} == {"alice"}
    assert refused["nearest"] == "--n 2 or --wait"
    until(lambda: not list(small["gpu01"].path("/var/tmp").glob("gpuboard.GPU-*")), "claims live on")


def test_a_shell_finds_its_own_lease_on_the_nodes_that_only_allocate_named(small: Cluster) -> None:
    script = """
        eval "$(gpuboard allocate --n 8 --nodes 'gpu[01-02]' --holder $$)" || exit
        gpuboard env --node gpu02 | tail -1
        gpuboard renew "$GPUBOARD_LEASE" --for 2h >renewed || exit
        gpuboard release zzzz; echo "$?"
        gpuboard doctor --lease "$GPUBOARD_LEASE" 2>&1 | grep -c "inventory"
        gpuboard release "${GPUBOARD_LEASE%??}"
        gpuboard release --mine --nodes 'gpu[01-02]'
        eval "$(gpuboard allocate --n 1 --nodes gpu03 --holder $$)" || exit
        gpuboard release --mine"""
    done = small["login1"].run(["bash", "-c", script], user="alice")
    visible, other, unknown_nodes, released, rest, mine = done.stdout.splitlines()
    assert (visible, other, rest) == ("export CUDA_VISIBLE_DEVICES='0,1,2'", "5", "you have no leases"), done.stderr
    assert unknown_nodes == "0"
    assert ": gpu01:0-4@" in released
    assert mine.endswith(": gpu03:0")


def test_run_works_where_the_gpus_are_with_its_exit_code(small: Cluster) -> None:
    home = "/srv/home/alice"
    done = small["login1"].run(
        ["sh", "-c", f"gpuboard run --n 4 --nodes '{SCOPE}' -- sh -c "
                     "'echo $(hostname) $CUDA_VISIBLE_DEVICES $(pwd) \"a  b\"; cat; exit 9'"],
        stdin="from stdin\n",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (9, f"gpu01 0,1,2,3 {home} a  b\nfrom stdin\n"), done.stderr


def test_nothing_of_a_remote_command_outlives_gpuboard(small: Cluster) -> None:
    gpu01 = small["gpu01"]
    command = ["gpuboard", "run", "--n", "4", "--nodes", SCOPE, "--", "sh", "-c",
               "setsid sleep 301 & echo up; trap '' TERM HUP; while :; do sleep 0.1; done"]  # fmt: skip
    with small["login1"].popen(command) as process:
        assert read_line(process) == "up\n"
        process.send_signal(signal.SIGKILL)
        started = Stopwatch()
        until(lambda: not gpu01.processes(lambda p: p.name in {"sleep", "sh"}, user="alice"), "the command lives on")
        assert started.stop() < 6.0
    until(lambda: not list(gpu01.path("/var/tmp").glob("gpuboard.GPU-*")), "the claims live on")


def test_a_hung_node_delays_only_requests_that_need_it_and_is_named(small: Cluster) -> None:
    small["gpu02"].pause_sshd()
    asked = ["allocate", "--nodes", SCOPE, "--format", "json", "--detach", "--for", "10m"]
    started = Stopwatch()
    got = json.loads(gpuboard(small, *asked, "--n", "4", user="alice").stdout)
    assert {gpu["node"] for gpu in got["lease"]["gpus"]} == {"gpu01"}
    assert started.stop() < 9.0
    patience = {"GPUBOARD_CONNECT_TIMEOUT": "6s"}
    done = small["login1"].run(["gpuboard", *asked, "--n", "20"], env=patience)
    assert done.returncode == 4  # 20 are more than all have, yet one node was not read
    error = json.loads(done.stdout)["error"]
    assert "not read: gpu02 (" in error["message"]
    assert {gpu["state"] for gpu in error["gpus"]} <= {"free", "reserved"}  # the others' readings did not grow old
    seen = small["login1"].run(["gpuboard", "status", "--nodes", SCOPE, "--json"], env=patience)
    ages = {node["name"]: node["age_s"] for node in json.loads(seen.stdout)["nodes"]}
    assert ages.pop("gpu02") is None
    assert max(ages.values()) < 5.0  # gpu02 was waited for for 6 s, and they were read again after that
    env = ["env", got["lease"]["id"], "--nodes", SCOPE]
    started = Stopwatch()
    assert gpuboard(small, *env, user="alice").returncode == 0
    assert started.stop() < 9.0
    small["gpu02"].resume_sshd()
    assert gpuboard(small, *asked, "--n", "20", user="alice").returncode == 3


def test_a_node_that_the_keeper_does_not_reach_is_replaced_or_named(small: Cluster) -> None:
    """The keeper's environment lacks GPUBOARD_PORT, by which the command finds the port of gpu03."""
    config = small.home("alice") / ".ssh" / "config"
    config.write_text(config.read_text() + 'Match host gpu03 exec "test -z $GPUBOARD_PORT"\n  Port 1\n')
    reach = {"GPUBOARD_PORT": "22"}
    asked = ["gpuboard", "allocate", "--n", "2", "--format", "json", "--detach", "--for", "10m", "--nodes"]
    why = "the keeper refused the lease: gpu03: ssh: connection refused"
    done = small["login1"].run([*asked, SCOPE], env=reach)
    got = json.loads(done.stdout)
    assert {gpu["node"] for gpu in got["lease"]["gpus"]} == {"gpu02"}  # gpu03 is the first choice
    assert got["why"].endswith(f"; before: {why}")
    done = small["login1"].run([*asked, "gpu03"], env=reach)
    assert done.returncode == 4
    assert f"cannot be reserved: gpu03 ({why})" in json.loads(done.stdout)["error"]["message"]
    assert not list(small["gpu03"].path("/var/tmp").glob("gpuboard.GPU-*"))


def test_nodes_whose_nvml_starts_slowly_are_waited_for_where_they_are_needed(small: Cluster) -> None:
    """The first reading waits 3.5 s for NVML; without persistence mode a start can take longer."""
    for name, count in (("gpu01", 5), ("gpu02", 3)):
        small[name].script([Gpu()] * count, trouble=["slow nvmlInitWithFlags 5000"])
    for n, taken in ((2, ["gpu03"] * 2), (8, ["gpu01"] * 5 + ["gpu02"] * 3)):
        done = gpuboard(small, "allocate", "--nodes", SCOPE, "--n", str(n), "--dry-run", "--json", user="alice")
        assert done.returncode == 0, done.stdout
        assert [gpu["node"] for gpu in json.loads(done.stdout)["gpus"]] == taken


def test_a_node_that_the_config_does_not_have_cannot_be_left_out(small: Cluster) -> None:
    folder = small.home("alice") / ".config" / "gpuboard"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'nodes = ["{SCOPE}"]\n')
    asked = ("allocate", "--n", "1", "--dry-run", "--nodes", "gpu01", "--exclude")
    done = gpuboard(small, *asked, "gpu20", user="alice")
    assert done.returncode == 2
    assert done.stderr == (f"gpuboard: --exclude: no node 'gpu20' among the configured nodes: {SCOPE}\n")
    done = gpuboard(small, *asked, "gpu01:0,gpu03", user="alice")  # none of this command's, yet no slip
    assert done.returncode == 0, done.stderr
    assert "would take gpu01:1" in done.stderr


def test_a_user_whose_uid_has_no_name_gets_gpus_and_gives_them_back(small: Cluster) -> None:
    gpu01 = small["gpu01"]
    home = "/tmp/nameless"
    gpu01.run(["install", "-d", "-o", "54321", home], user="root", check=True)
    nameless = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "env", f"HOME={home}", "gpuboard"]
    done = gpu01.run(
        [*nameless, "allocate", "--n", "1", "--detach", "--for", "5m", "--format", "json"], user="root", cwd="/"
    )
    assert done.returncode == 0, done.stderr
    lease = json.loads(done.stdout)["lease"]
    assert (lease["owner"], lease["uid"]) == ("54321", 54321)
    done = gpu01.run([*nameless, "release", lease["id"]], user="root", cwd="/")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, f"released {lease['id']}"), done.stderr
    assert list(gpu01.path("/var/tmp").glob("gpuboard.GPU-*")) == []
