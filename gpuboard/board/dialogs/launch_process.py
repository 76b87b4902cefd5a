"""Runs started from the board: each a ``gpuboard launch`` in a session of its own. No textual.

One that is kept goes on when the board is closed or dies. One that is not holds the reading end of a pipe whose other
end the board keeps: however the board ends, the launch reads the end of the file and ends the run.
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
from gpuboard.launch.run_folder import new_run_id
from gpuboard.launch.run_index import Runbook, RunEntry
from gpuboard.launch.target import Target, parse_target
from gpuboard.model.text import clean

# Of a lease that the board itself was opened in: what is launched takes the GPUs that the dialog says.
_OF_A_LEASE = ("GPUBOARD_LEASE", "GPUBOARD_RANK_MAP", "GPUBOARD_RUN", "CUDA_VISIBLE_DEVICES")
_OLD_S = 30 * 86400.0  # files of launches that outlived their board
_LINES = 8  # of what it said last: more than any error of ours has
_MEANS = {3: "this can never be had here", 4: "not free now", 5: "no such lease", 6: "no node was reached"}


class LaunchForm(msgspec.Struct, frozen=True):
    """What the dialog asks for. GPUs: ``gpus`` as ``--gpus`` takes them, else ``lease``, else the best ``n``."""

    command: str  # TARGET and ARGS as in a shell
    folder: str
    gpus: str = ""
    lease: str | None = None
    n: int | None = None
    model: str = ""
    nodes: tuple[str, ...] = ()  # that can serve; (): all
    device: str = "cuda"
    python: str = ""
    variables: str = ""  # K=V K2=V2 as in a shell
    grace: str = "30s"
    for_s: str = ""  # the longest the reservation may last, when one is made
    keep: bool = True  # goes on when the board is closed


def target_of(command: str) -> Target:
    """Return what a line of shell words means to launch. Raises UsageError."""
    words = _words(command, "the command")
    if words[:1] == ["-m"]:
        return parse_target([], words[1:])
    return parse_target(words, None)


def check_command(command: str) -> str:
    """Return what is wrong with the words of a command line, "" for nothing."""
    try:
        target_of(command)
    except UsageError as error:
        return str(error).partition(";")[0] if command.strip() else "train.py or -m module"
    return ""


class FileProblems(msgspec.Struct, frozen=True):
    """What is wrong with the files that a command line in a folder needs; "" for nothing."""

    command: str  # as typed
    folder: str
    no_script: str = ""
    no_folder: str = ""


def check_files(command: str, folder: str) -> FileProblems:
    """Look at the files that a right command line needs. Blocks as long as the folder's file system does."""
    place = absolute(folder)
    if not os.path.isdir(place):
        return FileProblems(command, folder, no_folder="no such folder")
    target = target_of(command)
    name = os.path.expanduser(target.name)
    there = target.kind != "script" or os.path.isfile(os.path.join(place, name))
    where = "" if os.path.isabs(name) else " in that folder"
    return FileProblems(command, folder, no_script="" if there else f"no file {clean(target.name)}{where}")


def check_variables(text: str) -> str:
    """Return what is wrong with ``K=V K2=V2``, "" for nothing."""
    try:
        environ.sent({}, [word if "=" in word else f"{word}=" for word in _words(text, "the variables")])
    except UsageError as error:
        return str(error).removeprefix("--env ").partition(";")[0]
    return ""


def absolute(folder: str) -> str:
    """Return a folder as typed as an absolute path; ``~`` is home."""
    return os.path.abspath(os.path.expanduser(folder))


def arguments(form: LaunchForm) -> list[str]:
    """Return the words of ``gpuboard launch`` for a form. Raises UsageError."""
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
    words += ["--python", os.path.expanduser(form.python)] if form.python else []
    for variable in _words(form.variables, "the variables"):
        words += ["--env", variable]
    name = os.path.expanduser(target.name) if target.kind == "script" else target.name
    return [*words, *(["-m"] if target.kind == "module" else []), name, *target.args]


def _words(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what}: {str(error).lower()}") from None


class StartedRun:
    """One ``gpuboard launch`` that this board has started."""

    def __init__(self, run: str, form: LaunchForm, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.run = run
        self.form = form
        self.process = process
        self.awaited = False  # a dialog waits for the run, or shows why there is none
        self.given_up = False  # nobody wants it any more
        self._folder = folder

    @property
    def over(self) -> bool:
        """Whether the process has ended; it has given back by then what it had reserved."""
        return self.process.poll() is not None

    @property
    def said(self) -> list[str]:
        """The last lines that it wrote for people, before its run's folder was there or after the run's end."""
        try:
            with self._file("stderr").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                text = file.read(16384).decode("utf-8", "replace")
        except OSError:
            return []
        lines = [clean(line).removeprefix("gpuboard: ") for line in text.splitlines()]
        return [line for line in lines if line.strip()][-_LINES:]

    def failure(self) -> str:
        """Return in words why it ended without a run."""
        code = self.process.returncode
        words = "\n".join(self.said)
        if code is not None and code < 0:
            return f"{words}\ngpuboard launch was killed by {signal.Signals(-code).name}".strip()
        return words or f"gpuboard launch ended with exit code {code}: {_MEANS.get(code, 'it said nothing')}"

    def cancel(self) -> None:
        """End it as ctrl-C would: nothing stays reserved."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def clear(self) -> None:
        """Remove its files; the run's own folder stays."""
        for name in ("stderr", "nodes"):
            self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{self.run}.{name}"


class Starter:
    """Starts runs and follows them until they have ended."""

    def __init__(self, nodes: Sequence[Node], env: Mapping[str, str]) -> None:
        self._nodes = list(nodes)
        self._env = env
        self._folder = paths.state_dir(env) / "board"
        self._lines: dict[str, int] = {}  # run → our end of its life line
        self.started: list[StartedRun] = []
        self.last: LaunchForm | None = None
        self.here = _here(env)

    @property
    def simulated(self) -> bool:
        """Whether the nodes are invented: their GPUs cannot compute."""
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
            raise GpuboardError(f"{self._folder}: cannot be written to: {error.strerror}") from error
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
            raise GpuboardError(f"gpuboard launch cannot be started in {folder}: {error.strerror}") from error
        finally:
            os.close(stderr)
            if theirs is not None:
                os.close(theirs)
        self.last = form
        started = StartedRun(run, form, process, self._folder)
        self.started.append(started)
        return started

    def look(self, book: Runbook) -> list[tuple[StartedRun, RunEntry | None]]:
        """Return what was started and has not been seen to its end, each with its run as far as there is one.

        What has ended is returned for the last time; whoever has told people of it clears it away.
        """
        found = []
        for started in list(self.started):
            over = started.over  # before looking at the run: it writes its last state before it ends
            found.append((started, book.one(started.run)))
            if over:
                self.started.remove(started)
                self._cut(started.run)
        return found

    def close(self) -> None:
        """Let go of what is not to outlive the board; it ends by itself."""
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
            dropped.add("GPUBOARD_NODES")  # it describes the lease, not the settings
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
    """Return the folder that the board was started in, as the shell names it."""
    named = env.get("PWD", "")
    try:
        return named if named.startswith("/") and os.path.samefile(named, ".") else os.getcwd()
    except OSError:
        return env.get("HOME", "/")


def command() -> list[str]:
    """Return the words that start gpuboard as it runs now, whatever Python files lie in the folder it is started in."""
    code = "import sys; sys.path.append(sys.argv.pop(1)); from gpuboard.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code, str(Path(gpuboard.__file__).parents[1])]
