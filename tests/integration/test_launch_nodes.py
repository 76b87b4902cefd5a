"""`gpuboard launch` over ssh on two nodes: uneven ranks, failures that end both, firewalls, leases."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults import places
from tests.hosts import ADDRESSES, Host, Running
from tests.integration.launch_lab import FAMILY, SLEEP, parent, wait_up, write_torch
from tests.nodes import Cluster
from tests.nvml import LOST, Gpu
from tests.waiting import Stopwatch, read_line, until

pytestmark = pytest.mark.nodes

EXAMPLES = Path(__file__).parents[2] / "examples"
HOME = "/srv/home/alice"


@pytest.fixture
def lab(nodes: Cluster) -> Iterator[Cluster]:
    """gpu01 and gpu02 with eight GPUs each, alice's config, and the replacement of torch in her home."""
    for name in ("gpu01", "gpu02"):
        nodes[name].script([Gpu() for _ in range(8)])
    login = nodes["login1"]
    login.run(["mkdir", "-p", ".config/gpuboard"], check=True)
    put(login, ".config/gpuboard/config.toml", 'nodes = ["gpu0[1-2]"]\n')
    home = login.path(HOME)
    write_torch(home / "fake")
    login.run(["chown", "-R", "alice:", f"{HOME}/fake"], user="root", check=True)
    yield nodes
    login.run(["rm", "-rf", ".local/state/gpuboard/runs", "fake", "map.json", "script.py"])


def put(host: Host, name: str, text: str) -> None:
    """Write a file into alice's home."""
    host.run(["sh", "-c", 'cat > "$0"', name], stdin=text, check=True)


def rank_map(first: int, second: int) -> str:
    """Return a hand-written map of ranks on gpu01 and gpu02, as GPUs 0 to n-1 of each."""
    return json.dumps(places.rank_map({"gpu01": first, "gpu02": second}, ADDRESSES))


@contextlib.contextmanager
def launched(
    lab: Cluster, script: str, *options: str, gpus: Sequence[str] = ("--rank-map", "map.json"), first: int = 1
) -> Iterator[Running]:
    """Start a launch on both nodes from login1, with the replacement of torch; kill its processes at the end."""
    login = lab["login1"]
    put(login, "script.py", script)
    put(login, "map.json", rank_map(first, 1))
    words = [*gpus, "--device", "cpu", "--env", f"PYTHONPATH={HOME}/fake", *options, "script.py"]
    with login.popen(["gpuboard", "launch", *words], user="alice") as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def left(lab: Cluster) -> list[tuple[str, ...]]:
    """Return alice's processes on the nodes, without sshd's sessions and agents without a run."""
    return [
        p.argv
        for name in ("gpu01", "gpu02")
        for p in lab[name].processes(user="alice")
        if not p.name.startswith("sshd")
    ]


def claims(lab: Cluster) -> list[str]:
    """Return the names of all claims on the nodes."""
    return [p.name for name in ("gpu01", "gpu02") for p in lab[name].path("/var/tmp").glob("gpuboard.GPU-*")]


def wait_left(lab: Cluster, timeout_s: float) -> None:
    """Wait until both nodes are without processes of the run."""
    until(lambda: not left(lab), "both nodes are empty", timeout_s)


def stalled(process: Running) -> str:
    """Read the launch's stderr until it reports a stall; return that line."""
    assert process.stderr is not None
    while "stalled: " not in (line := process.stderr.readline()):
        assert line, "the launch has ended"
    return line


def test_an_exception_on_one_node_ends_both_at_once(lab: Cluster) -> None:
    script = """
import os, time
from torch.distributed import meet
meet()
print("up", flush=True)
while os.environ["RANK"] != "2" or not os.path.exists("fail"):
    time.sleep(0.02)
raise ValueError("as planned")
"""
    with launched(lab, script, first=2) as process:
        wait_up(process, 3)
        put(lab["login1"], "fail", "")
        took = Stopwatch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert took.stop() <= 5.0  # measured: below 1 s; the grace of a stop is longer
        assert re.match(rf"gpuboard: rank 2 \(gpu02:0\) failed: ValueError: as planned at {HOME}/script.py:8", err)
        wait_left(lab, 10.0)
        assert out == ""


