"""`gpuboard allocate` on one machine, as whole processes: what shells get, what stays claimed, what never does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuboard.cluster.inventory.nodes import folded
from gpuboard.model.rankmap import RankMap, problems
from tests.integration.here import Here
from tests.nvml import GIB, Gpu, Mig, write_script
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("_claims")

# How people call us in each shell; {command} is gpuboard's command line. dash: test_holder_allocate.py
EVALUATE = {
    "sh": 'eval "$({command})"; echo $?',
    "bash": 'eval "$({command})"; echo $?',
    "zsh": 'eval "$({command})"; echo $?',
    "tcsh": 'eval "`{command}`"; echo $status',
    "fish": "{command} | source; echo $status",
}


@pytest.fixture
def _claims(here: Here) -> None:
    here.needs_claims()


@contextmanager
def shell(here: Here, name: str, *args: str) -> Iterator[tuple[int, dict[str, str], str]]:
    """Evaluate `gpuboard allocate` in a shell; yield the status of eval, the environment after it, and stderr.

    The shell lives until the block ends.
    """
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    flags = {"tcsh": ["-f"], "fish": ["--no-config"], "zsh": ["-f"]}.get(name, [])
    script = EVALUATE[name].format(command=" ".join(here.command("allocate", *args))) + "; env; echo; cat"
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [name, *flags, "-c", script],
            env=here.env | {"CUDA_VISIBLE_DEVICES": "stale", "GPUBOARD_LEASE": "stale"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        assert process.stdout is not None
        code = int(process.stdout.readline())
        found = dict(line.rstrip("\n").split("=", 1) for line in iter(process.stdout.readline, "\n") if "=" in line)
        said.seek(0)
        yield code, found, said.read()
        process.communicate(timeout=60)


def claims(here: Here) -> list[str]:
    """Return the names of the claim files."""
    return sorted(path.name for path in here.needs_claims().glob("gpuboard.*"))


@pytest.mark.parametrize("name", EVALUATE)
def test_every_shell_gets_its_gpus_and_loses_them_at_its_end(here: Here, name: str) -> None:
    with shell(here, name, "--n", "2") as (code, found, errors):
        assert (code, found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == (0, "0,1", "PCI_BUS_ID"), errors
        assert found["GPUBOARD_NODES"] == os.uname().nodename.partition(".")[0]
        rank_map = msgspec.json.decode(Path(found["GPUBOARD_RANK_MAP"]).read_bytes(), type=RankMap)
        assert (rank_map.lease, rank_map.world_size, problems(rank_map)) == (found["GPUBOARD_LEASE"], 2, [])
        assert Path(found["GPUBOARD_RANK_MAP"]).stat().st_mode & 0o777 == 0o600
        assert not {"MASTER_ADDR", "WORLD_SIZE", "RANK"} & set(found)
        assert len(claims(here)) == 2
    until(lambda: not claims(here), "the shell has ended, its claims have not")


WRONG = [(["--n", "two"], 2), ([], 2), (["--n", "1", "--format", "yaml"], 2), (["--n", "1", "--config", "/nope"], 2)]


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [*((name, ["--n", "3"], 3) for name in EVALUATE), *(("sh", args, code) for args, code in WRONG)],
)
def test_every_shell_fails_closed(here: Here, name: str, args: list[str], code: int) -> None:
    with shell(here, name, *args) as (returned, found, errors):
        assert (returned, found["CUDA_VISIBLE_DEVICES"]) == (code, "")
        assert "GPUBOARD_LEASE" not in found
        assert errors.startswith("gpuboard: ")
        assert claims(here) == []


# gpuboard as a program that waits for as long as the test takes: not for three seconds only.
PATIENT = """
from gpuboard.leases.claims import allocator
allocator._LINGERS_READS = 10**6
from gpuboard.__main__ import main
main()
"""


def test_the_utilization_of_a_program_that_has_ended_is_waited_out(here: Here) -> None:
    """NVML still reports it for a second or two: the second of two launches in a script must not be refused."""
    here.gpus([Gpu(utilization=78)])
    argv = [sys.executable, "-c", PATIENT, "allocate", "--n", "1", "--detach", "--for", "5m", "--format", "json"]
    with subprocess.Popen(
        argv, env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stderr is not None
        assert "busy without a visible process" in process.stderr.readline()
        here.gpus([Gpu()])
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert len(json.loads(said)["lease"]["gpus"]) == 1
    # more GPUs than those would be: refused at once
    here.gpus([Gpu(utilization=78)])
    assert "without a visible" not in here.run("allocate", "--n", "2").stderr


def test_an_import_error_fails_closed(here: Here, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "msgspec.py").write_text("raise ImportError('no such thing')\n")
    here.env["PYTHONPATH"] = str(broken)
    with shell(here, "sh", "--n", "1") as (code, found, errors):
        del here.env["PYTHONPATH"]
        assert (code, found["CUDA_VISIBLE_DEVICES"]) == (1, "")
        assert "no such thing" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_wait_fails_closed_and_has_claimed_nothing(here: Here, number: int) -> None:
    here.gpus([Gpu(), Gpu(utilization=90)])
    with subprocess.Popen(
        here.command("allocate", "--n", "2", "--wait", "--format", "shell"),
        env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        assert claims(here) == []
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (
        130, "export CUDA_VISIBLE_DEVICES=''; unset GPUBOARD_LEASE GPUBOARD_RANK_MAP GPUBOARD_NODES; (exit 130)\n",
    )  # fmt: skip


# gpuboard as a program that gets SIGINT when a function is called or returns.
INTERRUPTED = """
import os, signal, sys
sys.argv[1:], (name, moment) = sys.argv[3:], sys.argv[1:3]
def interrupt(frame, event, _):
    if event == moment and frame.f_code.co_name == name and "gpuboard" in frame.f_code.co_filename:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(interrupt)
