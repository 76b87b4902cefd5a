"""Timeouts and intervals of the keeper and its clients, as one value that tests can shorten."""

# No postponed annotations: typing would compile each of them, at every start.

from typing import NamedTuple


class KeeperTiming(NamedTuple):
    """Seconds, unless a name has another unit. Without a heartbeat for 90 s a claim expires (agent/claims/rules.py)."""

    # clients
    start_s: float = 10.0  # for a keeper to start
    adopt_s: float = 10.0  # for a keeper to accept a lease of this host, the first heartbeat included
    adopt_remote_s: float = 30.0  # the same for each round of connections (LeaseRecord.rounds) to other nodes
    forget_s: float = 3.0  # for a keeper to stop heartbeats of a released lease; the release does not depend on it
    # the daemon
    linger_s: float = 5.0  # until a keeper without leases ends
    place_s: float = 2.0  # between two checks that commands find its socket; a command waits 5 s for a locked one
    no_pidfd_s: float = 1.0  # between two polls of a holder where the kernel has no pidfd (before 5.3)
    ending_s: float = 5.0  # expiry this close to the end is no loss: nodes end claims 2 s early (rules.MARGIN_S)
    own_end_s: float = 60.0  # after the owner announced the end of a lease, its end is no loss
    release_s: float = 100.0  # how long a release is retried: later, claims without heartbeats have expired
    # the end of a holder
    look_s: float = 60.0  # how long orphaned processes, which may start carriers, hold a lease
    look_every_s: float = 2.0
    carried_every_s: float = 5.0  # between two polls while carriers are alive
    # nodes
    heartbeat_s: float = 30.0  # three attempts within the 90 s of a claim
    retry_s: tuple[float, ...] = (5.0, 10.0, 20.0, 30.0)  # back-off after a heartbeat or release that failed
    call_s: float = 20.0  # for a call; with a new connection, for each round of them
    ssh_agent_s: float = 1.0  # for an ssh agent to accept a connection
    agent_linger_s: float = 15.0  # how long an idle agent on this machine is kept for the next call
    # jobs of a scheduler
    job_look_s: float = 60.0  # between two queries of the jobs' states, at least…
    job_look_share: float = 50.0  # …and at least this multiple of the duration of the last one
    command_s: float = 30.0  # for a command of the scheduler
    file_s: float = 0.2  # for a heartbeat under way on a slow file server when a lease ends; its file may remain
    settle_s: float = 4.0  # between two queries that find no job, where its number is unknown
    submit_s: float = 60.0  # for a running command that submits the job, when the lease is released meanwhile

    def retry_after_s(self, failures: int) -> float:
        """Return the back-off after the ``failures``-th consecutive failure."""
        return self.retry_s[min(failures, len(self.retry_s)) - 1]


TIMING = KeeperTiming()
