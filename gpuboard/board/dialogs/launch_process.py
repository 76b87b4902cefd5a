"""Runs started from the board: each a ``gpuboard launch`` in a session of its own. No textual.

With ``keep`` the run survives the board. Without it the launch has the reading end of a pipe (its lifeline) whose other
end the board holds: however the board ends, the launch reads end of file and ends the run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import gpuboard
from gpuboard import paths
from gpuboard.cluster.inventory.file import VARIABLE, write_nodes
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.launch import environ
from gpuboard.launch.runs.folder import new_run_id
from gpuboard.launch.runs.index import Runbook, RunEntry
from gpuboard.launch.target import Target, parse_target
from gpuboard.model.text import clean

# Variables of a lease in whose shell the board runs: a launch uses the GPUs from the dialog instead.
_OF_A_LEASE = ("GPUBOARD_LEASE", "GPUBOARD_RANK_MAP", "GPUBOARD_RUN", "CUDA_VISIBLE_DEVICES")
_OLD_S = 30 * 86400.0  # then left-over files of launches that survived their board are removed
_NO_PYTHON = "--no-python"
_BEFORE = {"module": ["-m"], "program": [_NO_PYTHON]}  # before a target of this kind
_LINES = 8  # of the last output: longer than any of our error messages
_TEXT_MOST = 64 << 10  # characters of a field: shlex takes 8 s for a pasted MB, at each look at it
_MEANS = {
    3: "this cluster can never satisfy the request",
    4: "not free now",
    5: "no such lease",
    6: "no node could be reached",
}


class LaunchForm(msgspec.Struct, frozen=True):
    """The values of the launch dialog. GPUs: ``gpus`` as for ``--gpus``, else ``lease``, else the best ``n``."""

    command: str  # TARGET and ARGS as in a shell
    folder: str
    gpus: str = ""
    lease: str | None = None
    n: int | None = None
    model: str = ""
    nodes: tuple[str, ...] = ()  # candidates; (): all
    device: str = "cuda"
    python: str = ""
    variables: str = ""  # K=V K2=V2 as in a shell
    grace: str = "30s"
    restarts: str = "0"  # at most, after failures
    least: str = ""  # ranks after a restart; "": as many as at first
    for_s: str = ""  # duration of the reservation, if one is made
    keep: bool = True  # the run survives the board


def target_of(command: str) -> Target:
    """Return the target and arguments of a command line, in which --no-python may come first. Raises UsageError."""
    words = _words(command, "the command")
    program = words[:1] == [_NO_PYTHON]
    return parse_target(words[program:], program=program)


def check_command(command: str) -> str:
    """Return the error in a command line or ""."""
    try:
        target_of(command)
    except UsageError as error:
        return str(error).partition(";")[0] if command.strip() else "train.py or -m module"
    return ""


class FileProblems(msgspec.Struct, frozen=True):
    """Errors about the files that a command line needs in a folder; "" for none."""

    command: str  # as typed
    folder: str
    no_script: str = ""
    no_folder: str = ""


def check_files(command: str, folder: str) -> FileProblems:
    """Check the files that a valid command line needs. Blocks if the folder's file system hangs."""
    place = absolute(folder)
    if not os.path.isdir(place):
        return FileProblems(command, folder, no_folder="no such folder")
    target = target_of(command)
    name = os.path.expanduser(target.name)
    # A program without a folder in its name is looked up on the nodes' PATH.
    named = target.kind == "script" or (target.kind == "program" and "/" in name)
    there = not named or os.path.isfile(os.path.join(place, name))
    where = "" if os.path.isabs(name) else " in that folder"
    return FileProblems(command, folder, no_script="" if there else f"no file {clean(target.name)}{where}")


def check_variables(text: str) -> str:
    """Return the error in ``K=V K2=V2`` or ""."""
    try:
        environ.sent({}, [word if "=" in word else f"{word}=" for word in _words(text, "the variables")])
    except UsageError as error:
        return str(error).removeprefix("--env ").partition(";")[0]
    return ""


def absolute(folder: str) -> str:
    """Return the absolute path of a folder as typed; ``~`` is home."""
    return os.path.abspath(os.path.expanduser(folder))


def arguments(form: LaunchForm) -> list[str]:
    """Return the arguments of ``gpuboard launch`` for a form. Raises UsageError."""
    target = target_of(form.command)
    words = []
    if form.gpus:
        words += ["--gpus", form.gpus]
    elif form.lease is not None:
        words += ["--lease", form.lease]
    else:
        words += ["--n", str(form.n)] + (["--model", form.model] if form.model else [])
    if form.lease is None and form.for_s:
        words += ["--for", form.for_s]
    words += ["--device", form.device, "--grace", form.grace]
    if form.restarts != "0":
        words += ["--max-restarts", form.restarts] + (["--min-n", form.least] if form.least else [])
    words += ["--python", os.path.expanduser(form.python)] if form.python else []
    for variable in _words(form.variables, "the variables"):
        words += ["--env", variable]
    name = os.path.expanduser(target.name) if target.kind in {"script", "program"} else target.name
    return [*words, *_BEFORE.get(target.kind, ()), name, *target.args]


def _words(text: str, what: str) -> list[str]:
    if len(text) > _TEXT_MOST:
        raise UsageError(f"{what}: longer than {_TEXT_MOST >> 10} KiB")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what}: {str(error).lower()}") from None


