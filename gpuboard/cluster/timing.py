"""The time constants of a fleet, as one value: :class:`Fleet` passes it to its feeds and routes; tests shrink it."""

from __future__ import annotations

import msgspec


class FleetTiming(msgspec.Struct, frozen=True):
    """All in seconds."""

    # Waiting for nodes
    poll_s: float = 0.25  # between two checks of the deadlines by a caller that waits
    aged_s: float = 1.0  # a reading older than this is repeated after a wait for other nodes
    reread_s: float = 4.0  # timeout of that repetition: NVML alone may take 3.5 s
    call_least_s: float = 0.5  # minimum timeout of a call, so that frames queued while this process was suspended count
    call_retry_s: float = 1.0  # a call does not reconnect to a node that failed less than this ago

    # A fleet that is kept open
    pace_s: float = 1.0  # between two checks of the feeds' deadlines and retries
    suspended_s: float = 3.0  # a longer gap between two checks means this process was suspended (SIGTSTP)
    tick_s: float = 10.0  # between two messages that align the agents' readings with the wall clock
    settle_s: float = 0.02  # debounce: readings are aligned, and those that arrive with shorter pauses are one change
    settle_most_s: float = 0.3  # the longest debounce: 1,000 lines take 50 to 200 ms to arrive and be decoded

    # One link
    first_answer_s: float = 10.0  # minimum timeout from connected to the first reading: NVML alone can take 3 s
    silence_s: float = 60.0  # an agent without a message for this long (and for 10 intervals) is replaced

    closed_s: float = 90.0  # a reading of a node without a route counts for this long; its claims may have expired then

    # Retry with back-off
    backoff_first_s: float = 1.0  # before the first retry; doubles with every failure
    backoff_most_s: float = 60.0
    backoff_refused_s: float = 30.0  # before the first retry of a refused login: sshd may ban frequent attempts
    backoff_refused_most_s: float = 300.0
    steady_s: float = 10.0  # a link that lasted longer resets the back-off

    # Routes
    agent_again_s: float = 600.0  # between two attempts to start the agent on a node without python3
    ssh_again_s: float = 300.0  # between two attempts of a refused ssh route while another route works
    no_job_s: float = 300.0  # the same where no other route exists: the node accepts only users with a job on it


TIMING = FleetTiming()
