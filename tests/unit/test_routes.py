"""Which route to a node is tried next, whatever has happened on the others."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from gpuboard.cluster.routes import Route, Routes
from gpuboard.cluster.timing import TIMING
from gpuboard.transport.base import Kind

SSH, SHELL = Route(), Route(shell=True)


def routes(job: str | None = None, *, local: bool = False) -> Routes:
    return Routes(job, local=local)


def test_without_a_scheduler_the_route_is_ssh_with_the_agent() -> None:
    it = routes()
    assert (it.closed, it.next(0.0)) == (False, SSH)
    assert it.failed(SSH, "timeout", 0.0) is None
    assert it.next(1.0) == SSH


def test_without_python_a_shell_is_used_and_the_agent_retried_later() -> None:
    it = routes()
    assert it.failed(SSH, "no-python", 0.0) == 0.0
    assert it.next(0.0) == SHELL
    assert not it.agent_is_due(SHELL, TIMING.agent_again_s - 1)
    assert it.next(TIMING.agent_again_s - 1) == SHELL
    assert it.agent_is_due(SHELL, TIMING.agent_again_s)
    assert it.next(TIMING.agent_again_s) == SSH
    assert not it.agent_is_due(SSH, TIMING.agent_again_s)


def test_with_neither_python_nor_nvidia_smi_the_agent_is_retried_with_back_off() -> None:
    it = routes()
    it.failed(SSH, "no-python", 0.0)
    assert it.failed(SHELL, "no-python", 0.0) is None
    assert it.next(1.0) == SSH


def test_on_this_machine_there_is_no_fallback() -> None:
    it = routes(local=True)
    assert it.failed(SSH, "no-python", 0.0) is None
    assert it.next(0.0) == SSH


def test_no_route_where_none_is_permitted() -> None:
    it = routes()
    assert it.permit(ssh=False, jobs=[]) is False
    assert (it.closed, it.next(0.0), it.permits(SSH)) == (True, None, False)


def test_a_job_without_gpus_is_no_route_and_a_new_one_is_reported() -> None:
    it = routes()
    assert it.permit(ssh=True, jobs=[], visits=["7"]) is True
    assert (it.next(0.0), it.permits(Route("7"))) == (SSH, False)
    assert it.failed(SSH, "no-job", 0.0) == TIMING.no_job_s
    assert it.permit(ssh=True, jobs=[], visits=["7"]) is False
    assert it.permit(ssh=True, jobs=[], visits=["8"]) is True


def test_a_job_is_the_route_where_ssh_is_not_permitted() -> None:
    it = routes()
    assert it.permit(ssh=False, jobs=["7", "9"]) is True
    assert (it.closed, it.next(0.0)) == (False, Route("7"))
    assert it.permit(ssh=False, jobs=["7", "9"]) is False
    assert it.permit(ssh=False, jobs=["9"]) is False
    assert (it.permits(Route("7")), it.permits(Route("9")), it.next(0.0)) == (False, True, Route("9"))
    it.permit(ssh=False, jobs=[])
    assert it.closed


def test_refused_ssh_falls_back_to_a_job_for_a_while() -> None:
    for kind in ("no-job", "auth", "refused", "host-key", "timeout"):
        it = routes()
        it.permit(ssh=True, jobs=["7"])
        assert it.next(0.0) == SSH
        assert it.failed(SSH, kind, 0.0) == 0.0
        assert it.next(0.0) == Route("7")
        assert it.next(TIMING.ssh_again_s) == SSH


def test_an_agent_that_dies_does_not_change_the_route() -> None:
    it = routes()
    it.permit(ssh=True, jobs=["7"])
    for kind in ("lost", "exited"):
        assert it.failed(SSH, kind, 0.0) is None
        assert it.next(0.0) == SSH


def test_a_node_that_requires_a_job_is_retried_when_there_is_one() -> None:
    it = routes()
    assert it.failed(SSH, "no-job", 0.0) == TIMING.no_job_s
    assert it.permit(ssh=True, jobs=["7"]) is True
    assert it.next(1.0) == SSH  # the node accepts ssh now


def test_refused_ssh_is_not_retried_early_because_steps_fail_too() -> None:
    for kind, again in (("exited", None), ("no-job", TIMING.ssh_again_s - 1)):
        it = routes()
        it.permit(ssh=True, jobs=["7"])
        it.failed(SSH, "auth", 0.0)
        assert it.failed(Route("7"), kind, 1.0) == again
        assert it.permit(ssh=True, jobs=["7"]) is (kind == "no-job")  # the step may be retried
        assert it.next(2.0) == Route("7")
        assert it.permit(ssh=True, jobs=["7", "8"]) is True
        assert it.next(2.0) == SSH  # the new job may make the node accept it


def test_an_ended_job_leaves_no_route() -> None:
    it = routes()
    it.permit(ssh=False, jobs=["7"])
    assert it.failed(Route("7"), "no-job", 3.0) is None
    assert (it.closed, it.next(4.0)) == (True, None)
    assert it.permit(ssh=False, jobs=["7"]) is True  # the scheduler's answer was old, or is right


def test_a_fixed_job_stays_the_route_with_or_without_python() -> None:
    it = routes("12")
    it.permit(ssh=False, jobs=[])
    assert (it.closed, it.next(0.0), it.permits(Route("12"))) == (False, Route("12"), True)
    assert it.failed(Route("12"), "no-python", 0.0) == 0.0
    assert it.next(0.0) == Route("12", shell=True)
    assert it.failed(Route("12"), "no-job", TIMING.agent_again_s) is None
    assert it.next(TIMING.agent_again_s) == Route("12")


@given(
    st.booleans(),
    st.lists(st.sampled_from(["7", "9"]), unique=True),
    st.lists(st.tuples(st.sampled_from(get_args(Kind)), st.floats(0, 1000)), max_size=20),
)
def test_a_route_that_is_not_permitted_is_never_taken(
    ssh: bool, jobs: list[str], failures: list[tuple[str, float]]
) -> None:
    it, now = routes(), 0.0
    it.permit(ssh=ssh, jobs=jobs)
    for kind, passed in failures:
        route = it.next(now)
        assert (route is None) == it.closed
        if route is None:
            return
        assert it.permits(route)
        assert 0.0 <= (it.failed(route, kind, now) or 0.0) <= TIMING.no_job_s
        now += passed
