"""The folders of runs: their files, how to find a run, and whether its head still runs.

``<state>/runs/<run>/``: plan.json, rank_map.json, state.json, rank-<R>.out, rank-<R>.err, head.log, control.sock.
Old ones are deleted by ``prune``, which every launch calls.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from gpuboard import files, paths
from gpuboard.agent import proc
from gpuboard.agent.runs.files import alive as head_alive
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.keeper import holder
from gpuboard.launch.stalls.waits import RankGroup
from gpuboard.model.decoding import from_json
from gpuboard.model.text import clean
from gpuboard.model.units import seconds_of

if TYPE_CHECKING:
    RunState = Literal["preflight", "starting", "running", "stalled", "failed", "done", "stopped"]
    RankState = Literal["waiting", "importing", "gate", "running", "failed", "done", "killed", "lost"]
else:  # files are decoded with any state: a newer gpuboard may have written them
    RunState = RankState = str
_NODES_LISTED = 4  # more are counted: each takes 8 columns and more of a table
FINAL: frozenset[RunState] = frozenset({"done", "failed", "stopped"})
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without l, o, 0, 1: run ids are read aloud and typed


class RankView(msgspec.Struct, frozen=True):
    """One rank of ``runs --json``."""

    rank: int
    node: str
    local_rank: int
    index: int
    pid: int | None = None
    state: RankState = "waiting"
    last_line: str = ""


class FormerPlace(msgspec.Struct, frozen=True):
    """Where a rank ran until the end of ``attempt``: on another GPU than now, or than in the attempts before.

    ``out``, ``err``: the sizes of its two logs at that time, in bytes.
    """

    rank: int
    node: str
    index: int
    attempt: int
    out: int
    err: int


class VerdictView(msgspec.Struct, frozen=True):
    """A conclusion about a run. ``rank`` and ``node`` are None if it concerns no single one.

    ``kind``: one of ``failure.FailureKind`` or ``verdict.StallKind``, or slow, preflight, head-died, unreadable.
    ``groups``: what the ranks did when a stall was found.
    """

    at: str
    kind: str
    rank: int | None
    node: str | None
    text: str
    evidence: str = ""
    groups: list[RankGroup] = []
    attempt: int = 1  # of the run, which --max-restarts starts again


class HeadProcess(msgspec.Struct, frozen=True):
    """The process that leads a run, identified by host, boot, pid and start time (clock ticks since boot).

    ``namespace``, ``machine``: of its host, which may be renamed; "" in files of older versions.
    """

    host: str
    boot_id: str
    pid: int
    start: int
    namespace: str = ""
    machine: str = ""


class RunView(msgspec.Struct, frozen=True):
    """One run of ``runs --json``."""

    id: str
    lease: str | None
    target: str
    started: str
    state: RunState
    exit_code: int | None
    ranks: list[RankView]
    verdicts: list[VerdictView]
    head: HeadProcess
    folder: str = ""
    node: str | None = None  # the node on which it was read; None: this host
    attempt: int = 1
    former: list[FormerPlace] = []  # oldest first; empty: no restart has used other GPUs

    @property
    def last_places(self) -> dict[int, str]:
        """Where each rank of any attempt ran last, as ``gpu02:1``; by rank."""
        former = {place.rank: f"{place.node}:{place.index}" for place in self.former}
        found = former | {rank.rank: f"{rank.node}:{rank.index}" for rank in self.ranks}
        return dict(sorted(found.items()))

    @property
    def newest(self) -> list[VerdictView]:
        """The verdicts of the newest attempt that has any."""
        last = max((verdict.attempt for verdict in self.verdicts), default=0)
        return [verdict for verdict in self.verdicts if verdict.attempt == last]


class RunList(msgspec.Struct, frozen=True):
    """The output of ``runs --json``. ``failed``: why nodes that were asked gave no answer, by name."""

    schema: int
    runs: list[RunView]
    failed: dict[str, str] = {}


def new_run_id() -> str:
    """Return a new run id: r and seven letters or digits."""
    import secrets  # late: it loads OpenSSL, and readers of runs need no new id

    return "r" + "".join(secrets.choice(_ALPHABET) for _ in range(7))


def runs_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of this user's runs."""
    return paths.state_dir(env) / "runs"


