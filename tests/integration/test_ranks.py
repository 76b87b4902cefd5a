"""A node's processes during a launch: their start, their output, and that none is left at the end.

Most of these tests are about processes, not about torch: their ranks find an empty package of that name, which takes
1.5 s off each. What depends on torch is in test_ranks_torch.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpuboard.transport.base import CallFailed
from tests.integration.launch_lab import parent
from tests.integration.ranks_driver import Node, carriers, go, launch_config, node, wait_gone, with_fake_torch
from tests.waiting import Stopwatch, alive, until

# A helper with its own session, an orphaned one, a stopped one, and one without our variables.
FAMILY = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import os,time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"])
stopped = subprocess.Popen(["sleep", "600"])
os.kill(stopped.pid, signal.SIGSTOP)
subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_fake_torch(tmp_path)


def ready(node: Node) -> bool:
    return "ready" in node.text()


def family(node: Node) -> tuple[int, int, set[int]]:
    """Start the family; return guard, supervisor and all pids below them."""
    rank = go(node)["0"]
    node.wait(ready)
    supervisor = parent(rank)
    return parent(supervisor), supervisor, below(supervisor)


def below(root: int) -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        pid = int(entry.name) if entry.name.isdigit() else 0
        chain = pid
        while chain > 1 and chain != root:
            try:
                chain = parent(chain)
            except OSError:
                break
        if chain == root and pid != root:
            found.add(pid)
    return found


def wait_dead(pids: set[int]) -> None:
    until(lambda: not any(map(alive, pids)), "the processes end", 20)  # and not after ten minutes


def stuck(pid: int) -> bool:
    """Return whether a process has written more than a little, and now has not for half a second."""

    def written() -> int:
        return int(Path(f"/proc/{pid}/io").read_text().split()[3])  # wchar: bytes

    before = written()
    time.sleep(0.5)
    return written() == before > 10_000


def test_end_of_the_connection_empties_the_node(folder: Path) -> None:
    with node(folder, FAMILY) as here:
        guard, supervisor, pids = family(here)
        assert len(pids) >= 5
    wait_dead(pids | {guard, supervisor})


@pytest.mark.parametrize("victim", ["guard", "supervisor"])
def test_the_end_of_a_process_empties_the_node(folder: Path, victim: str) -> None:
    with node(folder, FAMILY) as here:
        guard, supervisor, pids = family(here)
        os.kill(guard if victim == "guard" else supervisor, signal.SIGKILL)
        wait_dead(pids | {guard, supervisor})
        told = here.wait(lambda n: [data["reason"] for data in n.data("stopping")])
        assert told == ["the guard process died" if victim == "guard" else "the supervisor was killed by signal 9"]


def test_a_stopped_supervisor_does_not_keep_ranks_alive(folder: Path) -> None:
    with node(folder, FAMILY) as here:
        guard, supervisor, pids = family(here)
        os.kill(supervisor, signal.SIGSTOP)
    wait_dead(pids | {guard, supervisor})


def test_a_slow_guard_ends_the_ranks_of_a_stopped_supervisor(folder: Path) -> None:
    with node(folder, FAMILY) as here:
        guard, supervisor, pids = family(here)
        for each in (guard, supervisor):
            os.kill(each, signal.SIGSTOP)
    time.sleep(3.0)  # longer than other agents may take to end
    os.kill(guard, signal.SIGCONT)
    wait_dead(pids | {guard, supervisor})


def test_the_end_of_the_head_empties_the_node(folder: Path) -> None:
    (folder / "script.py").write_text(FAMILY)
    config = launch_config(folder, "script.py", listen=False, environ={"PYTHONPATH": str(folder / "fake")})
    program = """
