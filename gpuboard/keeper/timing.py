"""How long the keeper and its clients wait, as one value: passed in, so that a test can shorten it."""

from __future__ import annotations

from typing import NamedTuple


class KeeperTiming(NamedTuple):
    """Seconds, unless a name says otherwise. A claim without a heartbeat for 90 s expires (agent/claims/rules.py)."""

    # clients
    start_s: float = 10.0  # for a keeper to start
    adopt_s: float = 10.0  # for a keeper to take a lease of this host, the first heartbeat included
    adopt_remote_s: float = 30.0  # the same where the keeper connects to other nodes first
    forget_s: float = 3.0  # for a keeper to forget a lease; a release does not depend on it
    # the daemon
    linger_s: float = 5.0  # until a keeper without leases ends
    place_s: float = 2.0  # between two checks that commands can reach it; a command waits 5 s for a locked one
    no_pidfd_s: float = 1.0  # between two looks at a holder where the kernel has no pidfd (before 5.3)
    ending_s: float = 5.0  # a claim that expires this near its end has ended: nodes end it 2 s early (rules.MARGIN_S)
    own_end_s: float = 60.0  # how long the end of a lease is no loss after its owner announced it
    release_s: float = 100.0  # after that no release is retried: claims without heartbeats have expired
    # the end of a holder
    look_s: float = 60.0  # how long processes that may become carriers keep a lease
    look_every_s: float = 2.0
    carried_every_s: float = 5.0  # between two looks while carriers live
    # nodes
    heartbeat_s: float = 30.0  # three chances within the 90 s of a claim
    retry_s: tuple[float, ...] = (5.0, 10.0, 20.0, 30.0)  # after a heartbeat or release that did not reach its node
    call_s: float = 20.0  # for a call, the set-up of a connection included
    ssh_agent_s: float = 1.0  # for an ssh agent to accept a connection
    agent_linger_s: float = 15.0  # how long an agent on this machine is kept for the next question
    # jobs of a scheduler
    job_look_s: float = 60.0  # between two questions whether jobs still run, at least…
    job_look_share: float = 50.0  # …and at least this multiple of what the last one took
    command_s: float = 30.0  # for a command of the scheduler
    file_s: float = 0.2  # for a heartbeat on a slow file server when a lease ends; the file may be left behind then
    settle_s: float = 4.0  # between two looks that find no job, where its number was never learned
    submit_s: float = 60.0  # for the command that submits the job, when the lease is released meanwhile

    def retry_after_s(self, failures: int) -> float:
        """Return how long to wait after the ``failures``-th failure in a row."""
        return self.retry_s[min(failures, len(self.retry_s)) - 1]


TIMING = KeeperTiming()
