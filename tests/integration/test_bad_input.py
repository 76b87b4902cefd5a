"""Bad input, all kinds in one table: each is a clear error or a clear state, with the right exit code, nothing lost.

A kind is named where it is tested (``@case``); the last test holds that none of KINDS is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from gpuboard.agent.claims import files, rules
from gpuboard.agent.proc import boot_id
from gpuboard.cluster.snapshot.builder import SnapshotBuilder
from gpuboard.cluster.snapshot.views import NodeFacts, View
from gpuboard.leases.claims.client import GpuSlot, leases_of
from gpuboard.model.gpu import GpuReading, GpuStatic
from gpuboard.model.reading import Claim, Hello, Reading, Static
from gpuboard.model.state import Thresholds
from gpuboard.model.text import clean
from tests.integration.here import Here, Measured
from tests.nodes import Cluster
from tests.nvml import GIB, Gpu
from tests.waiting import read_line

KINDS = frozenset(
    """
    unknown-node nodeset-syntax config-type config-key rank-map-duplicate rank-map-unknown-node hostname-shell
    title-escapes claim-garbage claim-empty claim-huge claim-future claim-of-another disk-full nfs no-nvml no-python
    clock-off
    """.split()  # noqa: SIM905
)
covered: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])
NAME = os.uname().nodename.partition(".")[0]


def case(*kinds: str) -> Callable[[Test], Test]:
    """Note that a test covers these kinds of bad input."""
    covered.update(kinds)
    return lambda test: test


RANK = {"rank": 0, "node": "gpu01", "local_rank": 0, "index": 0, "uuid": "GPU-0"}
MAP: dict[str, Any] = {
    "schema": 1, "lease": None, "master_addr": "127.0.0.1", "master_port": 0, "world_size": 2,
    "nodes": [{"name": "gpu01", "address": "127.0.0.1", "node_rank": 0, "local_world_size": 2,
               "cuda_visible_devices": "0,1"}],
    "ranks": [RANK, RANK | {"rank": 1, "local_rank": 1, "index": 1, "uuid": "GPU-1"}],
}  # fmt: skip


@case("unknown-node", "nodeset-syntax", "hostname-shell")
@pytest.mark.parametrize(
    ("command", "nodeset", "words"),
    [
        ("status", "gpu09", "no node 'gpu09' among the configured nodes: gpu01, gpu02"),
        ("leases", "gpu[01", "gpu[01"),
        ("allocate --n 1", "gpu[2-1]", "gpu[2-1]"),
        ("release k3f9", " ", "an empty nodeset names no node"),
        ("status", "gpu01;reboot", "';', which no node's name can have"),
        ("allocate --n 1", "$(reboot)", "which no node's name can have"),
        ("leases", "-oProxyCommand=reboot", "'=', which no node's name can have"),
        ("release k3f9", "-gpu01", "'-gpu01' cannot be a node's name"),
        ("allocate --n 1", "gpu01\x1b[31m", "which no node's name can have"),
    ],
)
def test_a_wrong_nodeset_is_exit_code_2_everywhere(here: Here, command: str, nodeset: str, words: str) -> None:
    here.config('nodes = ["gpu[01-02]"]\n')
    done = here.run(*command.split(), f"--nodes={nodeset}")
    assert done.returncode == 2
    assert words in done.stderr
    assert "\x1b" not in done.stderr
    check_no_gpu_given(command, done)


@case("unknown-node")
def test_a_name_that_does_not_resolve_is_an_unreachable_row(here: Here) -> None:
    here.ssh_config("Host nosuch\n  HostName nosuch.invalid\n")
    done = here.run("status", "--nodes", "nosuch", "--json")
    assert done.returncode == 6
    [node] = json.loads(done.stdout)["nodes"]
    assert (node["state"], node["gpus"]) == ("unreachable", [])
    assert "nosuch" in node["error"]


def test_many_nodes_that_do_not_answer_are_one_line(here: Here) -> None:
    here.ssh_config("Host dead*\n  HostName 127.0.0.1\n  Port 9\n")
    here.config('nodes = ["dead[01-30]"]\n')
    done = here.run("allocate", "--n", "1")
    assert done.returncode == 6
    assert done.stderr.startswith("gpuboard: no node could be reached: dead[01-30]: ssh: connection refused")
    assert done.stderr.count("\n") == 1
    assert here.run("leases").stdout.splitlines()[-1].endswith(" not listed: dead[01-30]; `gpuboard status` shows why")
    assert "configured nodes: dead[01-30]" in here.run("status", "--nodes", "dead91").stderr


@case("config-type", "config-key")
@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("status", "nodes = 3", "nodes: must be a list, not a whole number"),
        ("leases", 'node = ["gpu01"]', "unknown key `node`; keys are: claims_dir, cluster"),
        ("allocate --n 1", 'node = ["gpu01"]', "unknown key `node`; keys are: claims_dir, cluster"),
        ("config", "nodes = [", "not valid TOML"),
        ("renew k3f9 --for 1h", "nodes = [", "not valid TOML"),
    ],
)
def test_a_wrong_config_is_exit_code_2_and_names_file_and_key(here: Here, command: str, text: str, words: str) -> None:
    file = here.config(text)
    done = here.run(*command.split())
    assert done.returncode == 2
    assert f"{file}: {words}" in done.stderr
    check_no_gpu_given(command, done)


@case("rank-map-duplicate", "rank-map-unknown-node")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": [RANK, RANK | {"local_rank": 1, "index": 1, "uuid": "GPU-1"}]}, "rank 0 is listed 2 times"),
        ({"ranks": [RANK, RANK | {"rank": 1, "local_rank": 1, "index": 1, "uuid": "GPU-1", "node": "gpu09"}]},
         "rank 1 is on node 'gpu09', which is not in nodes (gpu01)"),
        ({"nodes": [MAP["nodes"][0] | {"name": "gpu09"}], "ranks": [r | {"node": "gpu09"} for r in MAP["ranks"]]},
         "gpu09"),
        ({"ranks": "none"}, "Expected `array`, got `str` - at `$.ranks`"),
        ({"schema": 7}, "schema is 7; this gpuboard reads schema 1"),
    ],
)  # fmt: skip
def test_a_wrong_rank_map_is_exit_code_2_and_starts_nothing(here: Here, change: dict[str, Any], words: str) -> None:
    here.config('nodes = ["gpu[01-02]"]\n')
    file = here.folder / "map.json"
    file.write_text(json.dumps(MAP | change))
    done = here.run("launch", "--rank-map", str(file), "--device", "cpu", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not (here.folder / ".local" / "state" / "gpuboard" / "runs").exists()


@case("title-escapes")
def test_a_process_title_with_escapes_and_markup_is_inert(here: Here) -> None:
    title = "\x1b]0;owned\x07\x1b[2J[/red][@click=app.quit]x[/]\u202e\ntrain"
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [title, "-c", code, title], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        read_line(process)
        here.gpus([Gpu(used=2 * GIB, processes=(("compute", process.pid, 2 * GIB),))])
        outputs = [here.run("status"), here.run("status", "--json")]
        process.kill()
    for done in outputs:
        assert done.returncode == 0
        assert [c for c in done.stdout if c != "\n" and clean(c) != c] == []
    [seen] = json.loads(outputs[1].stdout)["nodes"][0]["gpus"][0]["processes"]
    assert "[@click=app.quit]x[/]" in seen["command"]  # text, as it is: markup for nobody
    assert clean(seen["command"]) == seen["command"]


def forged(uuid: str, **changes: Any) -> bytes:
    """Return a claim file's content that was never taken by the protocol."""
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = time.time()
    content = {
        "lease": "zzzzzz", "uuid": uuid, "from": now, "until": now + 3600, "up": up,
        "boot": boot_id(), "share": None, "holder": None, "purpose": "", "host": "h", "nodes": [NAME],
        "gpus": 1, "took": [],
    }  # fmt: skip
    return json.dumps(content | changes).encode()