@pytest.mark.parametrize("who", ["head", "supervisor"])
def test_both_nodes_are_empty_soon_when_a_process_is_killed(lab: Cluster, who: str) -> None:
    with launched(lab, FAMILY) as process:
        wait_up(process, 2)
        assert len(left(lab)) >= 2 * 5
        if who == "head":
            process.send_signal(signal.SIGKILL)
        else:
            ranks = lab["gpu02"].processes(lambda p: "script.py" in p.argv, user="alice")
            os.kill(parent(ranks[0].pid), signal.SIGKILL)
        wait_left(lab, 15.0)
        _, err = process.communicate(timeout=60)
        if who == "supervisor":
            assert process.returncode == 1
            assert "gpu02: the supervisor was killed by signal 9" in err


def test_a_cut_network_ends_the_run_on_both_nodes(lab: Cluster) -> None:
    with launched(lab, SLEEP, "--lost-head", "8s") as process:
        wait_up(process, 2)
        lab["gpu02"].unplug()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "gpu02: connection lost: no response for 8 s" in err
        wait_left(lab, 60.0)  # the node without pings from the head ends its ranks
        lab["gpu02"].plug()


def test_a_hung_rank_and_a_dead_network_are_explained(lab: Cluster) -> None:
    """The stacks come from a py-spy that is sent over the connection: the nodes have none."""
    script = """
import os, torch
from torch import distributed
distributed.init_process_group("gloo")
for step in range(3):
    if os.environ["RANK"] == "2" and step:
        print("up", flush=True)
        open("fifo").read()
    distributed.all_reduce(torch.ones(1))
"""
    login = lab["login1"]
    login.run(["mkfifo", "fifo"], check=True)
    try:
        options = ("--env", "PYTHONPATH=", "--grace", "0", "--python", sys.executable)
        with launched(lab, script, *options, first=2) as process:
            line = stalled(process)
            assert "for rank 2 (gpu02:0), which is at script.py:8; ranks 0-1 wait in all_reduce" in line
            put(login, "fifo", "")
            wait_up(process, 2)
            lab["gpu01"].firewall("add rule inet t in ip saddr 10.88.0.12 drop")
            put(login, "fifo", "")
            line = stalled(process)
            assert "in all_reduce (collective 3) at script.py:9: ranks 0-2 take part with equal arguments" in line
            assert "so the network between gpu01, gpu02 may not deliver" in line
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    finally:
        login.run(["rm", "-f", "fifo"])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("add rule inet t in iif eth0 tcp dport 1024-65535 ct state new drop", "no reply: a firewall drops it"),
        (
            "add rule inet t in iif eth0 tcp dport 1024-65535 reject with tcp reset",
            "refused at once: a firewall rejects",
        ),
    ],
)
def test_a_firewall_is_found_before_the_ranks_hang(lab: Cluster, rule: str, words: str) -> None:
    lab["gpu01"].firewall(rule)
    with launched(lab, SLEEP) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 7
        assert "gpu02 cannot reach gpu01 at 10.88.0.11, port" in err
        assert words in err
        assert "on gpu01, as root: iptables -I INPUT -p tcp -s 10.88.0.12 --dport 1024:65535 -j ACCEPT" in err
        wait_left(lab, 15.0)


# An interpreter that on gpu02, soon after a call with -c, suspends its parent for a while.
HINDERED = """#!/bin/sh
case "$(hostname)$1" in
gpu02-c) (sleep 0.3; kill -STOP $PPID; sleep 4; kill -CONT $PPID) >/dev/null 2>&1 & ;;
esac
exec python3 "$@"
"""


def test_a_firewall_is_found_by_a_node_that_is_suspended_meanwhile(lab: Cluster) -> None:
    lab["gpu01"].firewall("add rule inet t in iif eth0 tcp dport 1024-65535 ct state new drop")
    put(lab["login1"], "python", HINDERED)
    lab["login1"].run(["chmod", "+x", "python"], check=True)
    with launched(lab, SLEEP, "--python", f"{HOME}/python") as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 7
        assert "gpu02 cannot reach gpu01 at 10.88.0.11, port" in err
        assert "no reply: a firewall drops it" in err


