"""What real shells make of our lines: assignments, and the ones that fail closed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpuboard.leases.output.shell import VARIABLES, assignments, fail_closed, requested_format

HOSTILE = "a  b'c\"d$HOME`id`!x;e&f|g\\h*?[i-j]{k,l}~#m<n>(o) ü"
# How people evaluate in each shell; {file} holds our output.
EVALUATE = {
    "sh": 'eval "$(cat {file})"',
    "dash": 'eval "$(cat {file})"',
    "bash": 'eval "$(cat {file})"',
    "zsh": 'eval "$(cat {file})"',
    "tcsh": 'eval "`cat {file}`"',
    "csh": "eval `cat {file}`",
    "fish": "eval (cat {file})",
    "fish-source": "cat {file} | source",
}
SHOW = {"tcsh": "echo $status; env", "csh": "echo $status; env", "fish": "echo $status; env"}


def evaluate(shell: str, text: str, folder: Path) -> tuple[int, dict[str, str]]:
    """Return the exit code of the evaluation and the environment of a child after it."""
    program = shell.partition("-")[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    file = folder / "lines"
    file.write_text(text)
    script = f"{EVALUATE[shell].format(file=file)}; {SHOW.get(program, 'echo $?; env')}"
    flags = ["-f"] if program in {"tcsh", "csh"} else ["--no-config"] if program == "fish" else []
    stale = dict.fromkeys((*VARIABLES, "CUDA_VISIBLE_DEVICES"), "stale")
    done = subprocess.run(
        [program, *flags, "-c", script],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", **stale},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    code, _, rest = done.stdout.partition("\n")
    return int(code), dict(line.split("=", 1) for line in rest.splitlines() if "=" in line)


def kind(shell: str) -> str:
    return "csh" if "csh" in shell else "fish" if "fish" in shell else "shell"


@pytest.mark.parametrize("shell", EVALUATE)
def test_values_arrive_as_they_are(shell: str, tmp_path: Path) -> None:
    values = {"GPUBOARD_NODES": "gpu[01-03]", "GPUBOARD_RANK_MAP": HOSTILE, "CUDA_VISIBLE_DEVICES": ""}
    if shell == "csh":  # an unquoted `…` expands braces before eval sees any quote: what we document is eval "`…`"
        values["GPUBOARD_RANK_MAP"] = HOSTILE.replace("{k,l}", "")
    code, found = evaluate(shell, assignments(kind(shell), values), tmp_path)
    assert code == 0
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize("code", [2, 4, 130])
@pytest.mark.parametrize("shell", EVALUATE)
def test_nothing_is_visible_and_eval_returns_the_exit_code(shell: str, code: int, tmp_path: Path) -> None:
    returned, found = evaluate(shell, fail_closed(kind(shell), code), tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert not set(VARIABLES) & set(found)
    assert returned == code


def test_formats_no_shell_evaluates_get_nothing_to_evaluate() -> None:
    assert fail_closed("json", 4) == ""
    assert fail_closed("env", 4) == "CUDA_VISIBLE_DEVICES=\n"


def test_the_format_is_found_in_a_wrong_command_line() -> None:
    assert requested_format(["allocate", "--nope", "--format", "csh"]) == "csh"
    assert requested_format(["--format=fish", "allocate"]) == "fish"
    assert requested_format(["allocate", "--json", "--n", "x"]) == "json"
    assert requested_format(["allocate", "--format"]) is None
    assert requested_format(["allocate", "--format", "yaml"]) is None
    assert requested_format(["run", "--", "x", "--format", "csh"]) is None
