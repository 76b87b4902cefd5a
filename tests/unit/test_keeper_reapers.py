"""Where logind or a batch system would kill a keeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuboard.keeper.logind import reapers, run_reapers

USER, NAMELESS = 1, 54321  # uids; root is excluded by default
SESSION = "0::/user.slice/user-1001.slice/session-4.scope\n"


def host(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


KILLS = "[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\n"


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        ({"proc/self/cgroup": SESSION}, False),
        ({"proc/self/cgroup": SESSION, "etc/systemd/logind.conf": KILLS}, True),
        ({"proc/self/cgroup": SESSION, "etc/systemd/logind.conf": KILLS + "KillExcludeUsers=root daemon\n"}, False),
        ({"proc/self/cgroup": SESSION, "etc/systemd/logind.conf": KILLS + "KillOnlyUsers=alice\n"}, False),
        (
            {
                "proc/self/cgroup": "0::/user.slice/user-1001.slice/user@1001.service/x\n",
                "etc/systemd/logind.conf": KILLS,
            },
            False,
        ),
        ({"proc/self/cgroup": SESSION, "usr/lib/systemd/logind.conf.d/10-site.conf": KILLS}, True),
        (
            {
                "proc/self/cgroup": SESSION,
                "usr/lib/systemd/logind.conf.d/10-site.conf": KILLS,
                "etc/systemd/logind.conf.d/10-site.conf": "[Login]\n",
            },
            False,
        ),
        (
            {
                "proc/self/cgroup": SESSION,
                "etc/systemd/logind.conf": KILLS,
                "run/systemd/logind.conf.d/90.conf": "[Login]\nKillUserProcesses = no\n",
            },
            False,
        ),
    ],
)
def test_logind(tmp_path: Path, files: dict[str, str], warned: bool) -> None:
    found = reapers({}, USER, host(tmp_path, files))
    assert [warning.partition(" kills")[0] for warning in found] == (["logind"] if warned else [])


def test_root_is_not_warned_by_default(tmp_path: Path) -> None:
    assert reapers({}, 0, host(tmp_path, {"proc/self/cgroup": SESSION, "etc/systemd/logind.conf": KILLS})) == []


def test_slurm_job(tmp_path: Path) -> None:
    root = host(tmp_path, {"proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"})
    assert [text.partition(",")[0] for text in reapers({}, USER, root)] == ["this session belongs to Slurm job 77"]
    assert reapers({"SLURM_JOB_ID": "77"}, USER, root) == []
    for env in ({}, {"SLURM_JOB_ID": "77"}):
        assert [text.partition(",")[0] for text in run_reapers(env, USER, root)] == ["this run ends with Slurm job 77"]


def test_a_user_without_a_name_is_warned_too(tmp_path: Path) -> None:
    assert reapers({}, NAMELESS, host(tmp_path, {"proc/self/cgroup": "0::/"})) == []
    root = host(tmp_path, {"proc/self/cgroup": SESSION, "etc/systemd/logind.conf": KILLS})
    assert [warning.partition(" kills")[0] for warning in reapers({}, NAMELESS, root)] == ["logind"]
    assert [warning.partition(" ends")[0] for warning in run_reapers({}, NAMELESS, root)] == ["logind"]
