"""Launches in unusual conditions: invalid UTF-8, hang-ups, repeated stops, a node's own environment."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.folder import RunFolder
from gpuboard.leases.rank_map import rank_map as rank_map_of
from gpuboard.model.request import ChosenGpu
from tests.integration.here import Here
from tests.integration.launch_lab import SLEEP, STUBBORN, Launch, parent, without_torch, write_torch
from tests.integration.ranks_driver import wait_gone
from tests.nvml import Gpu, write_script
from tests.sshd import SSHD, Sshd
from tests.unit.test_runs import view
from tests.waiting import until

# Ranks that run on for a second after SIGTERM
SLOW = """
import os, signal, sys, time
def saved(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, saved)
print("up", flush=True)
time.sleep(600)
"""


def test_an_exception_with_surrogates_in_a_file_name_is_reported(tmp_path: Path) -> None:
    with Launch(tmp_path, "open('no-\\udcff-such')", n=1) as run:
        assert run.wait() == 1
        assert "rank 0 (" in run.text["err"]
        assert "FileNotFoundError: [Errno 2] No such file or directory: 'no-\\udcff-such'" in run.text["err"]
        assert run.view().verdicts[0].kind == "raised"


def test_an_exception_without_a_module_and_with_surrogates_is_reported(tmp_path: Path) -> None:
    script = "class E(Exception):\n    __module__ = None\nraise E('bad \\udcff name')"
    with Launch(tmp_path, script, n=1) as run:
        assert run.wait() == 1
        assert "failed before init_process_group: None.E: bad ? name at " in run.text["err"]
        assert "<gpuboard>" not in run.text["err"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_a_loopback_that_is_down_fails_preflight(tmp_path: Path) -> None:
    with Launch(tmp_path, "print('up')", n=1, before=("unshare", "-n")) as run:
        assert run.wait() == 7
        assert "lo is down" in run.text["err"]
        assert "ip link set lo up" in run.text["err"]
        assert "up" not in run.text["out"]


def test_helpers_that_end_soon_are_not_reported(tmp_path: Path) -> None:
    script = "import multiprocessing as mp\nif __name__ == '__main__':\n    p = mp.get_context('spawn').Pool(1)"
    with Launch(tmp_path, script, n=1) as run:
        assert run.wait() == 0
        assert "left running" not in run.text["err"]


def test_a_helper_that_stays_is_named_and_ended(tmp_path: Path) -> None:
    script = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    with Launch(tmp_path, script, "--helper-grace", "3s", n=1) as run:
        assert run.wait() == 0
        words = r"waiting up to \d s \(--helper-grace\) for processes they left running: pid (\d+) \(sleep\)"
        found = re.search(words, run.text["err"])
        assert found and found[1] == run.text["out"].strip(), run.text["err"]
        assert run.carriers() == []


def test_gpus_are_read_while_nvml_starts_slowly(here: Here) -> None:
    write_script(here.script, [Gpu()], seed=here.seed, trouble=["slow nvmlInitWithFlags 3000"])
    name, path = os.uname().nodename.partition(".")[0], here.folder / "script.py"
    path.write_text("print('ran')\n")
    rank_map = rank_map_of(None, [ChosenGpu(name, 0, here.now[0].uuid)], {name: "127.0.0.1"})
    (here.folder / "map.json").write_bytes(msgspec.json.encode(rank_map))
    torch = f"PYTHONPATH={write_torch(here.folder / 'fake')}"
    words = ["--rank-map", str(here.folder / "map.json"), "--python", sys.executable, "--env", torch, str(path)]
    done = here.run("launch", *words, GPUBOARD_CONNECT_TIMEOUT="2s")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "GPU 0 is not reserved; others may take it" in done.stderr


def test_ranks_on_the_cpu_reserve_nothing(here: Here) -> None:
    here.gpus([Gpu(utilization=90)])
    path = here.folder / "script.py"
    path.write_text("import os\nprint(os.environ['RANK'], os.environ.get('GPUBOARD_LEASE'))\n")
    torch = f"PYTHONPATH={write_torch(here.folder / 'fake')}"
    words = ["--device", "cpu", "--python", sys.executable, "--env", torch, str(path)]
    done = here.run("launch", "--n", "2", *words)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == ["0 None", "1 None"]
    assert here.run("launch", "--gpus", f"{os.uname().nodename.partition('.')[0]}:0", *words).returncode == 4
    done = here.run("launch", "--n", "4", "--per-node", "2", *words)
    assert (done.returncode, done.stderr) == (2, "gpuboard: --n 4 ranks with --per-node 2 do not fit on 1 nodes\n")


def test_preflight_only_releases_what_it_reserved(here: Here) -> None:
    here.gpus([Gpu()])
    torch = f"PYTHONPATH={write_torch(here.folder / 'fake')}"
    (here.folder / "script.py").write_text("raise SystemExit('started')\n")
    words = ["--python", sys.executable, "--env", torch, str(here.folder / "script.py")]
    done = here.run("launch", "--n", "1", "--preflight-only", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok   GPU: \S+ GPU 0 is held by lease \S+$", done.stdout, re.M)
    assert msgspec.json.decode(here.run("leases", "--json").stdout)["leases"] == []


def test_printing_a_stack_reads_no_pipe_of_the_script(tmp_path: Path) -> None:
    script = """