def test_a_node_that_does_not_answer_is_named_while_launch_waits_for_it(lab: Cluster) -> None:
    """It is the run's only one: a busy machine may delay another one's reply by five seconds, too."""
    lab["gpu02"].pause_sshd()
    put(lab["login1"], "one.json", json.dumps(places.rank_map({"gpu02": 1}, ADDRESSES)))
    with launched(lab, "pass", gpus=("--rank-map", "one.json")) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "gpuboard: waiting for gpu02: no reply for 5 s\n"
        lab["gpu02"].resume_sshd()
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_nodes_that_differ_are_refused(lab: Cluster) -> None:
    with launched(lab, SLEEP, "--python", "/opt/python") as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 7
        assert err.count("no interpreter /opt/python on this node") == 2


def test_standard_input_reaches_a_rank_on_another_node(lab: Cluster) -> None:
    login = lab["login1"]
    put(login, "script.py", "import os, sys\nprint(os.uname().nodename, sys.stdin.read().strip())\n")
    put(login, "map.json", rank_map(1, 1))
    options = ["--rank-map", "map.json", "--device", "cpu", "--env", f"PYTHONPATH={HOME}/fake", "--stdin", "1"]
    done = login.run(["gpuboard", "launch", *options, "script.py"], stdin="hello\n", check=True)
    assert sorted(done.stdout.splitlines()) == ["[rank 0 gpu01:0] gpu01 ", "[rank 1 gpu02:0] gpu02 hello"]


def test_a_lease_is_used_whole_and_kept_and_refused_while_another_user_occupies_a_gpu(lab: Cluster) -> None:
    """Ranks see the lease's GPUs of their node, and the interface of the network. Rank 0 is where most GPUs are."""
    login = lab["login1"]
    words = ["gpuboard", "allocate", "--gpus", "gpu01:3@gpu02:0,5", "--for", "10m", "--detach", "--format", "json"]
    lease = json.loads(login.run(words, check=True).stdout)["lease"]["id"]
    names = (
        "RANK",
        "LOCAL_RANK",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "GPUBOARD_LEASE",
    )
    put(login, "script.py", f"import os\nprint(os.uname().nodename, *(os.environ[name] for name in {names}))\n")
    options = ["--env", f"PYTHONPATH={HOME}/fake", "--env", "NCCL_SOCKET_IFNAME=eth", "script.py"]
    whole = login.run(["gpuboard", "launch", "--lease", lease, *options], check=True)
    assert sorted(whole.stdout.splitlines()) == [
        f"[rank 0 gpu02:0] gpu02 0 0 0,5 PCI_BUS_ID eth0 eth {lease}",
        f"[rank 1 gpu02:5] gpu02 1 1 0,5 PCI_BUS_ID eth0 eth {lease}",
        f"[rank 2 gpu01:3] gpu01 2 0 3 PCI_BUS_ID eth0 eth {lease}",
    ]
    listed = json.loads(login.run(["gpuboard", "leases", "--json"], check=True).stdout)["leases"]
    assert [found["id"] for found in listed] == [lease], "what launch did not reserve it does not release"
    foreign = login.run(["gpuboard", "launch", "--nodes", "gpu0[1-2]", "--lease", lease, "script.py"], user="bob")
    assert foreign.returncode == 5

    with lab["gpu02"].popen(["sh", "-c", "echo $$; read line"], user="bob", stdin=subprocess.PIPE) as intruder:
        pid = int(read_line(intruder))
        lab["gpu02"].script([Gpu(processes=(("compute", pid, 2**30),)) if n == 5 else Gpu() for n in range(8)])
        refused = login.run(["gpuboard", "launch", "--lease", lease, *options])
        intruder.communicate("\n", timeout=60)
    assert refused.returncode == 7
    assert "fail GPU: gpu02: GPU 5 runs processes of others" in refused.stderr
    assert "bob" in refused.stderr


def test_launch_reserves_for_itself_and_releases(lab: Cluster) -> None:
    login = lab["login1"]
    look = ["gpuboard", "leases", "--json", "--nodes", "gpu0[1-2]"]
    with launched(lab, SLEEP, "--device", "cuda", gpus=("--n", "2", "--purpose", "sweep")) as process:
        wait_up(process, 2)
        leases = json.loads(login.run(look, user="bob", check=True).stdout)["leases"]
        assert [(found["owner"], len(found["gpus"]), found["purpose"]) for found in leases] == [("alice", 2, "sweep")]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert claims(lab) == []


