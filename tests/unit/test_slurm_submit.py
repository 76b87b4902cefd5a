"""The arguments of sbatch for a lease, the meaning of its refusals, and parsers of squeue's lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.config import SlurmSettings
from gpuboard.errors import GpuboardError, NeverPossible, NoNodeReached, NotFree, UsageError
from gpuboard.scheduler.slurm import sbatch_args
from gpuboard.scheduler.slurm.client import QueuePlace, _jobs, _place, seconds
from gpuboard.scheduler.slurm.sbatch_args import Ask, JobSpec, Shape

FIXED = ["--no-requeue", "--output=/dev/null", "--chdir=/", "--export=ALL", "--parsable"]


def submitted(shape: Shape, asked: Ask | None = None, lease: JobSpec | None = None) -> list[str]:
    return sbatch_args.arguments(shape, asked or Ask(), lease or JobSpec("k3f9xy", 3600.0))


def test_a_count_requests_one_node_up_to_as_many_as_needed() -> None:
    assert submitted(Shape(4, 1)) == ["--job-name=gpuboard-k3f9xy", "--time=60", "--nodes=1", "--gpus=4", *FIXED]
    assert submitted(Shape(12, 3, type="h100"))[2:4] == ["--nodes=1-3", "--gpus=h100:12"]


def test_a_count_per_node_fixes_the_nodes() -> None:
    assert submitted(Shape(8, 2, per_node=4, type="a100"))[2:4] == ["--nodes=2", "--gpus-per-node=a100:4"]


def test_options_of_the_site_come_before_those_of_the_user() -> None:
    settings = SlurmSettings(partition="gpu", cpus_per_gpu=8, mem_per_gpu="64GiB", args=["--constraint=ib"])
    asked = sbatch_args.ask(settings, account="lab", qos="high", reservation="r1", more=["--exclusive"])
    found = submitted(Shape(2, 1, exclude="gpu[02-03]"), asked, JobSpec("k3f9xy", 90.0, "fine\ntuning"))
    assert found == [
        "--job-name=gpuboard-k3f9xy", "--time=2", "--nodes=1", "--gpus=2", "--exclude=gpu[02-03]", "--partition=gpu",
        "--account=lab", "--qos=high", "--reservation=r1", "--cpus-per-gpu=8", "--mem-per-gpu=65536M",
        "--comment=fine tuning", *FIXED, "--constraint=ib", "--exclusive",
    ]  # fmt: skip


def test_a_flag_overrides_the_setting() -> None:
    assert sbatch_args.ask(SlurmSettings(partition="gpu"), partition="short").partition == "short"


@pytest.mark.parametrize(
    "option",
    ["--array=1-3", "--arr=1-3", "-a1-3", "--wait", "-W", "--wrap=x", "--nodes=2", "-N2", "--gpus=2", "--gres=gpu:1",
     "--time=5", "-t5", "--job-name=x", "-Jx", "--output=x", "--parsable", "--test-only", "--uid=0", "--export=NONE",
     "--partition=x", "-px", "--nodelist=gpu01", "-wgpu01", "--exclude=x", "-xgpu01", "--hold", "-H", "--g",
     "--requeue", "--clusters=all", "-Mall", "--ntask=8", "--ntasks-per-gpu=1"],
)  # fmt: skip
def test_reserved_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="cannot be passed on"):
        sbatch_args.check_option(option, "--slurm")


@pytest.mark.parametrize("option", ["train.sh", "-", "--", "--constraint a100", "-C a100", "--x\n--wrap=y", "", "--X"])
def test_anything_but_one_option_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="is not an option"):
        sbatch_args.check_option(option, "--slurm")


@pytest.mark.parametrize("option", ["--constraint=a100&ib", "-Ca100", "--exclusive", "--mem=0", "--nice=10",
                                    "--gres-flags=enforce-binding", "--gpu-bind=none", "--licenses=x:2",
                                    "--mail-type=ALL", "--wait-all-nodes=1", "--time-min=10", "-c8",
                                    "--ntasks=8"])  # fmt: skip
def test_other_options_pass(option: str) -> None:
    sbatch_args.check_option(option, "--slurm")


def test_options_of_the_config_follow_the_same_rules() -> None:
    with pytest.raises(UsageError, match=r"slurm\.args: --array cannot be passed on"):
        sbatch_args.ask(SlurmSettings(args=["--array=1-9"]))


@pytest.mark.parametrize("name", ["x y", "x;y", "$(x)", "x\n", "", "-x" * 200])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name"):
        sbatch_args.ask(SlurmSettings(), account=name)


def test_minutes_are_rounded_up() -> None:
    assert [sbatch_args.minutes(s) for s in (0.5, 60.0, 60.1, 3600.0)] == [1, 1, 2, 60]


@pytest.mark.parametrize(
    ("stderr", "code", "error"),
    [
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", 1, NeverPossible),
        ("sbatch: error: Invalid generic resource (gres) specification", 1, NeverPossible),
        ("sbatch: error: invalid partition specified: nope\n"
         "sbatch: error: Batch job submission failed: Invalid partition name specified", 1, UsageError),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", 1,
         UsageError),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", 1, UsageError),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", 1, NotFree),
        ("sbatch: error: QOSMaxGRESPerJob\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", 1, NeverPossible),
        ("sbatch: error: Batch job submission failed: Memory required by task is not available", 1, NeverPossible),
        ("sbatch: error: Batch job submission failed: No partition specified or system default partition", 1,
         UsageError),
        ("sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)", 1,
         NotFree),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1,
         NoNodeReached),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1, NoNodeReached),
        ("sbatch: error: fetch_config: DNS SRV lookup failed\n"
         "sbatch: fatal: Could not establish a configuration source", 1, NoNodeReached),
        ("sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information", 255, UsageError),
        ("sbatch: error: the moon is full", 1, GpuboardError),
        ("", 1, GpuboardError),
    ],
)  # fmt: skip
def test_refusals_have_slurms_message_and_its_exit_code(stderr: str, code: int, error: type[GpuboardError]) -> None:
    found = sbatch_args.refusal(stderr, code)
    assert type(found) is error
    assert "sbatch: error" not in str(found) and "Try " not in str(found)


def test_only_some_failures_may_have_left_a_job() -> None:
    assert sbatch_args.is_uncertain(
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    )
    assert not sbatch_args.is_uncertain("sbatch: error: Batch job submission failed: Invalid qos specification")
    # no controller accepted the connection
    assert not sbatch_args.is_uncertain(
        "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    )


def test_the_job_number_is_found_after_a_sites_messages() -> None:
    assert sbatch_args.job_number("Welcome to the cluster\n1234;lab\n") == 1234
    assert sbatch_args.job_number("1234\n") == 1234
    assert sbatch_args.job_number("Submitted batch job\n") is None


def test_only_names_with_the_prefix_are_leases() -> None:
    assert sbatch_args.lease_of(sbatch_args.job_name("k3f9xy")) == "k3f9xy"
    for name in ("gpuboard-", "gpuboard-K3F9", "gpuboard-k3f9xy\n", "gpuboard-../x", "xgpuboard-k3f9xy", "wrap"):
        assert sbatch_args.lease_of(name) is None


def test_permanent_and_temporary_reasons_of_pending_jobs() -> None:
    assert sbatch_args.never_reason("PartitionTimeLimit") is not None
    assert sbatch_args.never_reason("Resources") is None
    for reason in (
        "QOSMaxGRESPerUser", "MaxGRESPerAccount", "QOSGrpGRES", "AssocGrpGRESRunMinutes", "AssocMaxJobsLimit",
        "ReqNodeNotAvail, UnavailableNodes:gpu01", "PartitionDown", "PartitionConfig", "BeginTime", "Reservation", "",
    ):  # fmt: skip
        assert sbatch_args.never_reason(reason) is None, reason
    for reason in (
        "MaxMemPerLimit", "AccountNotAllowed", "QOSNotAllowed", "ReservationDeleted",
        "QOSMaxGRESPerJob", "QOSMaxGRESPerNode", "QOSMaxWallDurationPerJobLimit", "QOSMinGRES", "QOSMaxCpuPerNode",
        "AssocMaxGRESPerJob", "AssocMaxNodePerJobLimit", "AssocMaxGRESMinutesPerJob",
        "Job's account not known, so it can't use this partition (gpu allows physics)",
        "Job's QOS not permitted to use this partition (gpu denies low including low)",
    ):  # fmt: skip
        assert sbatch_args.never_reason(reason) is not None, reason
    assert [sbatch_args.is_undecided(r) for r in ("None", "Priority", "Resources", "QOSMaxGRESPerUser")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [("10:00", 600.0), ("1:02:03", 3723.0), ("2-01:02:03", 176523.0), ("4-12", 388800.0), ("4-12:30", 390600.0),
     ("30", 1800.0), ("0:00", 0.0), ("infinite", None), ("UNLIMITED", None), ("NOT_SET", None), ("", None),
     ("a-1", None)],
)  # fmt: skip
def test_times_of_slurm(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_a_jobs_line_with_a_hostile_name() -> None:
    [job] = _jobs("12|RUNNING|None|1700000000|9:30|0:30|gpu|2001|gpu[01-02]|x\x1b[31m|y\n|||\nnonsense\n")
    assert (job.number, job.state, job.left_s, job.used_s, job.uid, job.nodes) == (
        12, "RUNNING", 570.0, 30.0, 2001, "gpu[01-02]",
    )  # fmt: skip
    assert job.lease is None
    assert "\x1b" not in job.name


def test_a_job_in_its_prolog_is_configuring() -> None:
    [job] = _jobs("12|RUNNING|Prolog|1700000000|9:30|0:30|gpu|2001|gpu01|x")
    assert job.state == "CONFIGURING"


QUEUE = """\
7|PENDING|Resources|1700000000|100|gpu
8|PENDING|Priority|N/A|90|gpu
9|PENDING|Priority|N/A|90|gpu
10|PENDING|JobHeldUser|N/A|0|gpu
11|PENDING|Dependency|N/A|200|gpu
12|PENDING|Priority|N/A|200|gpu
"""


def test_the_place_in_the_queue_is_by_priority_then_number_without_held_jobs() -> None:
    def place(number: int) -> tuple[int, int]:
        found = _place(QUEUE, number)
        assert isinstance(found, QueuePlace)
        return found.ahead, found.waiting

    assert place(12) == (0, 4)
    assert place(7) == (1, 4)
    assert place(8) == (2, 4)
    assert place(9) == (3, 4)
    assert _place(QUEUE, 99) is None


@given(st.text())
def test_no_text_makes_the_parsers_raise(text: str) -> None:
    _jobs(text)
    _place(text, 7)
    seconds(text)
    sbatch_args.refusal(text, 1)
    sbatch_args.job_number(text)
    sbatch_args.lease_of(text)