import linecache, os, traceback
if os.environ["RANK"] == "1":
    os.closerange(3, 256)
if os.environ["RANK"] == "2":
    linecache.clearcache()
pipes = [os.pipe() for _ in range(60)]
print(len(traceback.extract_stack().format()) > 0)
"""
    with Launch(tmp_path, script, n=3) as run:
        assert run.wait(60) == 0
        assert [line.partition("] ")[2] for line in run.text["out"].splitlines()] == ["True"] * 3


@pytest.mark.parametrize(
    ("options", "args", "words"),
    [
        (["--env", "ODD=a\udcff"], [], "the variable ODD is not UTF-8 and cannot be sent to the nodes: 'a\\udcff'"),
        ([], ["fine", "a\udcff"], "argument 2 of the target is not UTF-8 and cannot be sent"),
    ],
)
def test_invalid_utf_8_is_a_usage_error(tmp_path: Path, options: list[str], args: list[str], words: str) -> None:
    with Launch(tmp_path, "", *options, args=args) as run:
        assert run.wait() == 2
        assert words in run.text["err"]


def test_what_a_rank_gets_is_unchanged(tmp_path: Path) -> None:
    """Values with line ends, the folder of PWD, an interpreter relative to it, an interface of the node's own."""
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    script = """
import os, sys
print(ascii([os.environ["ODD"], sys.argv[1:]]))
for name in "PWD", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME":
    print(os.environ[name])
print(sys.orig_argv[0])
"""
    options, args = ["--env", "ODD=a\nb\u00e9 '\"$", "--python", "venv/python"], ["", "x\ny", "--help"]
    env = {"PWD": f"{tmp_path}/link", "NCCL_SOCKET_IFNAME": "site0"}
    options += without_torch(tmp_path)  # the interpreter has none
    with Launch(tmp_path, script, *options, n=1, args=args, env=env) as run:
        assert run.wait() == 0
        assert run.text["out"].splitlines() == [
            "['a\\nb\\xe9 \\'\"$', ['', 'x\\ny', '--help']]",
            f"{tmp_path}/link",
            "site0",
            "lo",
            f"{tmp_path}/link/venv/python",
        ]


def test_a_folder_that_was_removed_is_a_usage_error(tmp_path: Path) -> None:
    words = f'mkdir gone; cd gone; rmdir ../gone; exec "{sys.executable}" -m gpuboard launch --device cpu --n 1 t.py'
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "gpuboard: the working directory was removed; cd to one that exists on every node",
    )


def test_ctrl_c_after_a_failure_kills_at_once(tmp_path: Path) -> None:
    with Launch(tmp_path, STUBBORN, "--grace", "60s") as run:
        run.wait_for("up", times=2)
        (tmp_path / "fail").touch()
        run.wait_for("SIGKILL in 60 s", "err")
        run.signal(signal.SIGINT)
        assert run.wait(60) == 5


def test_a_terminal_that_hangs_up_twice_leaves_the_ranks_their_grace(tmp_path: Path) -> None:
    with Launch(tmp_path, SLOW, n=1) as run:
        run.wait_for("up")
        run.signal(signal.SIGHUP)
        run.wait_for("the terminal was closed", "err")
        run.signal(signal.SIGHUP)
        assert run.wait() == 129
        assert "saved" in run.text["out"]


