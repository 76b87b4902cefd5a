"""The holder of a lease, in the shells and environments that people use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.errors import UsageError
from gpuboard.keeper import holder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STUB = f"{sys.executable} {Path(__file__).with_name('holder_stub.py')}"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "STUB": STUB}


def need(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"no {program} here")
    return found


def output(*command: str, cwd: Path | None = None) -> list[str]:
    """Run a command and return its output."""
    done = subprocess.run(command, env=ENV, text=True, capture_output=True, timeout=60, check=True, cwd=cwd)
    return done.stdout.split()


SHELLS = {
    "bash": ("bash", 'eval "set -- $($STUB)"; echo $$ $1 $2', "shell"),
    "dash": ("dash", "x=$($STUB); echo $$ $x", "shell"),
    "zsh": ("zsh", "x=$(${=STUB}); echo $$ $x", "shell"),
    "fish": ("fish", "set x (eval $STUB); echo $fish_pid $x", "fish"),
    "fish | source": ("fish", "eval $STUB | read -l pid kind; echo $fish_pid $pid $kind", "fish"),
    "tcsh": ("tcsh", "set x = `eval $STUB`; echo $$ $x", "csh"),
}


@pytest.mark.parametrize("name", SHELLS)
def test_script_of_each_shell(name: str, tmp_path: Path) -> None:
    shell, text, kind = SHELLS[name]
    script = tmp_path / "job"
    script.write_text(text + "\n")
    pid, *found = output(need(shell), str(script))
    assert found == [pid, kind]


IN_BASH = {
    "a folder changed": "x=$(cd /tmp; $STUB)",
    "env": "x=$(env A=b $STUB)",
    "timeout": "x=$(timeout 20 $STUB)",
    "both, in a group": "x=$( { cd /tmp && timeout 20 env A=b $STUB; } )",
    "a consumer": f"x=$($STUB | {sys.executable} -c 'print(input())')",
    "a filter": "x=$($STUB | tee /dev/null)",
    "two filters": "x=$($STUB | cat | sed s/a/a/)",
    "a function": "f() { $STUB | cat; true; }; x=$(f)",
    "a function that captures": 'f() { local y=$($STUB); echo "$y"; }; x=$(f)',
    "a process substitution": "read -r x < <($STUB; true)",
    "a here string": "read -r x <<< $($STUB)",
    "a file": "$STUB > out; x=$(<out)",
    "a file, from a subshell": "( $STUB > out; true ); x=$(<out)",
    "a file, under timeout": "timeout 20 $STUB > out; x=$(<out)",
    "a file, through tee": "{ until pgrep -xP $$ tee >&2; do :; done; exec $STUB; } | tee out > /dev/null; x=$(<out)",
    "stderr beside it": "x=$($STUB 2>&1)",
}


@pytest.mark.parametrize("name", IN_BASH)
def test_ways_to_write_it_in_a_script(name: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(IN_BASH[name] + "\necho $$ $x\n")
    pid, *found = output("bash", str(script), cwd=tmp_path)
    assert found == [pid, "shell"]


def test_subshell_that_uses_it_is_the_holder() -> None:
    mine, pid, _ = output("bash", "-c", "( x=$($STUB); echo $BASHPID $x ); true")
    assert pid == mine


# A reader that has not started yet cannot be found.
ONCE_READ = "{ until [ -e up ]; do sleep 0.02; done; exec $STUB; }"


def test_loop_that_reads_it_is_the_holder(tmp_path: Path) -> None:
    loop = "{ : > up; while read -r pid kind; do echo $BASHPID $pid; done; }"
    mine, pid = output("bash", "-c", f"{ONCE_READ} | {loop}; true", cwd=tmp_path)
    assert pid == mine


def test_consumer_in_a_pipeline_is_the_holder(tmp_path: Path) -> None:
    reader = f'{sys.executable} -c \'import os; open("up", "w"); print(os.getpid(), input())\''
    mine, pid, _ = output("bash", "-c", f"{ONCE_READ} | {reader}; true", cwd=tmp_path)
    assert pid == mine


def test_script_in_a_pipeline(tmp_path: Path) -> None:
    """Its process group's leader has ended."""
    script = tmp_path / "job.sh"
    script.write_text("sleep 0.2; x=$($STUB); echo $$ $x\n")
    pid, *found = output("bash", "-c", f"true | bash {script}")
    assert found == [pid, "shell"]


