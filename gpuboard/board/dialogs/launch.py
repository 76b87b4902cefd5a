"""The launch dialog: a target on chosen GPUs, on a lease, or on the best n; it waits until the run exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from gpuboard.board.background import Background
from gpuboard.board.dialogs import request_form
from gpuboard.board.dialogs.base import YES, Dialog, Field, duration, number
from gpuboard.board.dialogs.launch_process import (
    FileProblems,
    LaunchForm,
    StartedRun,
    absolute,
    check_command,
    check_files,
    check_variables,
)
from gpuboard.board.dialogs.planner import Answer, Planner, refused, taken
from gpuboard.board.scene import Scene
from gpuboard.model.lease import Lease
from gpuboard.model.request import Choice, Pick, Request
from gpuboard.model.units import format_duration, is_whole, parse_duration

if TYPE_CHECKING:
    from gpuboard.board.app import BoardApp
    from gpuboard.launch.runs.index import RunEntry

_POLL_S = 0.2
_RESTARTS_MOST = 10**6
_least = number(1, 10**6, needed=False)


def open_launch(board: BoardApp, uuids: Sequence[str] = (), lease: str | None = None) -> None:
    """Open the dialog for these GPUs, or for a lease; without either for the best GPU."""
    scene = board.scene
    if scene is None:
        board.notify("no reading yet; try again in a moment", markup=False)
        return
    if lease is None and uuids:
        lease = _lease_of(uuids, scene)
    words = lease or request_form.picks_of(uuids, scene)[0]
    if len(uuids) == 1 and lease is None and uuids[0] in scene.places and scene.places[uuids[0]].gpu.state != "free":
        words = ""  # the cursor just happens to be there: the user cannot mean a GPU that is not free

    board.open_dialog(LaunchDialog(board, scene, words or "1", uuids), board.open_runs)


def _lease_of(uuids: Sequence[str], scene: Scene) -> str | None:
    """Return our lease on these GPUs: the one on a single GPU, or the one of exactly these."""
    for lease in scene.leases.leases:
        held = {gpu.uuid for gpu in lease.gpus}
        if lease.mine and (held == set(uuids) or (len(uuids) == 1 and uuids[0] in held)):
            return lease.id
    return None


class LaunchDialog(Dialog[str]):
    """Asks what to launch, where and how; its result is the run's id."""

    PREVIEW = 3
    DEFAULT_CSS = """
    LaunchDialog #box { width: 100; }
    LaunchDialog .field Input, LaunchDialog .field Tick { width: 4fr; }
    LaunchDialog .field .note { width: 5fr; max-width: 35; }
    LaunchDialog .field.-text Input { width: 1fr; }
    LaunchDialog .field.-text .note { width: auto; }
    """

    def __init__(self, board: BoardApp, scene: Scene, gpus: str, uuids: Sequence[str]) -> None:
        """``gpus``: the field's default; ``uuids``: its GPUs, if it names GPUs."""
        self._scene = scene
        picks = () if is_whole(gpus) else request_form.picks_of(uuids, scene)[1]
        self._marked: dict[str, Sequence[Pick]] = {gpus: picks} if picks else {}
        starter = board.core.starter
        last = starter.last or LaunchForm("", starter.here, device="cpu" if starter.simulated else "cuda")
        settings = board.core.settings
        most = parse_duration(settings.max_lease)
        hint = "simulated GPUs cannot compute" if starter.simulated else "gloo; GPUs stay unused"
        super().__init__(
            "Launch: one rank per GPU",
            [
                Field("command", "Command", last.command, "", "train.py --lr 3e-4", self._command,
                      text=True),
                Field("gpus", "GPUs", gpus, "a number, gpu01:0,3 or a lease", "2", self._which),
                Field("model", "Model", "", "with a number; empty: any", "H100"),
                Field("folder", "Folder", last.folder, "on every node", "/home/me/project",
                      self._folder),
                Field("python", "Python", last.python, "empty: VIRTUAL_ENV, CONDA, PATH",
                      "/opt/env/bin/python"),
                Field("variables", "Variables", last.variables, "for the ranks", "NCCL_DEBUG=INFO",
                      check_variables),
                Field("cpu", "On the CPU", YES if last.device == "cpu" else "", hint, toggle=True),
                Field("grace", "Grace", last.grace, "from SIGTERM to SIGKILL", "30s", _grace),
                Field("restarts", "Restarts", last.restarts, "after a failure, at most", "3",
                      number(0, _RESTARTS_MOST)),
                Field("least", "At least", last.least, "GPUs after a restart; empty: all", "6",
                      self._least),
                Field("for", "For", settings.max_lease, "maximum duration of the lease", "8h", duration(most)),
                Field("keep", "Keep running", YES, "when the board is closed", toggle=True),
            ],
            verb="Launch",
        )  # fmt: skip
        self._planner = Planner(self, self._answered)
        self._files = FileProblems("", "")  # result of the last check
        self._file_checks: Background[FileProblems] = Background(self)
        self._run_checks: Background[tuple[bool, RunEntry | None, list[str], str]] = Background(self)
        self._wanted = False  # launch as soon as the files are checked
        self._started: StartedRun | None = None
        self._before = Text()  # why the last launch failed; until something is typed

    def _command(self, text: str) -> str:
        return check_command(text) or self._wrong_files().no_script

    def _folder(self, _: str) -> str:
        return self._wrong_files().no_folder

    def _wrong_files(self) -> FileProblems:
        """Return the errors known for the files that are typed now."""
        known, values = self._files, self.values
        return known if (known.command, known.folder) == (values["command"], values["folder"]) else FileProblems("", "")

    def _look_at_files(self) -> None:
        """Check the files in the background: their file system may hang."""
        command, folder = self.values["command"], self.values["folder"]
        if check_command(command) or (self._files.command, self._files.folder) == (command, folder):
            return

        def then(files: FileProblems) -> None:
            self._files = files
            self._checked()
            self._look_at_files()
            if self._wanted and not self._file_checks.busy:
                self.action_commit()

        self._file_checks.ask(lambda: check_files(command, folder), then)

    def _which(self, text: str) -> str:
        if self._lease(text) is not None:
            return ""
        wrong = request_form.which(text)
        return wrong if not wrong or is_whole(text) else "write 2, gpu01:0,3 or your lease"

    def _least(self, text: str) -> str:
        wrong = _least(text)
        return wrong if wrong or not text or self.values["restarts"] != "0" else "needs restarts"

    def _lease(self, text: str) -> Lease | None:
        lease = self._scene.by_lease.get(text)
        return lease if lease is not None and lease.mine else None

    def show(self, scene: Scene) -> None:
        """Ask again: free GPUs may have changed."""
        self._scene = scene
        if self.is_mounted:
            self._plan(self._planner.look_again)

    def changed(self) -> None:
        """Check the files and show which GPUs a launch would use."""
        self._before = Text()
        self._wanted = False
        self._look_at_files()
        self._plan(self._planner.look)

    def _plan(self, look: Callable[[Request | None], None]) -> None:
        """Show the lease, or let ``look`` ask the policy."""
        if self.busy:
            return
        text = self.values["gpus"]
        lease = self._lease(text)
        if lease is not None:
            held = f"{request_form.gpus_words(lease.gpus)}, {format_duration(lease.remaining_s)} left"
            self.show_message(self._before + Text(f"Will use lease {lease.id}: {held}", self.board.look.style("good")))
        elif self._which(text):
            self.show_message(self._before)
        else:
            look(self._request(self.values))
            return
        look(None)

    def _request(self, values: dict[str, str]) -> Request:
        return request_form.request_of(values, self._marked)

    def _answered(self, request: Request, answer: Answer) -> None:
        if self.busy:
            return
        values = self.values
        if not (self._which(values["gpus"]) or self._lease(values["gpus"])) and request == self._request(values):
            self.show_message(self._before + self._words(request, answer))

    def _words(self, request: Request, answer: Answer) -> Text:
        look = self.board.look
        if isinstance(answer, Choice):
            why = "" if request.picks else f"\n{answer.why}"
            return Text.assemble((taken(answer), look.style("good")), (why, look.style("dim")))
        return refused(answer, look)

    # Launching

    def form(self, values: dict[str, str]) -> LaunchForm:
        text = values["gpus"]
        lease = self._lease(text)
        nodes: tuple[str, ...] = ()
        gpus = ""
        if lease is not None:
            nodes = tuple(lease.nodes)
        elif not is_whole(text):
            picks = self._request(values).picks
            gpus = "@".join(f"{pick.node}:{pick.uuid}" for pick in picks) if text in self._marked else text
            if all(pick.node is not None for pick in picks):
                nodes = tuple(dict.fromkeys(pick.node for pick in picks if pick.node is not None))
        return LaunchForm(
            command=values["command"],
            folder=absolute(values["folder"]),
            gpus=gpus,
            lease=lease.id if lease is not None else None,
            n=int(text) if lease is None and is_whole(text) else None,
            model=values["model"] if is_whole(text) else "",
            nodes=nodes,
            device="cpu" if values["cpu"] else "cuda",
            python=values["python"],
            variables=values["variables"],
            grace=values["grace"],
            restarts=values["restarts"],
            least=values["least"],
            for_s=values["for"],
            keep=bool(values["keep"]),
        )

    def commit(self, values: dict[str, str]) -> None:
        """Start the launch and wait for its run."""
        self._wanted = self._file_checks.busy
        if self._wanted:
            return
        board, form = self.board, self.form(values)
        self.set_busy(True)
        self.show_message("Starting …")

        def started(launch: StartedRun) -> None:
            board.follower.follow()
            if self not in board.screen_stack:  # it has been left
                _cancel(launch)
            elif self.is_open:  # else the board ends, and the run goes on if it is to be kept
                self._started = launch
                self._timer = self.set_interval(_POLL_S, self._wait)

        board.ask(lambda: self._start(board, form), started, lambda error: self._failed(str(error)))

    @staticmethod
    def _start(board: BoardApp, form: LaunchForm) -> StartedRun:
        launch = board.core.starter.start(form)
        launch.awaited = True
        return launch

    def _wait(self) -> None:
        started = self._started
        if started is None:
            return
        book = self.board.core.runbook

        def work() -> tuple[bool, RunEntry | None, list[str], str]:
            over = started.over  # before reading the run, whose final state is written before the process ends
            entry = book.one(started.run)
            return over, entry, started.messages, started.failure() if over and entry is None else ""

        def then(found: tuple[bool, RunEntry | None, list[str], str]) -> None:
            over, entry, messages, failure = found
            if self._started is not started:
                return
            if entry is not None:
                self._leave()
                started.awaited = False
                self.dismiss(started.run)
            elif over:
                self._leave()
                started.clear()
                self._failed(failure)
            else:
                self.show_message(messages[-1] if messages else "Reserving and starting …", "dim")

        self._run_checks.ask(work, then)

    def _leave(self) -> None:
        self._timer.stop()
        self._started = None

    def _failed(self, words: str) -> None:
        if self.is_open:
            self._before = Text.assemble(
                ("Not launched: ", self.board.look.style("bad")), request_form.plain(words), "\n"
            )
            self.show_message(self._before)
            self.set_busy(False)

    def action_cancel(self) -> None:
        """Close; cancel a launch that has no run yet, which releases its reservation."""
        if self._started is not None:
            started = self._started
            self._leave()
            _cancel(started)
        self.dismiss(None)


def _cancel(started: StartedRun) -> None:
    started.cancelled, started.awaited = True, False
    started.cancel()


def _grace(text: str) -> str:
    return "" if text in {"0", "0s"} else duration(86400.0)(text)
