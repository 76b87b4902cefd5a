"""`leases`, `renew` and `release` as processes, on claims made by `allocate`."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
from datetime import datetime

import pytest

from tests.integration.here import Here
from tests.nvml import GIB, Gpu
from tests.waiting import stopped, until


def take(here: Here, *args: str) -> str:
    """Reserve without a holder; return the lease's id."""
    here.needs_claims()
    found = here.json("allocate", "--n", "1", "--detach", "--for", "10m", "--format", "json", *args)
    lease: str = found["lease"]["id"]
    return lease


def claimed(here: Here) -> list[str]:
    """Return the ids of the leases that have claims, by id."""
    return sorted(path.name.rpartition(".")[2] for path in here.needs_claims().glob("gpuboard.*"))


def test_a_lease_is_listed_with_its_owner_gpu_and_end(here: Here) -> None:
    lease = take(here, "--purpose", "abl\x1b[31mation")
    done = here.run("leases", "--json")
    assert done.stdout.count("\n") == 1
    listed = json.loads(done.stdout)
    assert listed["schema"] == 1
    [found] = listed["leases"]
    assert (found["id"], found["uid"], found["holder"], found["purpose"]) == (lease, os.getuid(), None, "abl[31mation")
    assert [(gpu["index"], gpu["uuid"]) for gpu in found["gpus"]] == [(0, here.now[0].uuid)]
    span_s = (datetime.fromisoformat(found["until"]) - datetime.fromisoformat(found["from"])).total_seconds()
    assert 599 < span_s < 601
    shown = here.run("leases").stdout.splitlines()
    assert shown[0].split() == [
        "LEASE", "OWNER", "GPUS", "UNTIL", "LEFT", "FLAGS", "FROM", "HOLDER", "PURPOSE",
    ]  # fmt: skip
    assert shown[1].startswith(lease)
    assert shown[1].endswith("detached  abl[31mation")
    assert here.json("status", "--json")["nodes"][0]["gpus"][0]["leases"] == [lease]


def test_leases_of_one_user_and_as_csv(here: Here) -> None:
    lease = take(here, "--purpose", '=1+1, "x"')
    [found] = here.json("leases", "--json", "--mine")["leases"]
    for args in (("--user", "me"), ("--user", found["owner"].upper())):
        assert here.run("leases", *args).stdout.splitlines()[1].split()[0] == lease
    assert here.json("leases", "--user", "nobody", "--json")["leases"] == []
    assert here.run("leases", "--user", "nobody").stdout == "no leases of nobody\n"
    done = subprocess.run(here.command("leases", "--format", "csv"), env=here.env, capture_output=True, timeout=90)
    assert (done.returncode, done.stderr, done.stdout.count(b"\r\n")) == (0, b"", 2)
    [record] = csv.DictReader(io.StringIO(done.stdout.decode(), newline=""), strict=True)
    assert {name: record[name] for name in ("lease", "owner", "gpu_count", "flags", "holder_pid", "purpose")} == {
        "lease": lease, "owner": found["owner"], "gpu_count": "1", "flags": "", "holder_pid": "",
        "purpose": "'=1+1, \"x\"",
    }  # fmt: skip
    assert here.run("leases", "--mine", "--user", "x").returncode == 2
    [gpu] = here.json("status", "--json", "--user", "me")["nodes"][0]["gpus"]
    assert gpu["leases"] == [lease]


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_a_rogue_process_is_a_flag_of_the_lease_everywhere(here: Here) -> None:
    take(here)
    with subprocess.Popen(["sleep", "1000"], user="nobody") as process:
        here.gpus([Gpu(used=GIB, processes=(("compute", process.pid, GIB),))])
        [found] = here.json("leases", "--json")["leases"]
        [record] = csv.DictReader(io.StringIO(here.run("leases", "--format", "csv").stdout, newline=""))
        shown = here.run("leases").stdout
        process.kill()
    assert (found["flags"], record["flags"]) == (["rogue"], "rogue")
    assert "rogue: nobody" in shown


def test_renew_moves_the_end(here: Here) -> None:
    lease = take(here)
    done = here.run("renew", lease[:4], "--for", "2h")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{lease} now ends ")
    [found] = here.json("leases", "--json")["leases"]
    assert 7100 < found["remaining_s"] <= 7200


def test_expiring_lease_does_not_warn_about_a_lost_keeper(here: Here) -> None:
    assert (
        here.run("renew", take(here), "--for", "1s").returncode == 0
    )  # the keeper sends a heartbeat, whose answer is the expiry
    messages: list[str] = []

    def over() -> bool:
        done = here.run("leases", "--json")
        messages.append(done.stderr)
        return not json.loads(done.stdout)["leases"]

    until(over, "the lease ends")
    assert set(messages) == {""}


def test_json_of_renew_and_release(here: Here) -> None:
    lease = take(here)
    renewed = here.json("renew", lease, "--for", "1h", "--json")
    name = os.uname().nodename.partition(".")[0]
    assert (set(renewed), renewed["id"], renewed["nodes"]) == ({"schema", "id", "until", "nodes"}, lease, [name])
    gpu = {"node": name, "index": 0, "uuid": here.now[0].uuid, "share": None, "mig": None}
    released = {"schema": 1, "released": [{"id": lease, "gpus": [gpu]}], "failed": [], "unread": []}
    assert here.json("release", lease, "--json") == released
    assert here.json("release", "--mine", "--json") == {"schema": 1, "released": [], "failed": [], "unread": []}