import json, sys
from tests.integration.ranks_driver import Node
from tests.integration.test_ranks import go, ready
node = Node(json.loads(sys.argv[1]))
go(node)
node.wait(ready)
print("up", flush=True)
node.wait(lambda n: False)
"""
    root = Path(__file__).parents[2]
    head = subprocess.Popen([sys.executable, "-c", program, json.dumps(config)], cwd=root, stdout=subprocess.PIPE)
    assert head.stdout is not None
    assert head.stdout.readline() == b"up\n"
    pids = below(head.pid)
    assert len(pids) >= 7
    head.kill()
    head.wait()
    head.stdout.close()
    wait_dead(pids)
    wait_gone(config["run"])  # a helper may have been started after we looked


def test_without_pings_of_the_head_the_run_ends(folder: Path) -> None:
    with node(folder, FAMILY, lost_head_s=6) as here:
        go(here)
        until(lambda: here.call("ping") is not False and ready(here), "the ranks are ready")
        here.wait_ended()
        assert "no ping from `gpuboard launch`" in here.data("stopping")[-1]["reason"]
        assert carriers(here.run) == []


def test_pings_keep_the_run_alive(folder: Path) -> None:
    with node(folder, FAMILY, lost_head_s=6) as here:
        go(here)
        begun = time.monotonic()
        until(lambda: here.call("ping") is not False and time.monotonic() - begun > 9, "pings go on")
        assert ready(here)
        assert not here.data("ended")


def test_stop_lets_a_rank_save_and_kills_one_that_ignores_it(folder: Path) -> None:
    script = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, save if os.environ["RANK"] == "0" else signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    with node(folder, script, count=2) as here:
        pids = go(here)
        here.wait(lambda n: "ready" in n.text(rank=0) and "ready" in n.text(rank=1))
        os.kill(pids["0"], signal.SIGSTOP)
        asked = Stopwatch()
        here.call("stop", grace_s=6, reason="test")
        ends = here.wait_ended()
        assert [(e["code"], e["signal"]) for e in ends] == [(7, None), (None, signal.SIGKILL)]
        assert "saved" in here.text()
        assert asked.stop() < 20


def test_stop_before_the_gate(folder: Path) -> None:
    with node(folder, "print('never')", count=2) as here:
        here.call("spawn")
        here.wait(lambda n: len(n.data("gate")) == 2)
        here.call("stop", grace_s=30, reason="preflight failed")
        ends = here.wait_ended()
        assert [e["signal"] for e in ends] == [signal.SIGTERM] * 2
        assert here.data("output") == []


def test_helpers_may_finish_after_success(folder: Path) -> None:
    script = """
import subprocess, sys
upload = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.02)\\nprint('uploaded', flush=True)"
subprocess.Popen([sys.executable, "-c", upload], start_new_session=True)
"""
    with node(folder, script) as here:
        go(here)
        here.wait(lambda n: "for processes they left running" in str(n.data("notice")))
        (folder / "go").touch()
        ends = here.wait_ended()
        assert ends[0]["code"] == 0
        assert here.text() == "uploaded\n"


def test_helpers_do_not_outlive_their_grace(folder: Path) -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with node(folder, script, helper_grace_s=0.5) as here:
        go(here)
        here.wait_ended()
        assert carriers(here.run) == []


def test_helpers_of_a_failed_rank_are_ended(folder: Path) -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); raise SystemExit(2)"
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 2


def test_what_an_earlier_attempt_left_ends_before_the_ranks_start(folder: Path) -> None:
    run = f"r{os.getpid()}"
    script = "import os; print(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    environ = {**os.environ, "GPUBOARD_RUN": run}
    earlier = subprocess.Popen(["sleep", "600"], env={**environ, "GPUBOARD_ATTEMPT": "1"})
    other = subprocess.Popen(["sleep", "600"], env={**environ, "GPUBOARD_ATTEMPT": "2"})  # of another node
    with node(folder, script, run=run, attempt=2, max_restarts=1, helper_grace_s=0.5) as here:
        here.call("check")
        assert earlier.wait() == -signal.SIGKILL
        assert other.poll() is None
        go(here)
        here.wait_ended()
        assert here.text() == "1\n"
    assert other.wait() == -signal.SIGKILL


def test_signals_go_to_the_ranks_only(folder: Path) -> None:
    script = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def end(*_):
    print("usr1", os.environ["RANK"], child.poll(), flush=True)
    child.kill()
    sys.exit(0)
signal.signal(signal.SIGUSR1, end)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    with node(folder, script, count=2, helper_grace_s=0) as here:
        go(here)
        here.wait(lambda n: "ready" in n.text(rank=0) and "ready" in n.text(rank=1))
        assert here.call("signal", signal=signal.SIGUSR1, ranks=[1]) == {"sent": [1]}
        here.wait(lambda n: "usr1 1 None" in n.text(rank=1))
        assert "usr1" not in here.text(rank=0)
        here.wait(lambda n: n.data("exited"))
        assert here.call("signal", signal=signal.SIGUSR1, ranks=None) == {"sent": [0]}
        assert [e["code"] for e in here.wait_ended()] == [0, 0]


def test_the_end_of_a_rank_is_reported(folder: Path) -> None:
    script = """
