"""Stalled runs of real torch with gloo: each stall is explained, and its end is noticed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.integration.launch_lab import Launch, without_torch
from tests.waiting import until

# One run with a stall after the other; the test ends each by a FIFO or a signal. The last one cannot end.
SCRIPT = """\
import os, signal, sys, torch
from torch import distributed

suspect = os.environ["RANK"] == "1"

def wait_for(name):
    open(name).read()

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        wait_for("item")
        return index

def load():
    list(torch.utils.data.DataLoader(Items(), num_workers=1))

def send():
    open("send").read()
    distributed.send(torch.ones(1), 0)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def reduce():
    distributed.all_reduce(torch.ones(2, 3))

if suspect:
    wait_for("init")
distributed.init_process_group("gloo")
reduce()
for fault in (lambda: wait_for("python"), send, load, stop):
    if suspect:
        fault()
    elif fault is send and os.environ["RANK"] == "0":
        distributed.recv(torch.ones(1), 1)
    reduce()
if suspect:
    print("bad label", file=sys.stderr, flush=True)
    distributed.broadcast(torch.ones(4), 0)
reduce()
"""


# Even steps until there is a file `slow`, then rank 1 takes half as long again, until there is a file `end`. The ranks
# then differ in a way that torch does not notice: gloo accepts a message that is shorter than expected.
STEPS = """\
import os, time, torch
from torch import distributed

distributed.init_process_group("gloo")
weights, flag = torch.ones(5000), torch.ones(1)
while flag:
    for step in range(20):
        late = os.environ["RANK"] == "1" and os.path.exists("slow")
        time.sleep(0.06 if late else 0.04)
        distributed.all_reduce(weights)
    print("20 steps", flush=True)
    flag[0] = not os.path.exists("end")
    distributed.broadcast(flag, 0)
