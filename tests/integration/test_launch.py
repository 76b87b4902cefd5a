"""`gpuboard launch` on this machine: output, failures, signals, stops, and no process left.

Most ranks here find a stand-in for torch, since these tests are about processes; the last ones train.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from gpuboard.cli.main import main
from tests.integration.launch_lab import FAMILY, SLEEP, STUBBORN, Launch, kill, parent
from tests.integration.ranks_driver import wait_gone
from tests.waiting import Stopwatch, until


def test_ranks_run_the_script_with_its_arguments_and_torchruns_variables(tmp_path: Path) -> None:
    script = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR GPUBOARD_RUN EXTRA CUDA_VISIBLE_DEVICES"
print(*sys.argv[1:], *(f"{name}={os.environ[name]}" for name in names.split()))
"""
    args = ["--n", "3", "-h", "--json", "--", "--device"]
    with Launch(tmp_path, script, "--env", "EXTRA", args=args, env={"EXTRA": "x y", "RANK": "7"}) as run:
        assert run.wait() == 0
        run_id = run.view().id
        common = f"WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 GPUBOARD_RUN={run_id} EXTRA=x y"
        host = run.view().ranks[0].node
        assert sorted(run.text["out"].splitlines()) == [
            f"[rank {r} {host}:{r}] --n 3 -h --json -- --device RANK={r} LOCAL_RANK={r} {common} CUDA_VISIBLE_DEVICES="
            for r in (0, 1)
        ]
        assert run.text["err"].count("RANK=7") == 1, "the stale variable is reported once"


def test_an_exception_is_printed_first_and_ends_all_within_two_seconds(tmp_path: Path) -> None:
    script = """
import os, time
from torch import distributed
distributed.init_process_group("gloo")
def step():
    while os.environ["RANK"] != "1" or not os.path.exists("fail"):
        time.sleep(0.02)
    raise ValueError("as planned")
print("up", flush=True)
step()
"""
    with Launch(tmp_path, script, n=3, torch=True) as run:
        run.wait_for("up", times=3)
        (tmp_path / "fail").touch()
        took = Stopwatch()
        assert run.wait() == 1
        assert took.stop() <= 2.0
        first = run.text["err"].splitlines()[0]
        assert re.fullmatch(
            rf"gpuboard: rank 1 \(.+:1\) failed: ValueError: as planned at {tmp_path}/script.py:8 in step", first
        )
        assert run.carriers() == []
        view = run.view()
        assert (view.state, view.exit_code, [rank.state for rank in view.ranks]) == (
            "failed", 1, ["killed", "failed", "killed"],
        )  # fmt: skip
        assert (view.verdicts[0].kind, view.verdicts[0].rank) == ("raised", 1)


def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    script = """
import os, sys, time
print("on stdout", flush=True)
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(600)
"""
    with Launch(tmp_path, script, "--status-file", "status.json", "--json") as run:
        assert run.wait() == 3
        assert run.text["out"] == (tmp_path / "status.json").read_text(), "nothing else is on stdout"
        assert run.text["err"].count("] on stdout") >= 1
        status = json.loads((tmp_path / "status.json").read_bytes())
        assert (status["exit_code"], status["run"]["state"], status["error"]) == (3, "failed", None)


def test_exit_0_before_init_is_a_failure_when_another_waits(tmp_path: Path) -> None:
    script = """
import os, sys, time
from torch import distributed
if os.environ["RANK"] == "1":
    sys.exit(0)
distributed.init_process_group("gloo")
time.sleep(600)
"""
    with Launch(tmp_path, script, torch=True) as run:
        assert run.wait() == 1
        assert (
            "ended with exit code 0 before init_process_group; rank 0 would wait for it until the timeout"
            in run.text["err"]
        )


def test_rank_0_may_run_on_after_the_other(tmp_path: Path) -> None:
    script = """
import os, time
from torch import distributed
distributed.init_process_group("gloo")
if os.environ["RANK"] == "0":
    time.sleep(3)
    print("saved")
"""
    with Launch(tmp_path, script, torch=True) as run:
        assert run.wait() == 0
        assert "saved" in run.text["out"]
        assert run.view().state == "done"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with Launch(tmp_path, STUBBORN, "--grace", "1s") as run:
        run.wait_for("up", times=2)
        took, at = Stopwatch(), time.monotonic()
        (tmp_path / "fail").touch()
        assert run.wait() == 5
        assert time.monotonic() - at >= 1.0
        assert took.stop() <= 3.0
        assert run.carriers() == []