import os, signal, threading, time
def leave(): raise SystemExit(3)
def leave_at_once(): os._exit(4)
def leave_with_words(): raise SystemExit("words")
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def interrupt(): raise KeyboardInterrupt
def leave_a_thread(): threading.Thread(target=time.sleep, args=(0.3,)).start()
(leave, leave_at_once, leave_with_words, crash, interrupt, leave_a_thread)[int(os.environ["RANK"])]()
"""
    with node(folder, script, count=6) as here:
        go(here)
        ends = [(end["code"], end["signal"], end["joined"], end["oom"]) for end in here.wait_ended()]
        expected = [(3, None), (4, None), (1, None), (None, signal.SIGSEGV), (None, signal.SIGINT), (0, None)]
        assert ends == [(*end, False, None) for end in expected]


def test_a_rank_that_runs_on_without_its_channel_is_told_from_one_that_ends(folder: Path) -> None:
    script = """
import os, sys, time
wait = "import os, time\\nwhile not os.path.exists('told'): time.sleep(0.02)\\n"
def execute(): os.execv(sys.executable, [sys.executable, "-c", wait + "{}['missing']"])
def close(): os.closerange(3, 1000); exec(wait)
def leave_at_once(): os._exit(1)
def fail(): raise ValueError
(execute, close, leave_at_once, fail)[int(os.environ["RANK"])]()
"""
    with node(folder, script, count=4) as here:
        go(here)
        here.wait(lambda n: len(n.data("disconnected")) == 2)
        (folder / "told").touch()
        assert [end["code"] for end in here.wait_ended()] == [1, 0, 1, 1]
        assert sorted(told["rank"] for told in here.data("disconnected")) == [0, 1]


def test_a_rank_has_dev_null_as_stdin_and_passes_no_descriptor_on(folder: Path) -> None:
    script = """
import os, subprocess, sys
print(repr(sys.stdin.read()), os.readlink("/proc/self/fd/0"), flush=True)
print(subprocess.check_output(["ls", "/proc/self/fd"]).decode().split(), flush=True)
print(os.getsid(0) == os.getpid(), flush=True)
"""
    with node(folder, script) as here:
        go(here)
        here.wait_ended()
        assert here.text() == "'' /dev/null\n['0', '1', '2', '3']\nTrue\n"  # 3: ls reads the folder


def test_a_script_may_close_all_descriptors(folder: Path) -> None:
    script = "import os; os.closerange(3, 1000); f = open('own.txt', 'w'); raise ValueError('x')"
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 1
        assert here.data("raised") == []
        assert "ValueError: x" in here.text("err")
    assert (folder / "own.txt").read_text() == ""


def test_an_exception_is_reported_with_its_place_and_without_our_frames(folder: Path) -> None:
    script = "import json\ndef load():\n    json.loads('{')\nload()\n"
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 1
        (raised,) = here.data("raised")
        assert raised["type"] == "json.decoder.JSONDecodeError"
        assert (raised["file"], raised["line"], raised["function"]) == (str(folder / "script.py"), 3, "load")
        assert raised["phase"] == "import"
        assert raised["traceback"] == here.text("err")
        plain = subprocess.run([sys.executable, "script.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
        assert here.text("err") == plain.stderr


def test_workers_that_a_rank_forks_die_with_it_but_daemons_do_not(folder: Path) -> None:
    script = """