from gpuboard.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("name", "moment", "code"),
    [("_publish", "call", 130), ("published", "call", 0), ("published", "return", 0), ("warn", "call", 0)],
)
def test_an_interrupt_leaves_either_a_lease_or_the_lines_that_fail_closed(
    here: Here, name: str, moment: str, code: int
) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, name, moment, "allocate", "--n", "2", "--format", "shell"]
    done = subprocess.run(argv, env=here.env, capture_output=True, text=True, timeout=90, cwd=Path(__file__).parents[2])
    assert (done.returncode, "(exit 130)" in done.stdout) == (code, code == 130)
    assert len(claims(here)) == (2 if code == 0 else 0)


def test_waiting_ends_when_the_gpu_becomes_free(here: Here) -> None:
    here.gpus([Gpu(utilization=90)])
    assert here.run("allocate", "--n", "1", "--wait", "1s").returncode == 4
    with subprocess.Popen(
        here.command("allocate", "--n", "1", "--wait", "60s", "--format", "uuids"),
        env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert "no GPU is free (1 busy)" in process.stderr.readline()
        free = here.gpus([Gpu()])
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{free[0].uuid}\n")


def test_waiting_ends_with_the_process_it_is_for(here: Here) -> None:
    here.gpus([Gpu(utilization=90)])
    with (
        subprocess.Popen(["sleep", "600"]) as script,
        subprocess.Popen(
            here.command("allocate", "--n", "1", "--wait", "--holder", str(script.pid)),
            env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        ) as process,
    ):  # fmt: skip
        assert process.stderr is not None
        assert "no GPU is free (1 busy)" in process.stderr.readline()
        script.kill()
        script.wait()
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out.startswith("export CUDA_VISIBLE_DEVICES='';")) == (1, True)
    assert errors == f"gpuboard: the holder, pid {script.pid}, ended while the request waited; nothing is reserved\n"
    assert claims(here) == []


def test_what_moves_in_after_the_claim_makes_us_take_the_next_set(here: Here) -> None:
    stranger = here.folder / "stranger"
    write_script(stranger, [Gpu(used=3 * GIB, processes=(("compute", os.getpid(), 3 * GIB),)), Gpu()], seed=here.seed)
    claimed = here.needs_claims() / "gpuboard.GPU-*-000000000000.*"
    write_script(here.script, [Gpu(), Gpu()], seed=here.seed, trouble=[f"then {claimed} {stranger}"])
    got = here.json("allocate", "--n", "1", "--format", "json")
    assert [gpu["index"] for gpu in got["lease"]["gpus"]] == [1]
    assert "started on it" in got["why"]
    assert [name for name in claims(here) if "-000000000000." in name] == []


