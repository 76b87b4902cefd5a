"""One command run to its end or its timeout: its result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpuboard.transport import command as module
from gpuboard.transport.command import Command, run
from tests.agent import still_there
from tests.interrupts import interrupted
from tests.kernel import Under, on_each_kernel
from tests.waiting import until


def sh(script: str, timeout_s: float = 20.0, **more: object) -> tuple[int | None, str, str, bool, bool]:
    ran = run(["/bin/sh", "-c", script], os.environ, timeout_s, **more)  # type: ignore[arg-type]
    assert 0 <= ran.took_s < 20
    return ran.code, ran.out, ran.err, ran.ended, ran.ok


def test_output_and_exit_code() -> None:
    assert sh("echo out; echo err >&2") == (0, "out\n", "err\n", True, True)
    assert sh("cat; exit 3", data=b"x" * 200_000) == (3, "x" * 200_000, "", True, False)
    assert sh("kill -9 $$") == (-9, "", "", True, False)


def test_after_the_timeout_its_process_group_is_killed_and_its_output_kept() -> None:
    for timeout_s in (0.5, 5.0, 30.0):  # until it has printed something
        ran = run(["/bin/sh", "-c", "sleep 600 & echo $!; echo waiting >&2; wait"], os.environ, timeout_s)
        if ran.err:
            break
    assert (ran.code, ran.err, ran.ended, ran.ok) == (None, "waiting\n", False, False)
    until(lambda: not Path(f"/proc/{ran.out.strip()}/cmdline").exists(), "what it started has ended")


def test_one_that_ended_during_a_suspend_keeps_its_result(tmp_path: Path) -> None:
    for learn in (lambda command: command.wait(0.0), Command.kill):
        command = Command(["/bin/sh", "-c", f"echo $$ >{tmp_path}/pid; echo out; exit 3"], os.environ)
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it has written its pid")
        assert still_there([int((tmp_path / "pid").read_text())], 60.0) == []
        ran = learn(command)
        assert ran is not None
        assert (ran.code, ran.out, ran.ended) == (3, "out\n", True)
        (tmp_path / "pid").unlink()


@on_each_kernel
def test_its_end_counts_while_others_keep_its_pipes_open(under: Under) -> None:
    ran = under(lambda: run(["/bin/sh", "-c", "sleep 600 & echo $!; exit 3"], os.environ, 60.0))
    os.kill(int(ran.out), signal.SIGKILL)
    assert (ran.code, ran.ended) == (3, True)


def test_it_ends_when_stopped_is_set() -> None:
    stopped = threading.Event()
    threading.Timer(0.2, stopped.set).start()
    begun = time.monotonic()
    assert sh("sleep 600", 60.0, stopped=stopped) == (None, "", "", False, False)
    assert time.monotonic() - begun < 10


def test_an_interrupt_at_any_point_is_raised_and_nothing_else() -> None:
    """What it had closed already was closed again: the error took the place of the interrupt, and a wait went on."""

    def once() -> None:
        run(["/bin/sh", "-c", "cat; exit 3"], os.environ, 20.0, b"x")

    found = [(at, repr(error)) for at, error in interrupted(module, once) if type(error) is not KeyboardInterrupt]
    assert found == []


def test_a_command_that_was_interrupted_is_waited_for_again() -> None:
    """At any point: how it ended may be unknown then, but a wait returns and a second one returns the same."""
    commands: list[Command] = []

    def once() -> None:
        commands.append(Command(["/bin/sh", "-c", "cat; exit 3"], os.environ, b"x"))
        commands[-1].wait(20.0)

    for at, _ in interrupted(module, once):
        ran = commands[-1].wait(20.0) if commands else None
        assert not commands or ran is not None, at
        assert not commands or commands[-1].wait(0.0) == ran, at
        assert ran is None or ran.code in {3, None}, at


def test_without_an_exit_code_stderr_decides() -> None:
    script = (
        "import os; from gpuboard.transport.command import run\n"
        "for text in ('echo x', 'echo no >&2; exit 1'):\n"
        "    ran = run(['/bin/sh', '-c', text], os.environ, 20); print(ran.code, ran.ended, ran.ok)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None True True\nNone True False\n"