@pytest.mark.parametrize("who", ["head", "supervisor", "guard", "supervisor and guard"])
def test_no_process_is_left_when_one_is_killed(tmp_path: Path, who: str) -> None:
    with Launch(tmp_path, FAMILY) as run:
        run.wait_for("up", times=2)
        view = run.view()
        until(lambda: len(run.carriers()) >= 8, "two ranks, each with three helpers")
        assert view.ranks[0].pid is not None
        supervisor = parent(view.ranks[0].pid)
        pids = {"head": run.process.pid, "supervisor": supervisor, "guard": parent(supervisor)}
        killed = [pids[name] for name in who.split(" and ")]
        for pid in killed:
            os.kill(pid, signal.SIGSTOP)  # none of them can react to the end of another
        for pid in killed:
            kill(pid)
        assert wait_gone(view.id) <= 5.0
        code = run.wait()
        kind = run.view().verdicts[0].kind
        assert (code, kind, run.view().state) == {
            "head": (-signal.SIGKILL, "head-died", "failed"),
            "supervisor": (1, "node-lost", "failed"),  # the guard reports it
            "supervisor and guard": (1, "node-lost", "failed"),
            "guard": (1, "node-stopped", "failed"),  # the supervisor reports it
        }[who]


def test_ctrl_c_stops_and_twice_stops_at_once(tmp_path: Path) -> None:
    script = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + SLEEP
    with Launch(tmp_path, script, "--grace", "60s") as run:
        run.wait_for("up", times=2)
        run.signal(signal.SIGINT)
        run.wait_for("ctrl-C; stopping ranks 0-1: SIGTERM now, SIGKILL in 60 s", "err")
        assert len(run.carriers()) >= 2
        took = Stopwatch()
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert took.stop() <= 3.0
        assert (run.carriers(), run.view().state) == ([], "stopped")