def test_a_head_that_was_suspended_for_too_long_reports_the_consequence(tmp_path: Path) -> None:
    with Launch(tmp_path, SLEEP, "--lost-head", "8s", n=1) as run:
        run.wait_for("up")
        run.signal(signal.SIGSTOP)
        wait_gone(run.view().id, 60.0)
        run.signal(signal.SIGCONT)
        assert run.wait() == 1
        text = run.view().verdicts[0].text
        stopping = re.search(r": no ping from `gpuboard launch` for (\d+) s; its ranks are being stopped", text)
        assert stopping and int(stopping[1]) >= 8, text  # checked each second, later on a busy machine


@pytest.mark.parametrize("call", ["input()", "breakpoint()"])
def test_a_rank_that_asks_for_input_gets_a_hint(tmp_path: Path, call: str) -> None:
    with Launch(tmp_path, call, n=1) as run:
        assert run.wait() == 1
        assert "  its standard input is /dev/null; --stdin 0 gives it that of gpuboard\n" in run.text["err"]


def test_standard_input_reaches_the_rank_that_asks_for_it_whole(tmp_path: Path) -> None:
    script = """
import os, sys, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("read", sys.stdin.read() == "line\\n" * 100000)
"""
    (tmp_path / "data").write_text("line\n" * 100_000)  # more than pipes hold
    with (tmp_path / "data").open() as data, Launch(tmp_path, script, "--stdin", "1", stdin=data.fileno()) as run:
        run.wait_for("up", times=2)
        (tmp_path / "go").touch()
        assert run.wait() == 0
        host = run.view().ranks[0].node
        assert sorted(run.text["out"].splitlines())[::2] == [
            f"[rank 0 {host}:0] read False", f"[rank 1 {host}:1] read True",
        ]  # fmt: skip


