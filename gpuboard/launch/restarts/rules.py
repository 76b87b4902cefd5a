"""When a run is restarted, and what is reported about it (pure)."""

from __future__ import annotations

from gpuboard.launch.plan import LaunchPlan
from gpuboard.launch.timing import HeadTiming


def restarts(plan: LaunchPlan, code: int, *, opened: bool, asked: bool) -> bool:
    """Return whether the attempt of ``plan`` that ended with exit code ``code`` is followed by another one.

    ``opened``: its ranks were started; without that the first attempt is final: preflight refused it. ``asked``: the
    user has asked for the run's end.
    """
    left = plan.attempt <= plan.options.max_restarts
    return left and code != 0 and not asked and (opened or plan.attempt > 1)


def pause_s(attempt: int, timing: HeadTiming) -> float:
    """Return the pause after ``attempt``: twice as long each time, up to a limit."""
    return float(min(timing.restart_pause_max_s, timing.restart_pause_s * 2 ** min(attempt - 1, 30)))


def attempt_text(plan: LaunchPlan) -> str:
    """Return ``attempt 2 of 4``."""
    return f"attempt {plan.attempt} of {plan.options.max_restarts + 1}"


def same_failure_text(plan: LaunchPlan, failure: str) -> str:
    """Return the message for a failure that ended the attempt before too."""
    return f"attempt {plan.attempt} failed like attempt {plan.attempt - 1} ({failure}): restarts may not help"