def test_signals_are_forwarded_to_the_ranks(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
def got(number, frame):
    print("got", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, got)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
    with Launch(tmp_path, script) as run:
        run.wait_for("up", times=2)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            run.signal(number)
            run.wait_for(f"got {int(number)}", times=2)
        assert run.wait() == 0, "ranks that end well on SIGTERM have saved what they wanted"


def test_sigterm_ends_ranks_that_handle_it_and_run_on(tmp_path: Path) -> None:
    script = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("got it", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
    with Launch(tmp_path, script, "--grace", "3s") as run:
        run.wait_for("up", times=2)
        took = Stopwatch()
        for times in (2, 4):
            run.signal(signal.SIGTERM)
            run.wait_for("got it", times=times)
        assert run.wait() == 143
        assert took.stop() <= 6.0
        assert "forwarding SIGTERM to ranks 0-1; SIGKILL in 3 s" in run.text["err"]
        assert (run.carriers(), run.view().state) == ([], "stopped")


def test_stop_runs_and_logs_from_another_terminal(tmp_path: Path) -> None:
    with Launch(tmp_path, SLEEP) as run:
        run.wait_for("up", times=2)
        view = run.view()
        assert run.command("logs", view.id, "--rank", "1").stdout == "up\n"
        run.wait_view(lambda view: [rank.last_line for rank in view.ranks] == ["up", "up"])
        listed = json.loads(run.command("runs", "--json").stdout)["runs"]
        assert [(r["id"], r["state"], r["exit_code"]) for r in listed] == [(view.id, "running", None)]
        stopped = run.command("stop", view.id[:5])
        assert (stopped.returncode, stopped.stdout.splitlines()[-1]) == (0, f"run {view.id} stopped")
        assert run.wait() == 143
        assert run.command("stop", view.id).stdout == f"run {view.id} has ended already: stopped\n"
        assert re.search(rf"{view.id} +stopped +\S+ +143", run.command("runs").stdout)


def test_logs_follow_a_run_to_its_end(tmp_path: Path) -> None:
    script = """
import os, time
print("a", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("b", end="")
"""
    with Launch(tmp_path, script, n=1) as run:
        run.wait_for("a")
        (tmp_path / "go").touch()
        followed = run.command("logs", "last", "-f")
        host = run.view().ranks[0].node
        assert followed.stdout == f"[rank 0 {host}:0] a\n[rank 0 {host}:0] b\n"
        assert run.wait() == 0
        assert run.text["out"] == "a\nb\n", "one rank in a pipe has no prefix"


def test_no_line_of_much_output_is_lost_or_torn(tmp_path: Path) -> None:
    script = """
import os, sys
for number in range(20000):
    print(f"{number:06d} {'x' * 80}", file=sys.stderr if number % 2 else sys.stdout)
"""
    with Launch(tmp_path, script) as run:
        assert run.wait() == 0
        host = run.view().ranks[0].node
        for rank in (0, 1):
            for stream, odd in (("out", 0), ("err", 1)):
                prefix = f"[rank {rank} {host}:{rank}] "
                lines = [t.removeprefix(prefix) for t in run.text[stream].splitlines() if t.startswith(prefix)]
                assert lines == [f"{number:06d} {'x' * 80}" for number in range(odd, 20000, 2)]
                log = Path(run.view().folder) / f"rank-{rank}.{stream}"
                assert log.read_text().splitlines() == lines


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    script = """
import os, time
for n in range(200):
    print(n, flush=True)
    while n == 5 and not os.path.exists("closed"):
        time.sleep(0.02)
"""
    with Launch(tmp_path, script) as run:
        run.wait_for("5")
        assert run.process.stdout is not None
        run.process.stdout.close()
        (tmp_path / "closed").touch()
        assert run.wait() == 0
        assert run.text["err"].count("gpuboard: stdout is closed, ") == 1
        assert (Path(run.view().folder) / "rank-1.out").read_text().splitlines()[-1] == "199"


def test_a_terminal_shows_bars_in_place_and_the_countdown(tmp_path: Path) -> None:
    script = """
import signal, sys, time
signal.signal(15, signal.SIG_IGN)
for step in range(100000):
    print(f"\\r{step:4d} steps", end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
"""
    ours, theirs = pty.openpty()
    with Launch(tmp_path, script, "--grace", "60s", n=1, terminal=theirs) as run:
        os.close(theirs)
        text = _read_until(ours, "steps", 3)
        assert re.search(r"\r\x1b\[K\[rank 0 \S+:0\] +[0-9]+ steps", text)
        run.signal(signal.SIGINT)
        text = _read_until(ours, "s (ctrl-C: now)", 1)
        assert re.search(r"rank 0 still running: SIGKILL in \d+ s \(ctrl-C: now\)", text)
        run.signal(signal.SIGINT)
        assert run.process.wait(60) == 130
    os.close(ours)


def _read_until(fd: int, words: str, times: int) -> str:
    text = ""
    while text.count(words) < times:
        text += os.read(fd, 65536).decode()
    return text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--python", "/no/such/python"],
            "no interpreter /no/such/python on this node; pass --python PATH",
        ),
        (["--python", "/bin/false"], "/bin/false ended with exit code 1"),
    ],
)
def test_preflight_refuses_with_code_7(tmp_path: Path, options: list[str], words: str) -> None:
    with Launch(tmp_path, SLEEP, *options) as run:
        assert run.wait() == 7
        assert words in run.text["err"]
        assert "no rank was started" in run.text["err"]
        assert (run.view().state, run.view().exit_code, run.carriers()) == ("failed", 7, [])
        assert run.view().verdicts[0].kind == "preflight"