def this_head() -> HeadProcess:
    """Return this process as a head."""
    me = holder.identify(os.getpid())
    assert me is not None  # it is this process
    return HeadProcess(*me, proc.pid_namespace(), proc.machine_id())


def alive(head: HeadProcess, folder: str = "") -> bool | None:
    """Return whether the head runs; None if it is on another host, also one that is a container of this machine.

    ``folder``: the run's, if the head wrote it.
    """
    return head_alive(msgspec.to_builtins(head), folder)


class RunFolder:
    """The folder of one run, written by its head only."""

    def __init__(self, env: Mapping[str, str], run: str) -> None:
        """Create the folder. Raises GpuboardError."""
        self.path = runs_dir(env) / run
        try:
            str(self.path).encode()
        except UnicodeEncodeError:  # the run's state has it, and JSON cannot represent it
            raise GpuboardError(
                f"{self.path}: the path is not UTF-8; set XDG_STATE_HOME to a folder whose path is"
            ) from None
        try:
            paths.make_private(self.path.parent)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise GpuboardError(
                f"{self.path}: cannot create the run's folder: {error.strerror}; "
                "set XDG_STATE_HOME to a folder that you can write to"
            ) from error

    def keep(self, name: str, value: object) -> str | None:
        """Write ``value`` as JSON; return a message if that fails. A full disk must not end a run."""
        try:
            files.write_private(self.path / name, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        except OSError as error:
            return incomplete(self.path / name, error)
        return None

    def log(self, lines: Iterable[str]) -> None:
        """Append to head.log; errors are ignored: the user has seen these lines, and a full disk must not end a run."""
        with contextlib.suppress(OSError), (self.path / "head.log").open("a", encoding="utf-8") as file:
            file.writelines(lines)


def note(env: Mapping[str, str], view: RunView) -> None:
    """Keep in this host's list a run whose folder is on the node ``view.node``; nothing where a shared home has it.

    Errors are ignored: the run is found with --node.
    """
    folder = runs_dir(env) / view.id
    with contextlib.suppress(OSError):
        paths.make_private(folder.parent)
        known = read_state(folder) if folder.exists() else None
        if known is None:
            folder.mkdir(mode=0o700)
        if known is None or known.node is not None:
            files.write_private(folder / "state.json", msgspec.json.encode(view) + b"\n")


def prune(env: Mapping[str, str], max_age_s: float, max_size: int) -> None:
    """Delete runs that ended more than ``max_age_s`` ago, then the oldest until all have at most ``max_size`` bytes.

    Never a run that may still be in progress. Errors are ignored: the next launch tries again.
    """
    import shutil  # late: only the head of a run deletes old ones

    ended: list[tuple[float, int, Path]] = []
    total = 0
    with contextlib.suppress(OSError):
        for folder in [Path(entry) for entry in os.scandir(runs_dir(env)) if entry.is_dir(follow_symlinks=False)]:
            with contextlib.suppress(OSError):
                size = sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(folder))
                total += size
                view = read_run(folder)
                readable = view is not None and not any(verdict.kind == "unreadable" for verdict in view.verdicts)
                if view is not None and readable and view.state in FINAL:
                    ended.append(((folder / "state.json").stat().st_mtime, size, folder))
    for at, size, folder in sorted(ended):
        if time.time() - at > max_age_s or total > max_size:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def incomplete(file: Path, error: OSError) -> str:
    """Return the message for a file of a run that cannot be written."""
    return f"logs are incomplete: {file}: {error.strerror}; `gpuboard runs` may show an outdated state"


def read_runs(env: Mapping[str, str]) -> list[RunView]:
    """Return all runs of this user, oldest first. One whose head has died is ``failed``, with a verdict."""
    try:
        folders = [entry for entry in runs_dir(env).iterdir() if entry.is_dir()]
    except OSError:
        return []
    found = [read_run(folder) for folder in folders]
    return sorted((view for view in found if view is not None), key=lambda view: (view.started, view.id))


