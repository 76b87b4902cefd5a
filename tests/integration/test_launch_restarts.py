"""`gpuboard launch --max-restarts`: attempts of one run, on this machine and on two nodes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.integration.launch_lab import SLEEP, STUBBORN, Launch

EXAMPLES = Path(__file__).parents[2] / "examples"
# Attempt 1: rank 1 leaves a helper behind that nothing but the end of the attempt ends, and fails. Rank 0 saves.
CHECKPOINT = """
import os, subprocess, sys, time
from pathlib import Path
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["MASTER_PORT"], flush=True)
if attempt == 0:
    if os.environ["RANK"] == "1":
        helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open("helper", "w").write(str(helper.pid))
        while not os.path.exists("saved"):
            time.sleep(0.02)
        raise ValueError("as planned")
    Path("saving").write_text("step 41")
    os.replace("saving", "saved")  # never seen without its content
    time.sleep(600)
command = Path("/proc", Path("helper").read_text(), "cmdline")
print("from", open("saved").read(), command.read_text() if command.exists() else "")
"""


def test_a_failed_run_is_restarted_with_its_checkpoint(tmp_path: Path) -> None:
    with Launch(tmp_path, CHECKPOINT, "--max-restarts", "3", "--json") as run:
        run.wait_for("attempt 2 in 1 s (ctrl-C: end the run)", "err")
        assert run.view().state not in {"done", "failed"}
        run.wait_for("from step 41", "err", times=2)
        assert run.wait() == 0
        view = run.view()
        assert (view.state, view.exit_code, view.attempt) == ("done", 0, 2)
        assert [(v.attempt, v.kind, v.rank) for v in view.verdicts] == [(1, "raised", 1)]
        assert json.loads(run.text["out"])["run"]["attempt"] == 2
        folder = Path(view.folder)
        out = (folder / "rank-1.out").read_text()
        assert re.fullmatch(
            r"attempt 0 of 3 \d+\n\n--- attempt 2 of 4 at \S+ ---\nattempt 1 of 3 \d+\nfrom step 41 \n", out
        ), "the first attempt is over before the second begins"
        log = (folder / "head.log").read_text()
        assert "attempt 1 of 4: exit code 1" in log
        assert log.count("gpuboard: attempt 2 of 4\n") == 1
        assert run.command("runs").stdout.splitlines()[-1].strip().startswith("attempt 1: rank 1 (")


def test_the_same_failure_again_is_reported_and_the_last_exit_code_counts(tmp_path: Path) -> None:
    script = "import os\nif os.environ['RANK'] == '1': os._exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n"
    script += "import time\ntime.sleep(600)\n"
    with Launch(tmp_path, script, "--max-restarts", "1") as run:
        assert run.wait() == 4
        assert [v.attempt for v in run.view().verdicts] == [1, 2]
        assert "failed like attempt" not in run.text["err"]
    with Launch(tmp_path, "raise ValueError(open('/proc/self/stat').read())", "--max-restarts", "1", n=1) as run:
        assert run.wait() == 1
        words = f"attempt 2 failed like attempt 1 (ValueError at {tmp_path}/script.py:1): restarts may not help"
        assert words in run.text["err"]


def test_a_refused_restart_counts_as_an_attempt(tmp_path: Path) -> None:
    script = """
import os, time
if os.environ["RANK"] == "0":  # it has read the script
    open("up", "w").close()
    time.sleep(600)
while not os.path.exists("up"):
    time.sleep(0.02)
os.remove("script.py")
os._exit(3)
"""
    with Launch(tmp_path, script, "--max-restarts", "2") as run:
        assert run.wait() == 7
        assert [(v.attempt, v.kind) for v in run.view().verdicts] == [(1, "exit"), (2, "preflight"), (3, "preflight")]
        assert "attempt 3 failed like attempt 2 (fail start: " in run.text["err"]
        assert run.view().state == "failed"


@pytest.mark.parametrize(("script", "sent", "code"), [(SLEEP, signal.SIGTERM, 143), (STUBBORN, signal.SIGINT, 5)])
def test_a_run_that_the_user_stops_is_not_restarted(tmp_path: Path, script: str, sent: int, code: int) -> None:
    """SIGTERM ends the ranks; ctrl-C while a failed attempt is being stopped ends it now."""
    with Launch(tmp_path, script, "--max-restarts", "3") as run:
        run.wait_for("up", times=2)
        if sent == signal.SIGINT:
            (tmp_path / "fail").touch()
            run.wait_for("SIGKILL in 30 s", "err")
        run.signal(sent)
        assert run.wait() == code
        assert run.view().attempt == 1
        assert run.view().state == "failed"
        assert "attempt 2" not in run.text["err"]


def test_a_function_is_called_again_in_a_new_process_group(tmp_path: Path) -> None:
    """Rank 0, which notices the end of rank 1 first, is not blamed."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "again.py").write_text("""
import os, signal, sys
import torch
import torch.distributed as dist
from examples import function_target

def main(*args):
    dist.barrier()
    if dist.get_rank() == 1:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0":
            sys.exit(0)
        if attempt == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000))
    function_target.main()
""")
    with Launch(tmp_path, "", "--max-restarts", "2", "jobs.again:main", torch=True) as run:
        assert run.wait(120) == 0
        assert "2 ranks, the sum of their numbers is 1" in run.text["out"]
        assert run.view().state == "done"
        assert [(v.attempt, v.kind, v.rank) for v in run.view().verdicts] == [(1, "exit", 1), (2, "signal", 1)]
        assert "attempt 1 of 3: exit code 1" in run.text["err"]
        assert "attempt 2 of 3: exit code 137" in run.text["err"]
        assert re.search(
            r"^gpuboard: rank 1 \(\S+:1\) ended with exit code 0 in the middle of training; rank 0 lost the connection "
            rf"to it; sys\.exit\(\) was called at {tmp_path}/jobs/again\.py:12 in main$",
            run.text["err"],
            re.MULTILINE,
        ), run.text["err"]