class StartedRun:
    """One ``gpuboard launch`` process of this board."""

    def __init__(self, run: str, form: LaunchForm, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.run = run
        self.form = form
        self.process = process
        self.awaited = False  # a dialog waits for the run and reports its failure
        self.cancelled = False  # the user cancelled it
        self._folder = folder

    @property
    def over(self) -> bool:
        """Whether the process has ended; it releases its reservation before it ends."""
        return self.process.poll() is not None

    @property
    def messages(self) -> list[str]:
        """Its last lines on stderr, from before its run's folder was created or after the run's end."""
        try:
            with self._file("stderr").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                text = file.read(16384).decode("utf-8", "replace")
        except OSError:
            return []
        lines = [clean(line).removeprefix("gpuboard: ") for line in text.splitlines()]
        return [line for line in lines if line.strip()][-_LINES:]

    def failure(self) -> str:
        """Return why it ended without a run."""
        from gpuboard.launch.causes.exits import signal_name  # late: it is rarely needed

        code = self.process.returncode
        words = "\n".join(self.messages)
        if code is not None and code < 0:
            return f"{words}\ngpuboard launch was killed by {signal_name(-code)}".strip()
        return words or f"gpuboard launch ended with exit code {code}: {_MEANS.get(code, 'no message')}"

    def cancel(self) -> None:
        """Interrupt it; it releases its reservation."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def clear(self) -> None:
        """Remove its files; the run's own folder stays. Those that cannot be removed are swept later."""
        for name in ("stderr", "nodes"):
            with contextlib.suppress(OSError):
                self._file(name).unlink()

    def _file(self, name: str) -> Path:
        return self._folder / f"{self.run}.{name}"


class Starter:
    """Starts runs and follows them until they end."""

    def __init__(self, nodes: Sequence[Node], env: Mapping[str, str]) -> None:
        self._nodes = list(nodes)
        self._env = env
        self._folder = paths.state_dir(env) / "board"
        self._lines: dict[str, int] = {}  # run → our end of its lifeline
        self.started: list[StartedRun] = []
        self.last: LaunchForm | None = None
        self.here = _here(env)

    @property
    def simulated(self) -> bool:
        """Whether the nodes are simulated: their GPUs cannot compute."""
        return any(node.simulate is not None for node in self._nodes)

    def start(self, form: LaunchForm) -> StartedRun:
        """Start a run; returns at once. Raises GpuboardError."""
        run = new_run_id()
        folder = absolute(form.folder)
        words = ["--run-id", run, *arguments(form)]
        words = ["--nodes", self._scope(form.nodes), *words]
        env = self._environment(folder)
        try:
            paths.make_private(self._folder)
            self._sweep()
            if self.simulated:
                env[VARIABLE] = str(self._folder / f"{run}.nodes")
                write_nodes(Path(env[VARIABLE]), self._nodes)
            stderr = os.open(self._folder / f"{run}.stderr", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise GpuboardError(f"cannot write to {self._folder}: {error.strerror}") from error
        theirs: int | None = None
        try:
            if not form.keep:
                theirs, self._lines[run] = os.pipe()
                words = ["--life-line", str(theirs), *words]
            process = subprocess.Popen(
                [*command(), "launch", *words],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                pass_fds=() if theirs is None else (theirs,),
            )
        except OSError as error:
            self._cut(run)
            raise GpuboardError(f"cannot start gpuboard launch in {folder}: {error.strerror}") from error
        finally:
            os.close(stderr)
            if theirs is not None:
                os.close(theirs)
        self.last = form
        started = StartedRun(run, form, process, self._folder)
        self.started.append(started)
        return started

    def look(self, book: Runbook) -> list[tuple[StartedRun, RunEntry | None]]:
        """Return the processes whose end has not been returned yet, each with its run or None.

        An ended process is returned once more; the caller reports it and then calls its ``clear``.
        """
        found = []
        for started in list(self.started):
            over = started.over  # before reading the run, whose final state is written before the process ends
            found.append((started, book.one(started.run)))
            if over:
                self.started.remove(started)
                self._cut(started.run)
        return found

    def close(self) -> None:
        """Close the lifelines: runs without ``keep`` end themselves."""
        for run in list(self._lines):
            self._cut(run)

    def _cut(self, run: str) -> None:
        line = self._lines.pop(run, None)
        if line is not None:
            os.close(line)

    def _scope(self, names: Sequence[str]) -> str:
        from gpuboard.nodesets import fold  # 30 ms; a thousand names would be 10 kB

        return fold(names or [node.name for node in self._nodes])

    def _environment(self, folder: str) -> dict[str, str]:
        dropped = {*environ.OWN, *_OF_A_LEASE}
        if self._env.get("GPUBOARD_LEASE"):
            dropped.add("GPUBOARD_NODES")  # set by the lease, not by the user
        env = {name: value for name, value in self._env.items() if name not in dropped}
        if config := env.get("GPUBOARD_CONFIG"):
            env["GPUBOARD_CONFIG"] = os.path.abspath(config)
        return env | {"PWD": folder}

    def _sweep(self) -> None:
        for path in self._folder.glob("r*.*"):
            with contextlib.suppress(OSError):
                if path.suffix in {".stderr", ".nodes"} and time.time() - path.stat().st_mtime > _OLD_S:
                    path.unlink()


def _here(env: Mapping[str, str]) -> str:
    """Return the folder in which the board was started, by the shell's name for it."""
    named = env.get("PWD", "")
    try:
        return named if named.startswith("/") and os.path.samefile(named, ".") else os.getcwd()
    except OSError:
        return env.get("HOME", "/")


def command() -> list[str]:
    """Return the command that starts this gpuboard; Python files in its folder cannot shadow modules."""
    code = "import sys; sys.path.append(sys.argv.pop(1)); from gpuboard.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code, str(Path(gpuboard.__file__).parents[1])]