def test_json_is_utf8_in_every_locale(here: Here) -> None:
    take(here, "--purpose", "für Müller")
    here.config('[users]\nmueller = "Müller"\n')
    here.env["PYTHONIOENCODING"] = "latin-1"  # as the locale de_DE.ISO-8859-1 sets it
    for line in ("allocate --n 2", "leases", "config", "launch --lease mü x.py"):
        command, *rest = line.split()
        done = subprocess.run(here.command(command, "--json", *rest), env=here.env, capture_output=True, timeout=90)
        assert "ü" in str(json.loads(done.stdout.decode())), done.stderr


def test_release_by_id_by_prefix_and_mine(here: Here) -> None:
    here.gpus([Gpu(), Gpu(), Gpu()])
    first, second, third = take(here), take(here), take(here)
    done = here.run("release", first)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"released {first}: {os.uname().nodename.partition('.')[0]}:0\n"
    assert claimed(here) == sorted([second, third])
    assert here.run("release", second[:5]).returncode == 0
    assert claimed(here) == [third]
    assert here.run("release", "--mine").returncode == 0
    assert claimed(here) == []
    assert here.run("leases").stdout == "no leases\n"
    assert here.run("release", "--mine").stdout == "you have no leases\n"


def test_no_such_lease_is_exit_code_5_and_changes_nothing(here: Here) -> None:
    lease = take(here)
    for command in (("release", lease, "zzzzzz"), ("renew", "zzzzzz", "--for", "1h")):
        done = here.run(*command)
        assert (done.returncode, done.stdout) == (5, "")
        assert done.stderr == f"gpuboard: no lease 'zzzzzz'; yours are: {lease}\n"
    assert claimed(here) == [lease]


def test_root_may_end_the_lease_of_another_user_but_not_renew_it(here: Here) -> None:
    lease = take(here)
    for file in here.needs_claims().glob("gpuboard.*"):
        os.chown(file, 65534, 65534)
    for command in (["renew", lease, "--for", "1h"], ["env", lease, "--format", "env"]):
        done = here.run(*command)
        assert (done.returncode, done.stderr) == (
            5,
            f"gpuboard: lease {lease} belongs to nobody; others cannot use or renew it, and only root can end it\n",
        )
    assert here.run("release", lease).returncode == 0
    assert claimed(here) == []


def test_renew_beyond_the_sites_limit_is_refused(here: Here) -> None:
    done = here.run("renew", "zzzzzz", "--for", "25h")
    assert done.returncode == 2
    assert "max_lease" in done.stderr


def test_unread_nodes_are_reported(here: Here) -> None:
    here.ssh_config("Host gone\n  HostName 127.0.0.1\n  Port 1\n")
    here.config('nodes = ["localhost", "gone"]\n')
    found = here.json("leases", "--json")
    assert (found["leases"], found["unread"]) == ([], ["gone"])
    assert here.run("leases").stdout.splitlines() == [
        "no leases on the nodes that were read",
        "not read, so leases there are not listed: gone; `gpuboard status` shows why",
    ]
    for command in (["release", "zzzzzz"], ["renew", "zzzzzz", "--for", "1h"], ["env", "zzzzzz", "--format", "env"]):
        done = here.run(*command)
        assert done.returncode == 1, "5 would mean that it has ended"
        assert "it may be on a node whose leases could not be read: gone" in done.stderr
    done = here.run("release", "--mine")
    assert done.returncode == 1
    assert done.stdout == "you have no leases on the nodes that were read\n"
    assert done.stderr == (
        "gpuboard: not read, so leases there were not released: gone; yours, if any, remain until their holders end\n"
    )
    assert json.loads(here.run("release", "--mine", "--json").stdout)["unread"] == ["gone"]
    here.config('nodes = ["gone"]\n')
    done = here.run("release", "--mine", "--json")
    assert (done.returncode, json.loads(done.stdout)["unread"]) == (6, ["gone"])


def test_release_works_while_the_keeper_is_stopped(here: Here) -> None:
    lease = take(here)
    [lock] = here.folder.glob(".local/state/gpuboard/keeper/*/lock")
    keeper = int(lock.read_text())
    os.kill(keeper, signal.SIGSTOP)
    until(lambda: stopped(keeper))
    try:
        done = here.run("release", lease)
        left = list(here.needs_claims().iterdir())
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert (done.returncode, left) == (0, [])
    assert done.stdout.startswith(f"released {lease}: ")
    assert "the keeper, pid " in done.stderr
    assert " is suspended; resume it with " in done.stderr


def test_launch_in_a_shell_with_an_ended_lease_names_the_variable(here: Here) -> None:
    done = here.run("launch", "--n", "1", "--device", "cpu", "x.py", GPUBOARD_LEASE="k3f9zz")
    assert done.returncode == 5
    assert done.stderr == (
        "gpuboard: no lease 'k3f9zz'; you have no leases; unset GPUBOARD_LEASE, which names it, to reserve other GPUs\n"
    )
