"""Dispatch, help, errors and exit codes, in separate processes where that matters."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboard.cli.commands import COMMANDS, GROUPS, is_evaluated, split
from gpuboard.cli.context import Context
from gpuboard.cli.main import load, main, parser_of
from gpuboard.cli.reserve.allocate import progress
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.errors import UsageError
from gpuboard.leases.ledger import Scope
from tests.waiting import full_pipe, until


def gpuboard(*args: str, env: dict[str, str] | None = None, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
    """Run gpuboard in a process; return exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuboard", *args], stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, timeout=60, env={**os.environ, **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (None, [])),
        (["--json"], (None, ["--json"])),
        (["status", "--json"], ("status", ["--json"])),
        (["--nodes", "gpu01", "status"], ("status", ["--nodes", "gpu01"])),
        (["--nodes=gpu01", "status"], ("status", ["--nodes=gpu01"])),
        (["--config", "x", "run", "--n", "1", "--", "ls"], ("run", ["--config", "x", "--n", "1", "--", "ls"])),
        (["--nodes"], (None, ["--nodes"])),
        (["--", "status"], (None, ["--", "status"])),
    ],
)  # fmt: skip
def test_split_takes_the_first_word_as_the_command(argv: list[str], expected: tuple[str | None, list[str]]) -> None:
    assert split(argv) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("allocate --n 1", True),
        ("--nodes gpu01 env k3f9", True),
        ("--node gpu01 allocate --n 1", True),
        ("--n 4 allocate", True),
        ("--nodes allocate --n 4", True),  # --nodes $UNSET
        ("--nodes env", True),
        ("-- allocate", True),
        ("run --n 1 -- env", False),
        ("--node gpu01 run --n 1", False),
        ("alocate --n 1", True),
        ("statsu --json", False),
        ("help allocate", False),
        ("", False),
    ],
)
def test_a_shell_evaluates_allocate_and_env_also_mistyped_or_behind_a_mistyped_option(
    line: str, expected: bool
) -> None:
    assert is_evaluated(line.split()) is expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: gpuboard {name}")
    assert "example" in out
    assert "--nodes NODESET" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_module_has_its_name_and_a_line_of_help(name: str) -> None:
    command = load(name)
    assert name == command.NAME
    assert 10 < len(command.HELP.splitlines()[0]) <= 100
    assert parser_of(command).prog == f"gpuboard {name}"


def test_help_lists_every_command_in_its_group() -> None:
    code, out, err = gpuboard("--help")
    assert max(map(len, out.splitlines())) <= 80
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for group, names in GROUPS.items():
        start = lines.index(f"{group}:") + 1
        assert tuple(line.split()[0] for line in lines[start : start + len(names)]) == names
    assert gpuboard("help")[1] == out
    assert [line for line in lines if len(line) > 118] == []


def test_help_command_equals_the_help_option() -> None:
    assert gpuboard("help", "leases")[1] == gpuboard("leases", "--help")[1]