def test_the_lease_of_a_launch_that_is_killed_ends_with_it(lab: Cluster) -> None:
    with launched(lab, SLEEP, "--device", "cuda", gpus=("--n", "2")) as process:
        wait_up(process, 2)
        assert len(claims(lab)) == 2
        process.send_signal(signal.SIGKILL)
    until(lambda: not claims(lab), "it is released")


def test_gpus_are_re_checked_before_the_gate_opens(lab: Cluster) -> None:
    gpus = lab["gpu02"].script([Gpu(), Gpu(used=70 * 2**30)])
    login = lab["login1"]
    put(login, "script.py", SLEEP)
    put(login, "map.json", rank_map(1, 1).replace("GPU-gpu02-0", gpus[0].uuid))
    done = login.run(["gpuboard", "launch", "--rank-map", "map.json", "script.py"])
    assert done.returncode == 7
    assert "GPU 0 GPU-gpu01-0 is missing" in done.stderr
    assert "gpu02: GPU 0 is not reserved; others may take it" in done.stderr


def test_a_restart_leaves_out_a_lost_gpu_and_uses_another_node_of_the_lease(lab: Cluster) -> None:
    login = lab["login1"]
    words = ["gpuboard", "allocate", "--gpus", "gpu01:0,1@gpu02:3", "--for", "10m", "--detach", "--format", "json"]
    lease = json.loads(login.run(words, check=True).stdout)["lease"]["id"]
    script = """
import os, subprocess, time
from torch.distributed import meet
meet()
print("up", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    while os.environ["RANK"] == "0" or not os.path.exists("fail"):
        time.sleep(0.02)
    raise RuntimeError("CUDA error: unspecified launch failure")
while not os.path.exists("finish"):
    time.sleep(0.02)
"""
    options = ("--device", "cuda", "--max-restarts", "1")
    with launched(lab, script, *options, gpus=("--lease", lease, "--n", "2")) as process:
        wait_up(process, 2)
        lab["gpu01"].script([Gpu(trouble=(f"fault * {LOST}",)) if n == 1 else Gpu() for n in range(8)])
        put(login, "fail", "")
        wait_up(process, 2)
        assert [p for p in left(lab) if "sleep" in p] == [], "what the first attempt started has ended"
        put(login, "finish", "")
        _, err = process.communicate(timeout=60)
        login.run(["rm", "fail", "finish"], check=True)
    assert process.returncode == 0, err
    assert "gpuboard: attempt 2 of 2: on gpu01:0@gpu02:3; left out: gpu01: GPU 1 " in err
    view = json.loads(login.run(["gpuboard", "runs", "--json"], check=True).stdout)["runs"][-1]
    assert (view["state"], view["attempt"], [rank["node"] for rank in view["ranks"]]) == ("done", 2, ["gpu01", "gpu02"])
    assert [(verdict["attempt"], verdict["rank"]) for verdict in view["verdicts"]] == [(1, 1)]


def test_a_gpu_that_is_lost_is_named_and_the_run_goes_on_with_fewer_ranks(lab: Cluster) -> None:
    login = lab["login1"]
    script = """
import os, time
from torch.distributed import meet
meet()
print("up", os.environ["WORLD_SIZE"], flush=True)
while os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "2" or not os.path.exists("fail"):
    time.sleep(0.02)
if os.environ["WORLD_SIZE"] == "2":
    raise RuntimeError("CUDA error: unspecified launch failure")
"""
    options = ("--device", "cuda", "--max-restarts", "2", "--min-n", "1")
    with launched(lab, script, *options, gpus=("--gpus", "gpu01:0@gpu02:1")) as process:
        wait_up(process, 2)
        lab["gpu02"].script([Gpu(trouble=(f"fault * {LOST}",)) if n == 1 else Gpu() for n in range(8)])
        put(login, "fail", "")
        out, err = process.communicate(timeout=60)
        login.run(["rm", "fail"], check=True)
    assert process.returncode == 0, err
    assert out == "up 1\n"
    assert "rank 1 (gpu02:1) failed" in err
    assert "gpuboard: rank 1 (gpu02:1): GPU 1 is lost: the driver no longer lists GPU-" in err
    assert "gpuboard: attempt 2 of 3: 1 rank in place of 2, on gpu01:0; left out: gpu02: GPU 1 " in err
    view = json.loads(login.run(["gpuboard", "runs", "--json"], check=True).stdout)["runs"][-1]
    assert [rank["node"] for rank in view["ranks"]] == ["gpu01"]
    assert "GPU 1 is lost" in view["verdicts"][0]["evidence"]
    assert "[rank 1 gpu02:1] up 2\n" in login.run(["gpuboard", "logs", "last"], check=True).stdout