import multiprocessing, os, sys, threading, time
rank = os.getpid()
def child(name):
    while os.getppid() == rank:
        time.sleep(0.01)
    time.sleep(0.5)
    os.write(1, f"{name} lives\\n".encode())  # in one piece: the lines of two processes must not mix
fork = multiprocessing.get_context("fork")
fork.Process(target=child, args=("worker",)).start()
starter = threading.Thread(target=lambda: fork.Process(target=child, args=("of a thread",)).start())
starter.start()
starter.join()
if os.fork() == 0:
    child("daemon")
    os._exit(0)
os._exit(0)
"""
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert sorted(here.text().splitlines()) == ["daemon lives", "of a thread lives"]


def test_a_worker_that_starts_after_the_end_of_its_rank_ends(folder: Path) -> None:
    script = """
import multiprocessing, os, time
rank = os.getpid()
def rank_is_gone():
    while os.getppid() == rank:
        time.sleep(0.01)
def child():
    os.write(1, b"worker lives\\n")
os.register_at_fork(after_in_child=rank_is_gone)
multiprocessing.get_context("fork").Process(target=child).start()
os._exit(0)
"""
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert here.text() == ""


@pytest.mark.parametrize("script", ["x = (\n", "def broken(:\n    pass\n", "1/0 # é\n"])
def test_a_broken_script_is_reported_as_by_python(folder: Path, script: str) -> None:
    with node(folder, script) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 1
        plain = subprocess.run([sys.executable, "script.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
        assert here.text("err") == plain.stderr
        assert here.data("raised")[0]["file"] in (str(folder / "script.py"), None)


def test_a_folder_runs_as_under_python(folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "near.py").write_text("NAME = 'near'\n")
    (folder / "app" / "__main__.py").write_text("import sys, near; print(sys.argv, sys.path[0], __file__, near.NAME)\n")
    config = launch_config(folder, "app", "-x", listen=False, environ={"PYTHONPATH": str(folder / "fake")})
    plain = subprocess.run([sys.executable, "app", "-x"], cwd=folder, stdout=subprocess.PIPE, text=True)
    with Node(config) as here:
        assert here.call("check")["target_sha256"] is not None
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert here.text() == plain.stdout


def test_a_zip_archive_runs_as_under_python(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("near.py", "NAME = 'near'\n")
        archive.writestr("__main__.py", "import sys, near; print(sys.argv, sys.path[0], __file__, near.NAME)\n")
    config = launch_config(folder, "app.pyz", "-x", listen=False, environ={"PYTHONPATH": str(folder / "fake")})
    plain = subprocess.run([sys.executable, "app.pyz", "-x"], cwd=folder, stdout=subprocess.PIPE, text=True)
    with Node(config) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert here.text() == plain.stdout


def test_the_environment_of_a_rank(folder: Path) -> None:
    script = "import os; print({k: v for k, v in os.environ.items() if k in os.environ['WANTED'].split()})"
    wanted = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,5", "GPUBOARD_LEASE": "k3f9",
        "OMP_NUM_THREADS": "7",
    }  # fmt: skip
    ranks = [
        {"rank": 2, "local_rank": 0, "index": 2, "uuid": "GPU-a", "memory_fraction": None},
        {"rank": 3, "local_rank": 1, "index": 5, "uuid": "GPU-b", "memory_fraction": None},
    ]
    environ = {"WANTED": " ".join(wanted), "RANK": "9", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "7"}
    with node(
        folder, script, ranks=ranks, environ=environ, node_rank=1, nodes=2, world_size=4, lease="k3f9",
        cuda_visible_devices="2,5",
    ) as here:  # fmt: skip
        go(here)
        here.wait_ended()
        assert eval(here.text(rank=3)) == wanted
        assert "RANK=9, MASTER_PORT=29500" in here.data("notice")[0]["text"]


def test_every_byte_of_output_arrives_while_the_head_is_slow(folder: Path) -> None:
    size = 30_000_000
    script = f"""