def test_preflight_only_prints_every_check_and_starts_no_rank(tmp_path: Path) -> None:
    wrong = ("--env", "GLOO_SOCKET_IFNAME=eth9")
    with Launch(tmp_path, "open('ran', 'w')", "--preflight-only", *wrong) as run:
        assert run.wait() == 7
        assert re.search(
            r"^ok   torch: .*\nok   /dev/shm: .*\nok   open files: .*\nok   processes: .*\n", run.text["out"], re.M
        )
        assert re.search(
            r"^fail interface: .* GLOO_SOCKET_IFNAME=eth9; no such interface with an address", run.text["out"], re.M
        )
        assert "preflight failed: 1 check; no rank was started" in run.text["err"]
    with Launch(tmp_path, "open('ran', 'w')", "--preflight-only", "--json", "--skip", "interface", *wrong) as run:
        assert run.wait() == 0
        outcome = json.loads(run.text["out"])
        assert {check["name"]: check["status"] for check in outcome["checks"]} | {
            "torch": "ok",
            "interface": "skipped",
        } == {check["name"]: check["status"] for check in outcome["checks"]}
        assert (run.view().state, run.view().verdicts, run.carriers()) == ("done", [], [])
    assert not (tmp_path / "ran").exists()


def test_a_skipped_check_does_not_prevent_the_launch(tmp_path: Path) -> None:
    with Launch(tmp_path, "print('ran')", "--skip", "interface", "--env", "GLOO_SOCKET_IFNAME=eth9", n=1) as run:
        assert run.wait() == 0
        assert "ran" in run.text["out"]
        assert "skipped interface: " in run.text["err"]
        assert "would fail: GLOO_SOCKET_IFNAME=eth9" in run.text["err"]


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    with Launch(tmp_path, SLEEP, "missing.py") as run:
        assert run.wait() == 7
        assert f"cannot read missing.py in {tmp_path}" in run.text["err"]