INVALID: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda _: b"\x00\xff{not json \x1b[31m",
    "empty": lambda _: b"",
    "nested": lambda _: b"[" * 4000,
    "huge": lambda uuid: forged(uuid) + b" " * 10_000_000,
    "future": lambda uuid: forged(uuid, up=time.clock_gettime(time.CLOCK_BOOTTIME) + 7200),
    "no-float": lambda uuid: forged(uuid, until=10**400),
    "infinite": lambda uuid: forged(uuid, **{"from": 10**308, "until": 10**308 + 9, "up": -1e308}),
    "another-gpu": lambda _: forged("GPU-of-another-name"),
    "another-boot": lambda uuid: forged(uuid, boot="another boot"),
}


@case("claim-garbage", "claim-empty", "claim-huge", "claim-future")
def test_invalid_claim_files_block_no_gpu_and_hide_no_claim(here: Here) -> None:
    """Each file is on a GPU of its own; the last GPU has a real claim."""
    n = len(INVALID)
    gpus = here.gpus([Gpu()] * (n + 1))
    folder = here.needs_claims()
    real = here.json("allocate", "--gpus", f"{NAME}:{n}", "--detach", "--for", "10m", "--format", "json")["lease"]["id"]
    for content, gpu in zip(INVALID.values(), gpus[:n], strict=True):
        (folder / f"gpuboard.{gpu.uuid}.zzzzzz").write_bytes(content(gpu.uuid))
    *free, last = here.json("status", "--json")["nodes"][0]["gpus"]
    seen = {kind: (gpu["state"], gpu["leases"]) for kind, gpu in zip(INVALID, free, strict=True)}
    assert seen == dict.fromkeys(INVALID, ("free", []))
    assert (last["state"], last["leases"]) == ("reserved", [real])
    assert [lease["id"] for lease in here.json("leases", "--json")["leases"]] == [real]
    taken = here.json("allocate", "--n", str(n), "--detach", "--for", "10m", "--format", "json")["lease"]["id"]
    assert {lease["id"] for lease in here.json("leases", "--json")["leases"]} == {real, taken}
    assert here.run("release", "zzzzzz").returncode == 5