import os, sys, time
while not os.path.exists("go"): time.sleep(0.02)
line = "x" * 99 + "\\n"
for _ in range({size // 100}): sys.stdout.write(line)
"""
    with node(folder, script) as here:
        rank = go(here)["0"]
        supervisor = parent(rank)
        here.call("hold", on=True)
        (folder / "go").touch()
        until(lambda: stuck(rank), "the rank blocks until its output is read")
        here.call("ping")
        assert here.data("output") == []
        assert alive(rank)
        peak = next(line for line in Path(f"/proc/{supervisor}/status").read_text().splitlines() if "VmHWM" in line)
        assert int(peak.split()[1]) < 64_000  # kB
        here.call("hold", on=False)
        here.wait_ended(120)
        assert sum(len(d["text"]) for d in here.data("output")) == size
        assert all(d["text"].endswith("\n") and len(d["text"]) <= 65536 for d in here.data("output"))


def test_a_progress_bar_arrives_while_it_moves(folder: Path) -> None:
    script = """
import os, sys, time
for i in range(6):
    sys.stderr.write("\\r%d/5 \\x1b[32mé\\x1b[0m" % i); sys.stderr.flush(); time.sleep(0.15)
while not os.path.exists("go"): time.sleep(0.02)
sys.stderr.write("\\n")
"""
    with node(folder, script) as here:
        go(here)
        here.wait(lambda n: "1/5" in n.text("err"))
        (folder / "go").touch()
        here.wait_ended()
        assert here.text("err") == "".join(f"\r{i}/5 \x1b[32mé\x1b[0m" for i in range(6)) + "\n"


def test_why_a_rank_cannot_be_started(folder: Path) -> None:
    with node(folder, "pass", python="/no/such/python") as here, pytest.raises(CallFailed) as refused:
        here.call("spawn")
    assert refused.value.kind == "python"
    with node(folder, "pass", cwd=str(folder / "missing")) as here:
        for op in ("check", "spawn"):
            with pytest.raises(CallFailed) as refused:
                here.call(op)
            assert refused.value.kind == "cwd"
    config = launch_config(folder, "missing.py", listen=False)
    with Node(config) as here, pytest.raises(CallFailed) as refused:
        here.call("check")
    assert refused.value.kind == "target"
    assert "missing.py" in refused.value.message


def test_wrapped_ranks(folder: Path) -> None:
    script = "import os; print(os.environ['WRAPPED'], os.environ['RANK'])"
    with node(folder, script, wrap=["sh", "-c", 'WRAPPED=yes "$@"; exit $?', "sh"]) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 0
        assert here.text() == "yes 0\n"


def test_a_wrapper_that_closes_descriptors_is_reported(folder: Path) -> None:
    wrap = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"]
    with node(folder, "pass", wrap=wrap) as here:
        go(here)
        assert here.wait_ended()[0]["code"] == 2
        assert "must pass on file descriptors" in here.data("notice")[0]["text"]


def test_processes_are_listed_with_their_rank(folder: Path) -> None:
    with node(folder, FAMILY) as here:
        family(here)

        def listed() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = here.call("inspect")["ranks"]
            return found if any(child["state"] == "T" for rank in found for child in rank["children"]) else []

        found = until(listed, "one of them is stopped")
        assert [rank["rank"] for rank in found] == [0]
        assert "sleep" in {child["name"] for child in found[0]["children"]}


def test_an_unknown_call_and_a_call_out_of_order_are_refused(folder: Path) -> None:
    with node(folder, "pass") as here:
        for op, kind in (("dance", "unknown"), ("go", "state"), ("signal", "arguments")):
            with pytest.raises(CallFailed) as refused:
                here.call(op)
            assert refused.value.kind == kind
    wait_gone(here.run)