def test_a_port_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Launch(tmp_path, SLEEP, port=port) as run:
            assert run.wait() == 7
            assert f"pid {os.getpid()}" in run.text["err"]
            assert "set master_port to 0" in run.text["err"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n", "2"], "--rank-map cannot be combined with"),
        (["--rank-map", "none.json"], "cannot read the rank map none.json: No such file or directory"),
        (["--env", "RANK=1"], "--env RANK: gpuboard sets RANK"),
        (["--skip", "shm"], "--skip 'shm': no such check; checks to skip: torch, python, "),
        (["--skip", "start"], "--skip 'start': no rank can run without it"),
        (["--grace", "soon"], "'soon' is not a duration"),
        (["--min-n", "1"], "--min-n needs --max-restarts N"),
        (["--rank-map", "elsewhere.json"], "elsewhere.json:\n  node 'gpu77' is not in the inventory ("),
    ],
)
def test_usage_errors(
    tmp_path: Path,
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = (
        '{"schema": 1, "lease": null, "master_addr": "127.0.0.1", "master_port": 0, "world_size": 1, "nodes": [{'
        '"name": "gpu77", "address": "127.0.0.1", "node_rank": 0, "local_world_size": 1, "cuda_visible_devices": "0"}],'
        ' "ranks": [{"rank": 0, "node": "gpu77", "local_rank": 0, "index": 0, "uuid": "GPU-0", '
        '"memory_fraction": null}]}'
    )
    (tmp_path / "elsewhere.json").write_text(text)
    (tmp_path / "map.json").write_text(text.replace("gpu77", os.uname().nodename.partition(".")[0]))
    before = ["launch", "--device", "cpu", "--rank-map", "map.json"]
    assert main([*before, *options, "--status-file", "status.json", "script.py"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--stdin", "--dry-run"])
def test_what_a_detached_launch_cannot_do_is_a_usage_error(tmp_path: Path, option: str) -> None:
    with Launch(tmp_path, SLEEP, "--detach", option, "--status-file", "status.json") as run:
        assert run.wait() == 2
        assert f"--detach cannot be combined with {option}" in run.text["err"]


FIXED_PORT = """import os, torch
def without_launcher():
    os.environ["MASTER_PORT"] = "29500"
"""


def test_warnings_about_the_script_are_results_of_preflight(tmp_path: Path) -> None:
    with Launch(tmp_path, FIXED_PORT, "--status-file", "status.json", n=1) as run:
        assert run.wait() == 0
        assert (
            "gpuboard: warn script: fixed port: script.py:3 sets MASTER_PORT to 29500; the store of this run is at "
            "another port, so the ranks would wait for one that is not there\n     → delete that line"
        ) in run.text["err"]
        kept = json.loads((Path(run.view().folder) / "preflight.json").read_text())["checks"]
        assert kept == json.loads((tmp_path / "status.json").read_text())["checks"]
        assert [check["name"] for check in kept if check["status"] == "warn"] == ["script: fixed port"]


@pytest.mark.parametrize(
    ("variables", "ignored"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "1,2", "GPUBOARD_LEASE": "k3f9"}, False),
    ],
)
def test_other_gpus_in_the_environment_are_not_ignored_silently(
    tmp_path: Path, variables: dict[str, str], ignored: bool
) -> None:
    node = {"name": socket.gethostname().partition(".")[0], "address": "127.0.0.1", "node_rank": 0}
    node |= {"local_world_size": 2, "cuda_visible_devices": "0,1"}
    ranks = [{"rank": r, "node": node["name"], "local_rank": r, "index": r, "uuid": f"GPU-{r}"} for r in (0, 1)]
    rank_map = {"schema": 1, "lease": None, "master_addr": "127.0.0.1", "master_port": 0, "world_size": 2}
    (tmp_path / "gpus.json").write_text(json.dumps({**rank_map, "nodes": [node], "ranks": ranks}))
    options = ("--device", "cuda", "--rank-map", "gpus.json", "--dry-run")
    with Launch(tmp_path, SLEEP, *options, env=variables) as run:
        assert run.wait() == 0, run.text["err"]
        message = "gpuboard: ignoring CUDA_VISIBLE_DEVICES=1,2 from your environment; choose GPUs with --gpus\n"
        assert run.text["err"] == (message if ignored else "")


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    with Launch(tmp_path, FIXED_PORT, "--dry-run", "--json") as run:
        assert run.wait() == 0
        assert "warn script: fixed port: script.py:3" in run.text["err"]
        plan = json.loads(run.text["out"])
        assert (plan["schema"], plan["dry_run"]) == (1, True)
        assert [rank["rank"] for rank in plan["nodes"][0]["ranks"]] == [0, 1]
        assert [check["name"] for check in plan["checks"]] == ["script: fixed port"]
        assert plan["nodes"][0]["secret"] == "(not shown)"
        assert not (tmp_path / "state").exists()


@pytest.mark.torch
@pytest.mark.parametrize("ending", [False, True])  # whether rank 1 is seen while its interpreter ends
def test_the_rank_that_notices_a_mismatch_first_is_not_blamed(tmp_path: Path, ending: bool) -> None:
    script = f"""
import threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {"threading._register_atexit(time.sleep, 600)" if ending else ""}
    dist.all_reduce(torch.ones(1000, dtype=torch.float64))
dist.all_reduce(torch.ones(1000))
dist.barrier()
"""
    with Launch(tmp_path, script, torch=True) as run:
        assert run.wait() == 1
        assert re.search(
            r"^gpuboard: ranks 0 and 1 called different collectives, or one with different shapes or dtypes: "
            r"rank 0 \(\S+:0\) received 2000 bytes and expected 1000"
            rf"(; rank 1 \(\S+:1\) called .* double 1000 .*script\.py:7.*){'' if ending else '?'}$",
            run.text["err"],
            re.MULTILINE,
        ), run.text["err"]


@pytest.mark.torch
def test_a_script_may_set_another_address_but_not_another_store(tmp_path: Path) -> None:
    script = """
import datetime, os, torch.distributed as dist
os.environ["MASTER_ADDR"] = "127.0.1.1"
dist.init_process_group("gloo")
print("joined", dist.get_world_size(), flush=True)
dist.destroy_process_group()
timeout = datetime.timedelta(seconds=1)  # TCPStore connects for the whole of it
dist.init_process_group("gloo", "tcp://127.0.0.1:9", rank=1, world_size=2, timeout=timeout)
"""
    with Launch(tmp_path, script, n=1, torch=True) as run:
        assert run.wait() == 1
        assert "joined 1" in run.text["out"]
        assert re.search(
            r"^gpuboard: the script connects to 127.0.0.1:9, but the store of this run is at 127.0.0.1:\d+;",
            run.text["err"],
            re.MULTILINE,
        )
        assert re.search(
            r"^gpuboard: rank 0 \(\S+:0\) failed in init_process_group: torch\.distributed\.Dist.* at \S+/script\.py:8",
            run.text["err"],
            re.MULTILINE,
        )