def test_of_many_at_once_each_gpu_goes_to_one_and_refusals_are_true(here: Here) -> None:
    here.gpus([Gpu()] * 3)
    many = [
        subprocess.Popen(
            here.command("allocate", "--n", "1", "--format", "json", "--holder", str(os.getpid())),
            env=here.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[2],
        )
        for _ in range(4)
    ]  # fmt: skip
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in many]
    taken = [gpu["uuid"] for answer in answers if "lease" in answer for gpu in answer["lease"]["gpus"]]
    assert len(taken) == len(set(taken)) == 3
    assert [process.returncode for process in many].count(4) == 1
    for answer in answers:
        assert "lease" in answer or [gpu["state"] for gpu in answer["error"]["gpus"]] == ["reserved"] * 3


def test_a_reader_that_has_gone_leaves_no_lease(here: Here) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        here.command("allocate", "--n", "1", "--holder", str(os.getpid())),
        env=here.env, stdout=write, stderr=subprocess.PIPE, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    os.close(write)
    assert done.returncode != 0
    assert claims(here) == []


def test_a_dry_run_explains_and_takes_nothing(here: Here) -> None:
    here.gpus([Gpu(links=("1",)), Gpu(links=("0",)), Gpu(utilization=50)])
    done = here.run("allocate", "--n", "2", "--dry-run")
    name = os.uname().nodename.partition(".")[0]
    assert f"{name}: 0,1 (2 of 2 free, each pair linked by 1 NVLink)" in done.stderr
    assert (done.returncode, claims(here)) == (0, [])
    refused = here.run("allocate", "--n", "3", "--dry-run")
    assert refused.returncode == 4
    assert f"{name}:2 busy: 50 % utilization" in refused.stderr
    assert "try --n 2 or --wait" in refused.stderr


def test_a_sick_gpu_is_taken_only_if_named_or_allowed_and_is_reported(here: Here) -> None:
    here.gpus([Gpu(remap=(1, 0)), Gpu()])
    name = os.uname().nodename.partition(".")[0]
    assert [gpu["index"] for gpu in here.json("allocate", "--n", "1", "--dry-run", "--json")["gpus"]] == [1]
    refused = here.run("allocate", "--n", "2", "--dry-run")
    assert refused.returncode == 4
    assert f"{name}:0 free: sick: row remap pending; reset the GPU (allowed with --allow-sick)" in refused.stderr
    assert "try --n 1, --allow-sick or --wait" in refused.stderr
    taken = here.run("allocate", "--n", "2", "--allow-sick", "--format", "uuids", "--detach", "--for", "1m")
    assert taken.returncode == 0
    assert f"{name}:0 is sick: row remap pending; reset the GPU" in taken.stderr
    assert here.run("release", "--mine").returncode == 0
    assert here.run("allocate", "--gpus", "0", "--dry-run").returncode == 0


def test_a_mig_device_is_taken_by_the_name_that_status_prints(here: Here) -> None:
    here.gpus([Gpu(), Gpu(mig=(Mig("MIG-a", "1g.10gb", 1), Mig("MIG-b", "1g.10gb", 2)))])
    name = os.uname().nodename.partition(".")[0]
    assert "1:1 1g.10gb free" in " ".join(here.run("status").stdout.split())
    for words in (["--gpus", f"{name}:1:1"], ["--gpus", "1:1"]):
        found = here.json("allocate", *words, "--dry-run", "--json")
        assert [(gpu["index"], gpu["mig"], gpu["uuid"]) for gpu in found["gpus"]] == [(1, 1, "MIG-b")]
    planned = here.run("allocate", "--n", "1", "--model", "1g.10gb", "--dry-run")
    assert f"would take {name}:1:0\n{name}: 1:0 (MIG 1g.10gb, 1 of 2 free)" in planned.stderr
    taken = here.run("allocate", "--gpus", "1:0", "--detach", "--for", "1m")
    assert "CUDA_VISIBLE_DEVICES='MIG-a'" in taken.stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["allocate", "--n", "0", "--json"], 2),
        (["allocate", "--nope", "--format=json"], 2),
        (["allocate", "--n", "9", "--format", "json"], 3),
        (["allocate", "--n", "1", "--config", "/nowhere", "--json"], 2),
        (["env", "nope", "--json"], 5),
        (["env", "--format", "json"], 2),
    ],
)
def test_every_refusal_is_json_for_who_asked_for_it(here: Here, args: list[str], code: int) -> None:
    here.gpus([Gpu()])
    done = here.run(*args)
    answer = json.loads(done.stdout)
    assert set(answer) == {"schema", "error"}
    assert set(answer["error"]) == {"code", "message", "gpus", "nearest"}
    assert (done.returncode, answer["error"]["code"]) == (code, code)