distributed.broadcast(torch.ones(2 if os.environ["RANK"] == "1" else 4), 1)
distributed.destroy_process_group()
"""


def explain(env: Mapping[str, str], *words: str, code: int = 0) -> str:
    """Return what `gpuboard explain` prints, its errors included."""
    command = [sys.executable, "-m", "gpuboard", "explain", *words]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def test_a_job_that_gpuboard_did_not_start_is_explained(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "python")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\nfrom torch import distributed\ndistributed.init_process_group('gloo')\n"
        "def load():\n    open('python').read()\nif os.environ['RANK'] == '1':\n    load()\n"
        "print('up', flush=True)\ndistributed.barrier()\n"
    )
    held = socket.socket()  # reserves the port: bound as torch binds it, without listening
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    by_hand = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], cwd=tmp_path, env={**by_hand, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == b"up\n"
        until(lambda: "rank 0" in (shown := explain(by_hand, "--pid", str(ranks[1].pid))) and "waits in" in shown)
        shown = explain(by_hand, "--pid", str(ranks[0].pid))
        assert "which is at script.py:5 in load" in shown
        assert "waits in barrier at script.py:9" in shown
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        held.close()
    gone = explain(by_hand, "--pid", str(ranks[0].pid), code=1)
    assert f"cannot inspect pid {ranks[0].pid}: there is no such process" in gone


def test_a_stalled_run_is_ended_on_request(tmp_path: Path) -> None:
    """The replacement of torch has no flight recorder: the stacks decide."""
    script = "import os, time\nfrom torch.distributed import barrier, meet\nmeet()\n"
    script += "if os.environ['RANK'] == '1':\n    time.sleep(600)\nbarrier()\n"
    with Launch(tmp_path, script, *without_torch(tmp_path), "--on-stall", "kill", "--grace", "0") as run:
        assert run.wait() == 1
        assert "which is at script.py:5; rank 0 (" in run.text["err"]
        assert "the run is stalled (--on-stall kill); stopping ranks 0-1: SIGKILL now" in run.text["err"]
        view = run.view()
        assert (view.state, [verdict.kind for verdict in view.verdicts]) == ("failed", ["stall-behind"])


def test_the_thread_that_keeps_a_rank_is_named(tmp_path: Path) -> None:
    script = "import os, threading, time\nfrom torch.distributed import barrier, meet\nmeet()\n"
    script += "def log():\n    time.sleep(600)\nif os.environ['RANK'] == '1':\n"
    script += "    other = threading.Thread(target=log)\n    other.start()\n    other.join()\nbarrier()\n"
    with Launch(tmp_path, script, *without_torch(tmp_path), "--on-stall", "kill", "--grace", "0") as run:
        assert run.wait() == 1
        assert "is at script.py:9; its thread Thread-1 (log) is at script.py:5 in log; rank 0 (" in run.text["err"]


def test_each_stall_is_explained_and_its_end_is_noticed(tmp_path: Path) -> None:
    for name in ("init", "python", "send", "item"):
        os.mkfifo(tmp_path / name)
    node = os.uname().nodename.partition(".")[0]
    with Launch(tmp_path, SCRIPT, "--grace", "1s", n=3, torch=True) as run:
        stalls = 0

        def explained(*words: str) -> str:
            nonlocal stalls
            stalls += 1
            text = run.wait_for("gpuboard: stalled: ", "err", times=stalls)
            line = [line for line in text.splitlines() if "stalled: " in line][-1]
            for word in words:
                assert word in line, line
            view = run.wait_view(lambda view: view.state == "stalled")
            assert [v.text for v in view.verdicts] == [line.removeprefix("gpuboard: ")]
            evidence = msgspec.json.decode((Path(view.folder) / f"stall-{stalls}.json").read_bytes())
            assert [rank["rank"] for rank in evidence["ranks"]] == [0, 1, 2]
            assert [group["ranks"] for group in evidence["verdict"]["groups"] if group["suspect"]] == [[1]]
            return line

        def continued() -> None:
            run.wait_for("the run continues after ", "err", times=stalls)
            assert run.wait_view(lambda view: view.state == "running").verdicts == []

        explained(
            f"for rank 1 ({node}:1), which has not called init_process_group: it is at script.py:7 in wait_for; ",
            "ranks 0,2 wait in init_process_group at script.py:31",
        )
        (tmp_path / "init").write_text("")
        continued()
        explained(
            f"for rank 1 ({node}:1), which is at script.py:7 in wait_for; ",
            "ranks 0,2 wait in all_reduce (collective 2) at script.py:27 in reduce",
        )
        shown = explain(run.env)
        assert shown.splitlines()[1:4] == [
            "  ranks 0,2: wait in all_reduce (collective 2) at script.py:27 in reduce, for rank 1",
            f"  rank 1 ({node}:1): idle at script.py:7 in wait_for",
            f"why: waiting for rank 1 ({node}:1), which is at script.py:7 in wait_for; "
            "ranks 0,2 wait in all_reduce (collective 2) at script.py:27 in reduce",
        ]
        assert explain(run.env, "last", "--stacks").endswith(f"{tmp_path}/script.py:38 in <module>\n")
        (tmp_path / "python").write_text("")
        continued()
        explained(
            f"for rank 1 ({node}:1), which is at script.py:20 in send; "
            f"rank 0 ({node}:0) waits in recv from rank 1 at script.py:37; "
            f"rank 2 ({node}:2) waits in all_reduce (collective 3) at script.py:27 in reduce",
        )
        (tmp_path / "send").write_text("")
        continued()
        explained(
            f"for rank 1 ({node}:1), which waits for its DataLoader at script.py:17 in load, whose worker ",
            " is at script.py:7 in wait_for; ranks 0,2 wait in all_reduce (collective 4)",
        )
        (tmp_path / "item").write_text("")
        continued()
        explained(f"for rank 1 ({node}:1), which is stopped (SIGSTOP, ctrl-Z or a debugger) at script.py:24 in stop")
        pid = re.search(rf"to continue it: kill -CONT (\d+) on {node}", run.wait_for("kill -CONT", "err"))
        assert pid
        os.kill(int(pid.group(1)), signal.SIGCONT)
        continued()
        explained(
            "because the ranks differ at collective 6: ranks 0,2 called all_reduce of float 2x3 at script.py:27 in "
            f"reduce; rank 1 ({node}:1) called broadcast of float 4 at script.py:41",
            f"most likely wrong: rank 1 ({node}:1)",
        )
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert [v.kind for v in run.view().verdicts] == ["stall-mismatch", "stopped"]
        assert "the ranks differ at collective 6" in explain(run.env), "also after the end"
        assert not list(Path("/tmp").glob(f"gpuboard-{run.view().id}-*")), "the ranks' sockets"


def test_a_rank_that_the_others_wait_for_in_each_step_and_a_difference_that_torch_does_not_notice_are_reported(
    tmp_path: Path,
) -> None:
    node = os.uname().nodename.partition(".")[0]
    with Launch(tmp_path, STEPS, torch=True) as run:
        run.wait_for("20 steps", times=24)  # of two ranks: the head looks at them after 10 s
        until(lambda: "per step, the median of " in explain(run.env))
        assert "the others wait for it" not in explain(run.env), "the steps are even"
        assert run.text["err"] == ""
        (tmp_path / "slow").write_text("")
        run.wait_for("in each step for rank 1", "err")
        lines = [line for line in run.text["err"].splitlines() if "slow: " in line]
        words = (
            rf"slow: the other rank waits \d+ ms of \d+ ms in each (step|of the last 18 steps) for rank 1 \({node}:1\)"
        )
        assert all(re.fullmatch(f"gpuboard: {words}", line) for line in lines), "by the first steps, and by many"
        view = run.wait_view(lambda view: bool(view.verdicts))
        assert [(v.kind, v.rank, v.node) for v in view.verdicts] == [("slow", 1, node)]
        assert re.fullmatch(words, view.verdicts[0].text)
        assert view.state == "running"
        assert re.search(
            rf"rank 1 \({node}:1\): own time \d+ ms, waits .* ms, the others wait for it", explain(run.env)
        )
        (tmp_path / "end").write_text("")
        assert run.wait() == 0
        assert (run.view().state, [verdict.kind for verdict in run.view().verdicts]) == ("done", ["slow"])
        last = run.text["out"].count("20 steps") // 2 * 21 + 1
        assert run.text["err"].endswith(
            f"gpuboard: the ranks differ at collective {last}: rank 0 ({node}:0) called broadcast of float 4; "
            f"rank 1 ({node}:1) called broadcast of float 2; torch reported no error: results may be wrong\n"
        )