def test_version() -> None:
    assert gpuboard("--version")[:2] == (0, "gpuboard 0.1.0\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("statsu",), "'statsu' is not a command; did you mean `gpuboard status`?"),
        (("zzz",), "'zzz' is not a command; commands are: board, status, ps, record, serve, allocate, "),
        (
            ("--node", "gpu01", "allocate", "--n", "1"),
            "'gpu01' is not a command; options follow the command: gpuboard allocate --node gpu01",
        ),
        (("--filter", "idle"), "'idle' is not a command; options follow the command: gpuboard COMMAND --filter idle"),
        (("--nodes=gpu01", "zzz"), "'zzz' is not a command; commands are: board, "),
        (("status", "--jsno"), "--jsno: no such option; did you mean --json?"),
        (("status", "surplus"), "unexpected argument: surplus"),
        (("status", "--watch", "0"), "--watch: '0' is not between 0.2 seconds and a day"),
        (("status", "--watch", "x"), "--watch: 'x' is not a duration"),
        (("renew", "k3f9"), "missing: --for"),
        (("renew", "k3f9", "--fro", "1h"), "--fro: no such option; did you mean --for?"),
        (("serve", "--metrics"), "--metrics: no such option"),
        (("renew", "k3f9", "--for", "3"), "--for: '3' is not a duration; write 30s, 15m"),
        (("release",), "pass either lease ids or --mine"),
        (("status", "--js"), "--js: no such option; did you mean --json?"),
        (("",), "'' is not a command; commands are: board, "),
        (("status", "--config", ""), "--config: empty value; is a shell variable unset?"),
        (("launch", "--rank-map", "", "train.py"), "--rank-map: empty value"),
        (("launch", "--lease", "", "train.py"), "--lease: empty value"),
        (("release", ""), "ID: empty value; is a shell variable unset?"),
        (("release", "k3f9", ""), "ID: empty value"),
        (("status", "--nodes", "gpu01", "--nodes="), "--nodes: empty value"),
        (("launch", "--n", "1", "--env", "", "train.py"), "--env: empty value"),
        (("run", "--n", "1", "--", ""), "no command given; write it after --"),
    ],
)
def test_usage_errors_exit_2_with_a_remedy(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("gpuboard: ")
    assert words in err


def test_a_process_exits_with_the_code_of_a_usage_error() -> None:
    assert gpuboard("status", "surplus")[:2] == (2, "")


@pytest.mark.parametrize(
    "argv",
    [
        ("launch", "--n", "x", "--status-file", "out.json", "train.py"),
        ("launch", "--status-file=out.json", "--n", "1"),
        ("launch", "--n", "2", "--wait", "--status-file", "out.json"),
        ("run", "--status-file", "out.json", "--n", "0", "--", "true"),
        ("run", "--status-file", "out.json", "--bogus", "--", "true"),
    ],
)
def test_usage_errors_are_written_to_the_status_file(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert (outcome["schema"], outcome["command"], outcome["exit_code"]) == (1, argv[0], 2)
    assert capsys.readouterr().err == f"gpuboard: {outcome['error']}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("launch", "--n", "x", "train.py", "--status-file", "its"),
        ("run", "--n", "0", "--", "sh", "--status-file", "its"),
        ("launch", "--bogus", "train.py", "--status-file", "its"),
        ("launch", "--status-file", "--n", "1"),
        ("status", "--status-file", "its"),
    ],
)
def test_status_file_of_the_started_command_is_ignored(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words", "wait", "rest"),
    [
        ("launch", "--n 4 --wait train.py --wait 3", float("inf"), ["train.py", "--wait", "3"]),
        ("launch", "--wait --n 4 train.py", float("inf"), ["train.py"]),
        ("launch", "--wait 1h --n 4 train.py --wait a.py", 3600.0, ["train.py", "--wait", "a.py"]),
        ("launch", "--n 4 --wait=2h -- train.py --wait a.py", 7200.0, ["train.py", "--wait", "a.py"]),
        ("run", "--n 1 --wait bash -c x", float("inf"), ["bash", "-c", "x"]),
    ],
)
def test_wait_without_a_duration_may_precede_the_command(
    command: str, words: str, wait: float, rest: list[str]
) -> None:
    args = parser_of(load(command)).read(words.split())
    found = args.target if command == "launch" else args.argv
    assert (args.wait, found[1:] if found[0] == "--" else found) == (wait, rest)


def test_invalid_wait_duration_is_not_read_as_the_command() -> None:
    for words in ("--n 4 --wait 30 train.py", "--n 4 --wait 8hh train.py"):
        with pytest.raises(UsageError, match="is not a duration"):
            parser_of(load("launch")).read(words.split())


def test_empty_value_fails_closed_for_allocate_and_env() -> None:
    for argv in (("allocate", "--n", "1", "--rank-map", ""), ("allocate", "--n", "1", "--model="), ("env", "")):
        code, out, err = gpuboard(*argv, env={"GPUBOARD_LEASE": "k3f9"})
        assert (code, out.partition(";")[0]) == (2, "export CUDA_VISIBLE_DEVICES=''")
        assert "empty value; is a shell variable unset?" in err


@pytest.mark.parametrize(
    "words", ["--node gpu01 allocate --n 1", "--n 4 allocate", "--lease k3f9 env", "alocate --n 1"]
)
def test_mistyped_command_or_option_before_it_fails_closed(words: str) -> None:
    code, out, err = gpuboard(*words.split(), "--format", "shell")
    assert (code, out.partition(";")[0], out[-9:]) == (2, "export CUDA_VISIBLE_DEVICES=''", "(exit 2)\n")
    assert "is not a command" in err
    assert json.loads(gpuboard(*words.split(), "--json")[1])["error"]["code"] == 2