def test_a_detached_lease_needs_an_end_and_has_no_holder(here: Here) -> None:
    assert here.run("allocate", "--n", "1", "--detach").returncode == 2
    got = here.json("allocate", "--n", "1", "--detach", "--for", "1h", "--format", "json", "--purpose", "night")[
        "lease"
    ]
    assert (got["holder"], got["purpose"], len(claims(here))) == (None, "night", 1)
    assert 3590 < got["remaining_s"] <= 3600
    too_long = here.run("allocate", "--n", "1", "--for", "2d")
    assert (too_long.returncode, "max_lease = 24h" in too_long.stderr) == (2, True)


def test_env_gives_a_lease_again_and_fails_closed(here: Here) -> None:
    holder = str(os.getpid())
    first = here.run("allocate", "--n", "2", "--holder", holder, "--format", "shell").stdout
    lease = first.partition("GPUBOARD_LEASE='")[2].partition("'")[0]
    assert here.run("env", lease, "--format", "shell").stdout == first
    unknown = here.run("env", "zzz", "--format", "shell")
    assert (unknown.returncode, unknown.stdout.endswith("(exit 5)\n")) == (5, True)


@pytest.mark.parametrize(("asked", "order"), [(["--n", "3"], "0,1,2"), (["--gpus", "2,0,3"], "2,0,3")])
def test_env_keeps_the_order_of_the_ranks(here: Here, asked: list[str], order: str) -> None:
    here.gpus([Gpu(uuid=f"GPU-{9 - index}0000000-0000-0000-0000-000000000000") for index in range(4)])
    first = here.json("allocate", *asked, "--holder", str(os.getpid()), "--format", "json")
    file = Path(first["rank_map_file"])
    again = here.json("env", first["lease"]["id"], "--json")
    assert again["rank_map"] == first["rank_map"] == json.loads(file.read_text())
    assert first["rank_map"]["nodes"][0]["cuda_visible_devices"] == order
    if asked[0] == "--n":  # on a machine that does not have the file it is the order of the links, then of indexes
        file.unlink()
        assert here.json("env", first["lease"]["id"], "--json")["rank_map"] == first["rank_map"]


def test_open_mpi_takes_hostfile_and_rankfile(here: Here, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    files = []
    for form in ("hostfile", "rankfile"):
        files.append(tmp_path / form)
        files[-1].write_text(here.run("allocate", "--n", "1", "--format", form, "--holder", str(os.getpid())).stdout)
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "-np", "1", "--hostfile", files[0], "--rankfile", files[1], "echo", "here"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr


def test_on_a_node_of_the_inventory_only_that_node_is_considered(here: Here) -> None:
    name = os.uname().nodename.partition(".")[0]
    here.config(f'nodes = ["{name}", "elsewhere"]\n')
    got = here.json("allocate", "--n", "2", "--format", "json", "--holder", str(os.getpid()))
    assert got["lease"]["nodes"] == [name]
    hint = f"\n  only this machine was considered; add --nodes '{folded([name, 'elsewhere'])}' for all nodes\n"
    refused = here.run("allocate", "--n", "1")
    assert (refused.returncode, refused.stderr.endswith(hint)) == (4, True), refused.stderr
    refused = here.run("allocate", "--gpus", "elsewhere:0")
    assert (refused.returncode, refused.stderr) == (2, f"gpuboard: --gpus: node 'elsewhere' is not in scope{hint}")


@pytest.mark.parametrize(
    "command",
    [
        "allocate --n 1",
        "allocate --gpus gpu01:0",
        "allocate --n 1 --wait 60s",
        "run --n 1 -- true",
        "launch --n 1 x.py",
    ],
)
def test_a_machine_without_gpus_and_nodes_says_how_to_name_them(here: Here, command: str) -> None:
    done = here.run(*command.split(), LD_LIBRARY_PATH="")
    assert done.returncode == 3, done.stderr
    assert "no GPU on this machine" in done.stderr
    assert "no NVIDIA driver here" in done.stderr
    assert "--nodes 'gpu[01-04]'" in done.stderr
    assert f'{here.folder}/.config/gpuboard/config.toml: nodes = ["gpu[01-04]"]' in done.stderr
    assert "--wait" not in done.stderr


def test_a_driver_that_is_gone_from_a_configured_node_may_come_back(here: Here) -> None:
    here.config('nodes = ["localhost"]\n')
    done = here.run("allocate", "--n", "1", LD_LIBRARY_PATH="")
    assert done.returncode == 4, done.stderr
    assert "no NVIDIA driver here" in done.stderr