def test_a_restart_after_a_lost_connection_leaves_no_process_of_before(lab: Cluster) -> None:
    """Guard and supervisor are killed at once, so that the helper of the first attempt survives them."""
    script = """
import os, subprocess, time
from torch.distributed import meet
meet()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
while not os.path.exists("finish"):
    time.sleep(0.02)
"""
    with launched(lab, script, "--max-restarts", "1") as process:
        wait_up(process, 2)
        [rank] = lab["gpu02"].processes(lambda p: "script.py" in p.argv, user="alice")
        supervisor = parent(rank.pid)
        os.kill(supervisor, signal.SIGSTOP)  # else it reports that its guard died, before it is killed itself
        for pid in (parent(supervisor), supervisor):
            os.kill(pid, signal.SIGKILL)
        wait_up(process, 2)
        assert [words for words in left(lab) if "sleep" in words] == []
        put(lab["login1"], "finish", "")
        _, err = process.communicate(timeout=60)
        lab["login1"].run(["rm", "finish"], check=True)
    assert process.returncode == 0, err
    assert "gpu02: connection lost" in err
    assert "attempt 2 of 2\n" in err


def test_a_lease_taken_with_nodes_is_enough_without_a_config(lab: Cluster) -> None:
    login = lab["login1"]
    put(login, "script.py", "import os\nprint(os.environ['RANK'], os.uname().nodename)\n")
    job = f"""
export CUDA_VISIBLE_DEVICES=
eval "$(gpuboard allocate --nodes gpu0[1-2] --gpus gpu01:0@gpu02:3)" || exit
gpuboard launch --device cpu --env PYTHONPATH={HOME}/fake script.py
"""
    done = login.run(["sh", "-c", job], env={"GPUBOARD_CONFIG": "/dev/null"}, check=True)
    assert sorted(done.stdout.splitlines()) == ["[rank 0 gpu01:0] 0 gpu01", "[rank 1 gpu02:3] 1 gpu02"]


@pytest.mark.torch
def test_the_example_job_reserves_trains_twice_and_releases(lab: Cluster) -> None:
    """With another train_ddp.py beside it, which needs no torch; the real one is trained by the next test."""
    login = lab["login1"]
    login.run(["cp", str(EXAMPLES / "job.sh"), "."], check=True)
    train = "import os, sys\nos.environ['SEED'] = '0'  # torch is not imported ahead of such code\n"
    put(login, "train_ddp.py", train + "print(os.environ['GPUBOARD_LEASE'], *sys.argv[1:])\n")
    done = login.run([f"{HOME}/job.sh"], env={"DEVICE": "cpu", "GPUS": "1"}, timeout=150)
    assert done.returncode == 0, done.stderr
    reserved, *trained = done.stdout.splitlines()
    lease = reserved.split()[1]
    assert trained == [f"{lease} --epochs 3 --lr {rate}" for rate in ("1e-3", "1e-2")]
    until(lambda: not claims(lab), "the lease ends with its holder")


@pytest.mark.torch
@pytest.mark.slow
def test_ddp_trains_on_two_nodes(lab: Cluster) -> None:
    login = lab["login1"]
    words = ["gpuboard", "allocate", "--gpus", "gpu01:0@gpu02:1", "--for", "10m", "--detach", "--format", "json"]
    lease = json.loads(login.run(words, check=True).stdout)["lease"]["id"]
    # One thread each: both nodes are this machine.
    words = ["gpuboard", "launch", "--lease", lease, "--device", "cpu", "--env", "OMP_NUM_THREADS=1"]
    script = [str(EXAMPLES / "train_ddp.py"), "--epochs", "3", "--lr", "1e-2"]
    done = login.run([*words, *script], timeout=150)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"rank 0 gpu01:0\] .*loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0] / 3
    assert [argv for argv in left(lab) if any("train_ddp" in word for word in argv)] == []
