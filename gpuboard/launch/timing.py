"""The times of a run's head as one value, so that a test can shorten them. Nothing here travels to the nodes."""

from __future__ import annotations

import msgspec


class HeadTiming(msgspec.Struct, frozen=True):
    """All fields are seconds."""

    # interval of the head's loop: bounds how late a deadline is noticed
    poll_s: float = 0.1
    # interval of pings to each supervisor: replies show that a node without output is reachable
    ping_s: float = 1.0
    # least interval between writes of state.json: the folder is often on a network home
    save_s: float = 2.0
    # deadline of a call that starts something, counted from opening the connection: interpreters on a cold network home
    start_s: float = 20.0
    # from the start of preflight to a message about nodes that have not replied; ssh gives up later
    slow_start_s: float = 5.0
    # deadline of a connectivity check: 10 ms as a rule, 2 s behind a firewall that drops, more on a busy node
    probe_s: float = 10.0
    # connect timeout of one attempt: the peer's kernel accepts at once, so a later answer counts as dropped
    connect_s: float = 2.0
    # all ranks run this long before `launch --detach` returns: mistakes of a script's first lines are printed
    started_s: float = 1.0
    # wait for the root cause after a secondary failure: the two arrive over different connections
    cause_wait_s: float = 1.0
    # longest wait for a supervisor that does not answer pings, before the failures of other nodes are evaluated
    supervisor_wait_s: float = 4.0
    # silence of a node after which its supervisor is looked at over a second connection
    silent_s: float = 4.0
    # silence of a node until a supervisor that is not stopped is reported: a busy node delays it
    unresponsive_s: float = 10.0
    # deadline of that look: a new connection, and 1 s for signs of activity
    look_s: float = 10.0
    # pause before the first restart of a run, and its limit: twice as long each time
    restart_pause_s: float = 1.0
    restart_pause_max_s: float = 60.0
    # from an exception to SIGTERM for the rank that raised it: exit handlers, uploads
    exit_wait_s: float = 1.5
    # longest grace once a node is lost: no collective can finish, and every node is to be empty within 5 s
    lost_node_grace_s: float = 3.0
    # longest grace before the gate has opened: such ranks have nothing to save
    closed_gate_grace_s: float = 2.0
    # from SIGKILL, or the end of a connection, to a node without processes of the run
    empty_s: float = 5.0
    # wait at the end for a second supervisor on a lost node: longer helps only if that node's network is gone too
    sweep_s: float = 2.0


DEFAULT_TIMING = HeadTiming()