@case("claim-garbage")
def test_claims_that_are_not_regular_files_block_no_gpu(here: Here) -> None:
    uuid = here.now[0].uuid
    folder = here.needs_claims()
    os.mkfifo(folder / f"gpuboard.{uuid}.zzzzzz")
    (folder / f"gpuboard.{uuid}.zzzzzy").symlink_to("/etc/shadow")
    (folder / f"gpuboard.{uuid}.zzzzzx").mkdir()
    started = time.monotonic()
    assert [gpu["state"] for gpu in here.json("status", "--json")["nodes"][0]["gpus"]] == ["free", "free"]
    assert time.monotonic() - started < 30  # a FIFO nobody writes to hangs nobody


@case("claim-of-another")
def test_another_users_claim_is_shown_by_name_and_cannot_be_changed(nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    asked = ["gpuboard", "allocate", "--detach", "--for", "10m", "--format", "json"]
    took = gpu01.run([*asked, "--n", "1"], user="alice")
    assert took.returncode == 0, took.stderr
    lease = json.loads(took.stdout)["lease"]
    gpu = lease["gpus"][0]
    for command in (["release", lease["id"]], ["renew", lease["id"], "--for", "1h"]):
        done = gpu01.run(["gpuboard", *command], user="bob")
        assert done.returncode == 5
        assert f"lease {lease['id']} belongs to alice" in done.stderr
    refused = gpu01.run([*asked, "--gpus", gpu["uuid"]], user="bob")
    assert refused.returncode == 4
    [reason] = json.loads(refused.stdout)["error"]["gpus"]
    assert (reason["state"], reason["reason"].split(",")[0]) == ("reserved", "alice")
    seen = gpu01.run(["gpuboard", "leases", "--json"], user="bob")
    assert [(one["id"], one["owner"]) for one in json.loads(seen.stdout)["leases"]] == [(lease["id"], "alice")]
    ended = gpu01.run(["gpuboard", "release", lease["id"]], user="root")  # but root may
    assert (ended.returncode, ended.stdout) == (0, f"released {lease['id']}: gpu01:{gpu['index']}\n")


@case("disk-full")
def test_a_full_disk_is_a_refusal_that_leaves_nothing(here: Here) -> None:
    folder = here.needs_claims()
    script = (
        'mount -t tmpfs -o size=16k,mode=1777 tmpfs "$0"; head -c 64k /dev/zero >"$0/fill" 2>/dev/null; '
        '"$@"; code=$?; ls "$0" >&2; exit $code'
    )
    argv = ["unshare", "-m", "sh", "-c", script, str(folder), *here.command("allocate", "--n", "1", "--format", "json")]
    done = subprocess.run(argv, env=here.env, capture_output=True, text=True, timeout=90)
    if "mount" in done.stderr and "permission" in done.stderr.lower():
        pytest.skip("mounts are not allowed here")
    assert done.returncode == 4
    assert f"{folder}: cannot read or write the claims: No space left on device" in done.stdout
    assert done.stderr.split()[-1] == "fill"  # neither a claim nor a temporary file


@pytest.mark.parametrize(("redirect", "words"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_a_lease_that_cannot_be_published_is_released(here: Here, redirect: str, words: str) -> None:
    folder = here.needs_claims()
    argv = ["sh", "-c", f'exec "$@" {redirect}', "sh", *here.command("allocate", "--n", "1")]
    done = subprocess.run(argv, env=here.env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert done.stderr.startswith(f"gpuboard: cannot write to stdout: {words}")
    assert list(folder.iterdir()) == []


def test_a_rank_map_goes_into_a_file_and_replaces_nothing_else(here: Here) -> None:
    folder = here.needs_claims()
    fifo, link, target = (here.folder / name for name in ("fifo", "link", "target"))
    os.mkfifo(fifo)
    link.symlink_to(target)
    for path in (fifo, here.folder, here.folder / "none" / "map.json"):
        done = here.run("allocate", "--n", "1", "--rank-map", str(path))
        assert (done.returncode, f"--rank-map {path}: must be a file" in done.stderr) == (2, True)
    assert fifo.is_fifo()
    assert list(folder.iterdir()) == []
    done = here.run("allocate", "--n", "1", "--rank-map", str(link))
    assert (done.returncode, link.is_symlink(), json.loads(target.read_text())["world_size"]) == (0, True, 1)


@case("nfs")
def test_a_shared_file_system_is_refused_with_the_reason() -> None:
    mounts = (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "40 21 0:50 / /var/tmp rw,relatime shared:9 - nfs4 server:/tmp rw,vers=4.2\n"
    )
    words = files.mount_trouble("/var/tmp", mounts, 1001)
    assert words is not None
    assert "nfs4" in words
    assert files.mount_trouble("/var/lib", mounts, 1001) is None


@case("nfs")
def test_a_folder_that_cannot_hold_claims_is_a_state_and_a_refusal(here: Here) -> None:
    here.needs_claims().chmod(0o755)
    shown = here.json("status", "--json")["nodes"][0]
    assert "not sticky" in shown["claims_error"]
    assert [gpu["state"] for gpu in shown["gpus"]] == ["unknown", "unknown"]  # a configured truth gives no answer
    assert "cannot be reserved: " in here.run("status").stdout
    done = here.run("allocate", "--n", "1", "--format", "json")
    assert done.returncode == 4
    assert "not sticky" in done.stdout
    here.needs_claims().chmod(0o1777)


@case("no-nvml")
def test_no_nvml_is_a_state_and_a_refusal(here: Here) -> None:
    here.env["LD_LIBRARY_PATH"] = ""
    node = here.json("status", "--json")["nodes"][0]
    assert (node["state"], node["gpus"]) == ("up", [])
    assert node["error"].startswith("NVML: ")
    done = here.run("allocate", "--n", "1")
    assert done.returncode == 3  # no node is configured, and this machine has no driver
    assert "--nodes" in done.stderr
    check_no_gpu_given("allocate", done)


@case("no-python")
def test_a_node_without_python_is_reported_with_a_remedy_and_others_continue(nodes: Cluster) -> None:
    nodes["gpu02"].sshd("SetEnv PATH=/nowhere")
    done = nodes["login1"].run(["gpuboard", "status", "--json", "--nodes", "gpu[01-02]"], user="alice")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["nodes"]
    assert (first["state"], len(first["gpus"])) == ("up", 8)
    assert (second["state"], second["gpus"]) == ("unreachable", [])
    assert "python3" in second["error"]


@case("clock-off")
@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_node_whose_clock_is_an_hour_off_is_read_as_any_other(off_s: float) -> None:
    now = 1_800_000_000.0
    there = now + off_s
    claim = Claim("k3f9aa", "GPU-0", 1001, "alice", "live", there - 60, there + 540, remaining_s=540.0, nodes=["gpu01"])
    gpu = GpuReading("GPU-0", memory_used=0, compute_mode=0, processes=[])
    static = Static([_static("GPU-0"), _static("GPU-1")])
    facts = NodeFacts(
        "gpu01", hello=Hello("gpu01", "b", 0, "root", 1, "3.11"), static=static,
        known={one.uuid: one for one in static.gpus}, arrived=100.0,
        reading=Reading(1, there, 1.0, [gpu, GpuReading("GPU-1", memory_used=0, compute_mode=0, processes=[])],
                        claims=[claim]),
    )  # fmt: skip
    view = View(
        now=100.4, at=now, cluster="", thresholds=Thresholds(), users={}, interval_s=1.0, one_shot=True
    )  # fmt: skip
    [node] = SnapshotBuilder().snapshot([facts], view).nodes
    assert (node.state, node.age_s) == ("up", 0.4)
    assert [gpu.state for gpu in node.gpus] == ["reserved", "free"]
    [lease] = leases_of({"gpu01": [claim]}, {"gpu01": {"GPU-0": GpuSlot(0)}}, now)
    assert (lease.remaining_s, lease.until, lease.since) == (
        540.0, "2027-01-15T08:09:00.000Z", "2027-01-15T07:59:00.000Z",
    )  # fmt: skip


@case("clock-off")
@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_claims_on_a_node_whose_clock_is_set_while_they_live_stay_live(off_s: float) -> None:
    boot, up = "b", 5000.0
    content = forged("GPU-0", boot=boot, up=up, **{"from": 1000.0, "until": 4600.0})
    born_off = 1000.0 - up
    entry = rules.Entry("gpuboard.GPU-0.zzzzzz", 0, 1, born_off + up + 30, born_off + up + 30, content, "")
    clock = rules.Clock(born_off + up + 40 + off_s, up + 40)
    judged = rules.judge(entry, clock, boot)
    assert (judged.state, judged.reason) == ("live", "")


def test_the_table_is_whole() -> None:
    assert covered == KINDS


def _static(uuid: str) -> GpuStatic:
    return GpuStatic(int(uuid[-1]), uuid, "NVIDIA H100", f"00000000:1{uuid[-1]}:00.0", memory_total=80 * GIB)


@pytest.mark.parametrize("variable", ["HOME", "XDG_STATE_HOME"])
def test_leases_are_kept_in_a_folder_whose_path_is_not_utf_8(here: Here, variable: str) -> None:
    here.needs_claims()
    here.env[variable] = folder = f"{here.folder}/h\udcff"
    os.mkdir(folder)
    done = here.run("allocate", "--n", "1", "--for", "1h", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]["message"]
    assert error.startswith(f"--format json: {here.folder}/h\\udcff/")
    assert done.stderr == f"gpuboard: {error}\n"
    assert here.json("leases", "--json")["leases"] == []
    with_lease = f"{' '.join(here.command())} run --n 1 -- sh -c 'printenv GPUBOARD_RANK_MAP'"
    ran = subprocess.run(["sh", "-c", with_lease], env=here.env, capture_output=True, timeout=90, check=False)
    assert ran.stdout.startswith(os.fsencode(folder)), ran.stderr


def check_no_gpu_given(command: str, done: subprocess.CompletedProcess[str] | Measured) -> None:
    """Check that a command whose output a shell evaluates gave no GPU, and others printed nothing."""
    if command.startswith("allocate"):
        assert "CUDA_VISIBLE_DEVICES=''" in done.stdout
        evaluated = subprocess.run(
            ["sh", "-c", 'eval "$1"; echo "$? [$CUDA_VISIBLE_DEVICES]"', "sh", done.stdout],
            capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "0,1", "PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert evaluated.stdout == f"{done.returncode} []\n"
    else:
        assert done.stdout == ""