def test_invalid_setting_stops_every_command_that_needs_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("nodes = 3")
    for command in ("config", "status", "leases"):
        assert main([command, "--config", str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == f"gpuboard: {file}: nodes: must be a list, not a whole number\n"


def test_closed_stdout_pipe_prints_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m gpuboard config | head -c 1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupts_end_a_command_whose_output_nobody_reads() -> None:
    """Its last flush waits for the reader, too."""
    reading, writing = full_pipe()
    with subprocess.Popen([sys.executable, "-m", "gpuboard", "config"], stdout=writing, stderr=subprocess.PIPE) as ran:
        proc = Path(f"/proc/{ran.pid}")

        def pauses() -> int:
            return int((proc / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        before = 0
        for _ in range(2):
            until(lambda at=before: pauses() > at and "pipe_write" in (proc / "wchan").read_text(), "it writes")  # type: ignore[misc]
            before = pauses()
            ran.send_signal(signal.SIGINT)
        assert ran.communicate(timeout=20)[1] == b""
        assert ran.returncode == 130
    os.close(reading)
    os.close(writing)


def test_an_interrupt_while_another_one_is_handled_waits_for_no_reader() -> None:
    script = """
import sys
import gpuboard.cli.main
from gpuboard.__main__ import main
def interrupted(argv):
    sys.stdout.write("not read")
    raise KeyboardInterrupt
gpuboard.cli.main.main = interrupted
sys.argv = ["gpuboard", "config"]
main()
"""
    reading, writing = full_pipe()
    done = subprocess.run([sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(reading)
    os.close(writing)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_under_stdout_is_reported(unbuffered: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, _, err = gpuboard("config", stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    finally:
        os.close(full)
    assert code == 1
    assert err.startswith("gpuboard: cannot write to stdout: No space left on device\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["config --json", "launch --help"])
def test_a_part_of_the_output_is_an_error(words: str, unbuffered: str, tmp_path: Path) -> None:
    script = f"ulimit -f 1; PYTHONUNBUFFERED={unbuffered} exec {sys.executable} -m gpuboard {words} > {tmp_path}/out"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "gpuboard: cannot write to stdout: File too large\n")


def test_lines_for_the_shell_follow_an_error_of_the_system() -> None:
    code = (
        "import os, sys, gpuboard.cli.reserve.env as env, gpuboard.__main__ as start\n"
        "def run(args, context): raise OSError(5, os.strerror(5))\n"
        "env.run = run\n"
        "sys.argv[1:] = ['env', 'k3f9', *sys.argv[1:]]\n"
        "start.main()"
    )
    command = shlex.join([sys.executable, "-c", code])
    script = f'CUDA_VISIBLE_DEVICES=0; eval "$({command} --format shell)"; echo "$? <$CUDA_VISIBLE_DEVICES>"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 <>\n"
    assert done.stderr == "gpuboard: Input/output error; set GPUBOARD_DEBUG=1 to see the traceback\n"
    done = subprocess.run(f"{command} --json", shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["error"]["message"] == "OSError: [Errno 5] Input/output error"


@pytest.mark.parametrize(
    ("closed", "code", "out", "err"),
    [
        (">&-", 1, "", "gpuboard: cannot write to stdout: Bad file descriptor\n"),
        ("2>&-", 0, "cluster ", ""),
        ("<&-", 0, "cluster ", ""),
        ("<&- 2>&-", 0, "cluster ", ""),
        ("<&- >&- 2>&-", 1, "", ""),
    ],
)
def test_closed_standard_streams(closed: str, code: int, out: str, err: str) -> None:
    done = subprocess.run(
        f"exec {sys.executable} -m gpuboard config {closed}", shell=True, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout[: len("cluster ")]) == (code, out)
    assert done.stderr.partition(";")[0] == err


@pytest.mark.parametrize("words", ["launch --help", "config --nodes n[1-900] --json"])
def test_any_amount_of_output_on_a_closed_stdout_is_the_same_error(words: str) -> None:
    script = f"exec {sys.executable} -m gpuboard {words} >&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "gpuboard: cannot write to stdout: Bad file descriptor\n")


def test_locale_without_a_character_prints_a_question_mark() -> None:
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, err = gpuboard("--help", env=env)
    assert (code, err) == (0, "")
    assert out.startswith("usage: gpuboard [COMMAND] [--nodes NODESET] [--config FILE] ?\n")


def test_unexpected_exception_is_one_line_and_a_traceback_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise LookupError("no such thing")

    monkeypatch.setattr("gpuboard.cli.setup.config.run", broken)
    assert main(["config"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("gpuboard: this is a bug: LookupError at test_cli.py:")
    assert "Traceback" not in err
    monkeypatch.setenv("GPUBOARD_DEBUG", "1")
    assert main(["config"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_command_raises_usage_error_before_any_import() -> None:
    with pytest.raises(UsageError):
        load("os")


def test_config_shows_each_origin(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('nodes = ["gpu[01-02]"]\ncluster = "lab"\n')
    env = {"GPUBOARD_CLUSTER": "elsewhere"}
    code, out, _ = gpuboard("config", "--config", str(file), "--nodes", "gpu02", "--json", env=env)
    assert code == 0
    assert '"cluster": {"value": "elsewhere", "origin": "environment"}' in out
    assert '"nodes": {"value": ["gpu02"], "origin": "command line"}' in out
    assert '"python": {"value": "python3", "origin": "default"}' in out


def test_config_names_the_files_that_were_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.touch()
    last = gpuboard("config", env={"GPUBOARD_CONFIG": str(file)})[1].splitlines()[-1]
    assert last == f"config files: /etc/gpuboard/config.toml, {file}"


class _Terminal(Context):
    stderr_is_tty = True


def test_progress_on_a_terminal_is_erased_by_an_empty_text(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress(_Terminal([], {}))
    show("")
    assert capsys.readouterr().err == ""
    show("waiting")
    show("")
    assert capsys.readouterr().err == "\r\x1b[Kwaiting\r\x1b[K"


def test_progress_on_a_dumb_terminal_has_no_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    progress(_Terminal([], {"TERM": "dumb"}))("waiting 1s: none")
    assert capsys.readouterr().err == "gpuboard: waiting 1s: none\n"


def test_progress_in_a_log_prints_changes_only(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress(Context([], {}))
    for text in ("waiting 1s: none", "waiting 2s: none", "", "waiting 3s: one"):
        show(text)
    assert capsys.readouterr().err == "gpuboard: waiting 1s: none\ngpuboard: waiting 3s: one\n"


def test_interrupt_during_an_import_is_deferred(tmp_path: Path) -> None:
    (tmp_path / "cut.py").write_text("import os\nos.kill(os.getpid(), 2)\nprint('whole')\n")
    code = "from gpuboard.__main__ import _handle_interrupts; _handle_interrupts(); import cut, time; time.sleep(9)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.stdout == "whole\n"
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_interrupts_while_a_command_fails_leave_the_lines_that_fail_closed(tmp_path: Path) -> None:
    module = "gpuboard.leases.output.shell"
    code = f"""
import os, sys, {module} as shell
requested = shell.requested_format
def requested_format(argv):
    for number in (1, 2, 15) if sys._getframe(1).f_code.co_name == "_fail_closed" else ():
        os.kill(os.getpid(), number)
    return requested(argv)
shell.requested_format = requested_format
from gpuboard.__main__ import main
sys.argv[1:] = ["allocate", "--n", "0", "--format", "csh"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith('setenv CUDA_VISIBLE_DEVICES ""')


def test_config_checks_the_theme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "gpuboard" / "themes"
    own.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known = "colour-blind, dark, high-contrast, light, plain, terminal"
    monkeypatch.setenv("GPUBOARD_THEME", "drak")
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == [f"theme = 'drak' is not one of: auto, {known}"]
    monkeypatch.setenv("GPUBOARD_THEME", "dark")
    assert main(["config"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("GPUBOARD_THEME")
    (own / "mine.toml").write_text('like = "dark"\n[colors]\nprimary = "no colour"\n')
    broken = "mine.toml: colors.primary = 'no colour' is not a colour; write #57d38c, ansi_green or a CSS name"
    assert main(["config"]) == 0
    assert capsys.readouterr().err == f"gpuboard: {broken}\n"


def test_the_value_of_an_option_may_begin_with_a_dash() -> None:
    parser = parser_of(load("status"))
    read = parser.read(["--filter", "-state:free", "--replay", "day.gz", "--at", "-10m", "--free"])
    assert (read.filter, read.at, read.free) == ("-state:free", "-10m", True)
    for words in (["--at", "--free"], ["--at", "-h"], ["--at"]):
        with pytest.raises(UsageError, match="--at needs a value"):
            parser.read(words)


@pytest.mark.parametrize(
    ("ids", "nodes"),
    [
        (["k3f9"], ["ws1"]),
        (["k3f"], ["s01", "ws1"]),  # may be another lease's, too
        (["k3f9", "m2aa"], ["s01", "ws1"]),
        (["m2aa"], ["s01"]),
        ([""], ["s01"]),
        ([], ["s01", "ws1"]),  # release --mine
    ],
)
def test_leases_are_looked_for_on_the_nodes_of_the_shells_own(ids: list[str], nodes: list[str]) -> None:
    class WithScheduler(Context):
        def scope(self) -> Scope:
            return Scope((Node("s01", "s01"),))

    context = WithScheduler([], {"GPUBOARD_LEASE": "k3f9", "GPUBOARD_NODES": "ws1", "HOME": "/nonexistent"})
    assert [node.name for node in context.scope_of(ids).nodes] == nodes