def test_a_terminal_is_passed_on_to_an_only_rank(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    script = "print(input('name? ')[::-1])\nprint(input() or 'no')"
    with Launch(tmp_path, script, n=1, stdin=theirs) as run:
        os.close(theirs)
        os.write(ours, b"alice\n")
        run.wait_for("ecila")
        os.write(ours, b"\x04")  # ctrl-D
        assert run.wait() == 1
        assert "EOFError" in run.text["err"]
        assert "/dev/null" not in run.text["err"]
    os.close(ours)


def test_ctrl_z_names_its_consequence_and_suspends(tmp_path: Path) -> None:
    group = "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"  # as a shell with job control does
    with Launch(tmp_path, SLEEP, n=1, before=(sys.executable, "-c", group)) as run:
        run.wait_for("up")
        for times in (1, 2):
            run.signal(signal.SIGTSTP)
            run.wait_for("will be stopped unless `fg` or `bg` continues gpuboard within 60 s", "err", times=times)
            until(lambda: state(run.process.pid) == "T", "it is suspended")
            run.signal(signal.SIGCONT)
            until(lambda: catches(run.process.pid, signal.SIGTSTP), "it handles the signal again")
        run.signal(signal.SIGINT)
        assert run.wait() == 130


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal (proc(5), SigCgt)."""
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def state(pid: int) -> str:
    """Return the state of a process (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_lease_that_a_run_uses_is_released_with_force_only(here: Here) -> None:
    here.needs_claims()
    lease = here.json("allocate", "--n", "1", "--detach", "--for", "10m", "--format", "json")["lease"]["id"]
    path = here.folder / "script.py"
    path.write_text(SLEEP)
    torch = f"PYTHONPATH={write_torch(here.folder / 'fake')}"
    words = ["--lease", lease, "--device", "cpu", "--python", sys.executable, "--env", torch, str(path)]
    with subprocess.Popen(here.command("launch", *words), env=here.env, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        try:
            done = here.run("release", "--mine")
            assert (done.returncode, done.stdout) == (1, "")
            assert re.search(
                rf"gpuboard: lease {lease}: not released: run \w+ \(.*\) uses it; `gpuboard stop r", done.stderr
            )
            assert here.run("release", lease, "--force").stdout.startswith(f"released {lease}")
        finally:
            run.terminate()
        assert run.wait(60) == 143


@pytest.mark.skipif(not SSHD, reason="needs sshd (openssh-server)")
def test_before_a_release_the_node_of_a_noted_run_is_asked_for_its_end(here: Here, tmp_path: Path) -> None:
    here.needs_claims()
    sshd = Sshd(tmp_path / "sshd", extra=f"SetEnv XDG_STATE_HOME={tmp_path}/far\n")
    try:
        sshd.host("far01")
        here.config(f'ssh_config = "{sshd.ssh_config}"\n')
        allocate = ["allocate", "--n", "1", "--detach", "--for", "10m", "--format", "json"]
        ended, gone = (here.json(*allocate)["lease"]["id"] for _ in range(2))
        far = {**here.env, "XDG_STATE_HOME": f"{tmp_path}/far"}
        head = msgspec.structs.replace(run_folder.this_head(), host="far01", boot_id="another")
        for run, lease in (("rended", ended), ("rgone", gone)):
            run_folder.note(here.env, msgspec.structs.replace(view(run, head), lease=lease, node="far01"))
        RunFolder(far, "rended").keep("state.json", view("rended", head, "done"))

        sshd.stop()
        done = here.run("release", ended)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.search(
            rf"lease {ended}: not released: run rended \(.*\) may still use it \(far01 was asked and gave no answer: "
            r"(.*refused.*|no answer within 5 s)\); `gpuboard stop rended` ends the run, --force",
            done.stderr,
        )
        sshd.start()

        def released() -> bool:
            done = here.run("release", ended, gone)
            if "no answer within 5 s" in done.stderr:  # on a busy machine
                return False
            assert (done.returncode, done.stderr) == (0, "")
            return True

        until(released, "both leases are released")
        assert not list(here.needs_claims().glob("gpuboard.*.*"))
    finally:
        sshd.stop()


def test_a_head_that_is_suspended_while_its_run_ends_gets_all_output(tmp_path: Path) -> None:
    script = """
import os, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
for line in range(700):  # more than pipes hold, and less than a supervisor takes from its ranks
    print("%0999d" % line)
"""
    with Launch(tmp_path, script, n=1) as run:
        run.wait_for("up")
        rank = run.view().ranks[0].pid
        assert rank is not None
        supervisor = parent(rank)
        run.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(lambda: not Path(f"/proc/{rank}").exists(), "the rank ends")
        since = time.monotonic()
        until(lambda: time.monotonic() > since + 5 or not Path(f"/proc/{supervisor}").exists(), "some seconds pass")
        run.signal(signal.SIGCONT)
        assert run.wait() == 0, run.text["err"]
        assert run.text["out"].endswith(f"{699:0999}\n")


def test_nohup_is_respected(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children inherit it
    try:
        run = Launch(tmp_path, SLEEP, n=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    with run:
        run.wait_for("up")
        run.signal(signal.SIGHUP)
        run.signal(signal.SIGUSR1)  # the first signal that it handles
        assert run.wait() == 128 + signal.SIGUSR1
        assert "the terminal was closed" not in run.text["err"]


def test_bytes_that_are_no_text_are_unchanged_in_the_logs(tmp_path: Path) -> None:
    script = """
import os
data = bytes(range(256)) * 600 + "\u20ac".encode()
with open("written", "wb") as file: file.write(data)
os.write(1, data[:-1])
os.write(1, data[-1:])
"""
    with Launch(tmp_path, script, n=1) as run:
        assert run.wait() == 0
        assert (Path(run.view().folder) / "rank-0.out").read_bytes() == (tmp_path / "written").read_bytes()


def test_text_without_a_line_end_of_a_helper_is_shown_at_the_end_and_a_run_that_has_ended_is_not_stopped(
    tmp_path: Path,
) -> None:
    script = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); print('late', end='')"])
"""
    with Launch(tmp_path, script, n=1) as run:
        assert run.wait() == 0
        assert run.text["out"] == "late\n"
        done = run.command("stop", "last")
        assert (done.returncode, done.stdout) == (0, f"run {run.view().id} has ended already: done\n")
        assert run.command("logs", "-f", "last").stdout.endswith("late\n")


def test_a_head_that_can_start_no_thread_can_be_asked_and_stopped(tmp_path: Path) -> None:
    """As at the user's limit of processes, which does not apply to root: no memory is left for a thread's stack."""
    limit = """
import os, sys, threading, time
def limit():
    while not os.path.exists("limit"):
        time.sleep(0.02)
    threading.stack_size(1 << 47)
    os.rename("limit", "limited")
if "launch" in sys.argv:
    threading.Thread(target=limit, daemon=True).start()
"""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(limit)
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    with Launch(tmp_path, SLEEP, env={"PYTHONPATH": path}) as run:
        run.wait_for("up", times=2)
        (tmp_path / "limit").touch()
        until((tmp_path / "limited").exists, "no thread can be started")
        assert "ranks 0-1: state unknown\n" in run.command("explain").stdout
        assert run.command("stop", "--now", "last").returncode == 0
        assert run.wait() == 143