def test_xargs(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("x=$($STUB); echo $$ $x\n")
    pid, *found = output("bash", "-c", f"echo {script} | xargs bash")
    assert found == [pid, "shell"]


def test_make(tmp_path: Path) -> None:
    makefile = "all:\n\t@x=$$($(STUB)); echo $$$$ $$x\nshell:\n\t@echo $$PPID $(shell $(STUB))\n"
    (tmp_path / "Makefile").write_text(makefile)
    recipe, *found = output(need("make"), "-s", "all", cwd=tmp_path)
    assert found == [recipe, "shell"]
    itself, pid, _ = output(need("make"), "-s", "shell", cwd=tmp_path)
    assert pid == itself


def test_cron(tmp_path: Path) -> None:
    """A job of a real cron, with a crontab, a passwd and a spool that only its mount namespace sees."""
    cron = need("cron")
    if os.geteuid() != 0:
        pytest.skip("cron needs root")
    script, out, spool = tmp_path / "job.sh", tmp_path / "out", tmp_path / "cron.d"
    script.write_text(f"x=$($STUB); echo $$ $x $(tty) > {out}.new; mv {out}.new {out}; sleep 30\n")
    spool.mkdir()
    setting = f"PYTHONPATH={ROOT}\nSTUB={STUB}\nPATH={os.environ['PATH']}\n"
    (spool / "job").write_text(f"{setting}@reboot root bash {script}\n")
    hide = f"mount --bind {spool} /etc/cron.d && mount --bind /dev/null /etc/crontab && mount -t tmpfs none /run"
    inside = f"{hide} && mount -t tmpfs none /var/spool/cron && mkdir /var/spool/cron/crontabs && exec {cron} -f"
    daemon = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside],
        start_new_session=True,
    )
    try:
        until(out.exists, "cron runs the job")
        pid, *found = out.read_text().split()
        assert found == [pid, "shell", "not", "a", "tty"]
    finally:
        daemon.kill()
        daemon.wait()


def test_interactive_bash_in_tmux(tmp_path: Path) -> None:
    socket, out = tmp_path / "tmux", tmp_path / "out"
    tmux = [need("tmux"), "-S", str(socket), "-f", "/dev/null"]
    subprocess.run([*tmux, "new-session", "-d", "bash --norc"], env=ENV, check=True)
    try:
        line = f'eval "set -- $($STUB)"; echo $$ $1 $2 > {out}.new; mv {out}.new {out}'
        subprocess.run([*tmux, "send-keys", line, "Enter"], env=ENV, check=True)
        until(out.exists, "the shell in tmux answers")
        pid, *found = out.read_text().split()
        assert found == [pid, "shell"]
    finally:
        subprocess.run([*tmux, "kill-server"], env=ENV, check=True)


def test_notebook_kernel() -> None:
    """A Python process that runs the command, as `!gpuboard …` or subprocess does, and itself as ``--holder``."""
    code = (
        "import json, os, subprocess; from gpuboard.keeper import holder; "
        "out = subprocess.run(os.environ['STUB'].split(), stdout=subprocess.PIPE, text=True).stdout; "
        "print(json.dumps([os.getpid(), int(out.split()[0]), holder.find_holder(os.getpid()).pid]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, text=True, capture_output=True, check=True)
    own, ran, named = json.loads(done.stdout)
    assert (ran, named) == (own, own)


def test_parent_that_has_ended(tmp_path: Path) -> None:
    """Adopted by init, and no pipe: there is no process to hold the lease."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root")
    init, out = tmp_path / "init", tmp_path / "out"
    shutil.copy(need("bash"), init)
    wait = "while read -r _ _ _ parent _ < /proc/$BASHPID/stat; [ $parent != 1 ]; do sleep 0.02; done"
    orphan = f"{{ {wait}; exec $STUB > {out} 2>&1; }} &"
    alone = "p=(/proc/[0-9]*); [ ${#p[@]} = 1 ]"
    script = f"bash -c '{orphan}'; until [ -s {out} ] && {{ {alone}; }}; do sleep 0.05; done"
    subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", init, "-c", script], env=ENV, timeout=60, check=True)
    assert "no holder for the lease: the process that started gpuboard has ended" in out.read_text()


def test_holder_that_does_not_exist() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with pytest.raises(UsageError, match=f"--holder {dead.pid}: no such process"):
        holder.find_holder(dead.pid)