def by_lease(views: Iterable[RunView]) -> dict[str, RunView]:
    """Return the runs in progress by the lease that they use."""
    return {view.lease: view for view in views if view.lease is not None and view.state not in FINAL}


def lived_s(view: RunView, until: float) -> float | None:
    """Return the seconds from a run's start to ``until`` (epoch seconds); None if its state cannot be read."""
    try:
        return max(0.0, until - seconds_of(view.started))
    except ValueError:
        return None


def places(view: RunView) -> str:
    """Return where the ranks are: ``8: gpu01 5, gpu02 3``, of many nodes ``512: gpu01 to gpu64, 64 nodes``."""
    counts = Counter(rank.node for rank in view.ranks)
    if len(counts) > _NODES_LISTED:
        first, *_, last = counts
        return f"{len(view.ranks)}: {clean(first)} to {clean(last)}, {len(counts)} nodes"
    words = ", ".join(f"{clean(node)} {count}" if len(counts) > 1 else clean(node) for node, count in counts.items())
    return f"{len(view.ranks)}: {words}" if view.ranks else "?"


def read_run(folder: Path) -> RunView | None:
    """Return the run of ``folder`` as ``read_runs`` does; None before its head first writes its state."""
    view = read_state(folder)
    return None if view is None else judged(view)


def read_state(folder: Path) -> RunView | None:
    """Return the run as its head last wrote it; None before the first time. An unreadable one is ``failed``."""
    try:
        view = from_json((folder / "state.json").read_bytes(), RunView)
    except FileNotFoundError:
        return None  # the folder is new
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return unreadable(folder, f"cannot read {folder / 'state.json'}: {error}")
    return msgspec.structs.replace(view, id=folder.name, folder=str(folder))


def unreadable(folder: Path, text: str) -> RunView:
    """Return the run of ``folder``, whose state cannot be read, as ``failed``; ``text``: why."""
    verdicts = [VerdictView("", "unreadable", None, None, text)]
    unknown = HeadProcess("", "", 0, 0)
    return RunView(folder.name, None, "?", "", "failed", None, [], verdicts, head=unknown, folder=str(folder))


def judged(view: RunView) -> RunView:
    """Return ``view``, or ``failed`` with a verdict if its head died before the run ended."""
    if view.state in FINAL or alive(view.head, "" if view.node is not None else view.folder) is not False:
        return view
    last = read_state(Path(view.folder))  # the run may have ended since it was read
    return last if last is not None and last.state in FINAL else without_head(view)


def without_head(view: RunView, text: str = "") -> RunView:
    """Return a run whose head died before the run ended: ``failed``, with a verdict. ``text``: what is known of it."""
    where = f"pid {view.head.pid} on {view.head.host}"
    text = text or f"`gpuboard launch` ({where}) died before the run ended; its ranks ended with it"
    died = VerdictView("", "head-died", None, view.head.host, text, attempt=view.attempt)
    return msgspec.structs.replace(view, state="failed", verdicts=[*view.verdicts, died])


def find_run(env: Mapping[str, str], name: str) -> RunView:
    """Return the run of ``name``: an id, the start of one, or ``last``. Raises UsageError unless one run matches."""
    return matching_run(read_runs(env), name, str(runs_dir(env)))


def matching_run(views: Sequence[RunView], name: str, where: str) -> RunView:
    """Return the run of ``name`` among ``views``, the oldest first, which were read in ``where``. Raises UsageError."""
    if not views:
        wanted = "" if name == "last" else f"no run {name!r}: "
        raise UsageError(f"{wanted}there are no runs in {where}; `gpuboard runs --all-nodes` asks all nodes")
    if name == "last":
        return views[-1]
    if not re.fullmatch(r"[a-z0-9]+", name):
        raise UsageError(f"{name!r} is not a run id; `gpuboard runs` lists the ids")
    hits = [view for view in views if view.id == name] or [view for view in views if view.id.startswith(name)]
    if len(hits) != 1:
        ids = ", ".join(view.id for view in (hits or views)[-5:])
        if hits:
            raise UsageError(f"run {name!r} is ambiguous: {ids}")
        raise UsageError(f"no run {name!r}; recent runs: {ids}; `gpuboard runs --all-nodes` asks all nodes")
    return hits[0]
