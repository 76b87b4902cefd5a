"""How the keeper reaches the nodes of its leases: claims of this host directly, everything else through an agent.

With local leases only, and while their holders are alive, the keeper needs only the standard library. It loads the
transports for a remote node, and to find the processes on the GPUs of a local one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from gpuboard.agent.claims import store as claims
from gpuboard.keeper.daemon.calls import Calls, NodeAnswer, Report
from gpuboard.keeper.record import KeptNode, LeaseRecord, login_of
from gpuboard.keeper.timing import KeeperTiming

if TYPE_CHECKING:
    from gpuboard.transport.connector import Connector
    from gpuboard.transport.link import AgentLink

_LOGINS = 8  # remembered at most


def node_key(node: KeptNode, settings: dict[str, Any]) -> str:
    """Return the identity of a node: leases on one node share its connection."""
    reach = settings if node.host is not None else {}
    return json.dumps([node.name, node.host, node.claims_dir, node.simulate, node.job, reach], sort_keys=True)


class Logins:
    """The logins in which leases were reserved. A keeper outlives the login that started it and its ssh agent."""

    def __init__(self, timing: KeeperTiming) -> None:
        self._timeout_s = timing.ssh_agent_s
        self._lock = threading.Lock()
        self._known = [login_of(os.environ)]

    def add(self, login: dict[str, str]) -> None:
        """Add the newest login. One without ssh agent and tickets, such as a cron job, uses those of the others."""
        if login:
            with self._lock:
                self._known = [*[other for other in self._known if other != login][-_LOGINS:], login]

    def use(self) -> str:
        """Put the newest login whose ssh agent answers into the environment; return its key."""
        with self._lock:
            login = next(
                (known for known in reversed(self._known) if _answers(known, self._timeout_s)), self._known[-1]
            )
            os.environ.update(login)
        return json.dumps(login, sort_keys=True)


def _answers(login: dict[str, str], timeout_s: float) -> bool:
    """Return whether the ssh agent of a login accepts connections, True for a login without one."""
    if "SSH_AUTH_SOCK" not in login:
        return True
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(timeout_s)
        try:
            agent.connect(login["SSH_AUTH_SOCK"])
        except OSError:
            return False
    return True


class Connectors:
    """Connectors, created on first use: one for all nodes with the same settings and login."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins
        self._known: dict[str, Connector] = {}

    def get(self, settings: dict[str, Any]) -> Connector:
        """Return the connector for ``settings``. Raises ImportError, and ValueError for wrong settings."""
        import msgspec  # late, as the rest: 40 ms and several MB that a keeper of local leases saves

        from gpuboard.config import Settings
        from gpuboard.model.decoding import convert
        from gpuboard.transport.connector import Connector

        key = json.dumps(settings, sort_keys=True) + self._logins.use()
        if key not in self._known:
            try:
                self._known.setdefault(key, Connector(convert(settings, Settings)))
            except msgspec.ValidationError as error:
                raise ValueError(f"settings: {error}") from None
        return self._known[key]


class NodeCalls(Calls):
    """Calls to one node. A connection to another machine stays open, an agent on this one for some seconds."""

    def __init__(self, node: KeptNode, record: LeaseRecord, connectors: Connectors, timing: KeeperTiming) -> None:
        """``record``: of the first lease there."""
        super().__init__(node.name, timing.heartbeat_s)
        self.idle_s = timing.agent_linger_s if node.host is None else None
        self._timing = timing
        self._node = node
        self._settings = record.settings
        self._rounds = record.rounds
        self._connectors = connectors
        plain = node.host is None and node.simulate is None
        self._folder = claims.Folder(node.claims_dir) if plain else None
        self._link: AgentLink | None = None

    def call(self, op: str, args: dict[str, Any], report: Report) -> None:
        """Call the node; claims of this host are answered at once, without a thread. Never raises."""
        if self._folder is None or op not in claims.OPS:
            super().call(op, args, report)
            return
        try:
            report(NodeAnswer(claims.handle(op, args, self._folder)))
        except claims.Refuse as refused:
            report(NodeAnswer(None, refused.kind, refused.message))

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        from gpuboard.transport.base import CallFailed

        try:
            import msgspec

            from gpuboard.model.replies import Carriers, Read, ReleasedClaims, Touched

            kinds: dict[str, type[msgspec.Struct]] = {
                "touch": Touched,
                "release": ReleasedClaims,
                "read": Read,
                "carriers": Carriers,
            }
            timeout_s = self._timing.call_s
            if self._link is None or self._link.over is not None:
                self._link = self._connect()
                timeout_s *= self._rounds
            return NodeAnswer(msgspec.to_builtins(self._link.call(op, args, timeout_s, kinds[op])))
        except CallFailed as error:
            return NodeAnswer(None, error.kind, error.message)
        except Exception as error:  # any failure of a node or a library: the thread must answer the next call
            over = self._link.over if self._link is not None else None
            if over is not None and over.kind == "no-job" and self._node.job is not None:
                return _without_job(op, args, str(error))
            self._disconnect()
            return NodeAnswer(None, "lost", str(error))

    def _connect(self) -> AgentLink:
        config = {
            "node": self.name,
            "interval_s": None,
            "claims_dir": self._node.claims_dir,
            "simulate": self._node.simulate,
            "now": False,
        }
        connector = self._connectors.get(self._settings)
        return connector.open(
            self.name,
            self._node.host,
            role="node",
            config=config,
            listener=_ignore,
            ended=_ignore,
            job=self._node.job,
        )


def _without_job(op: str, args: dict[str, Any], error: str) -> NodeAnswer:
    """Return the answer for a node that was reached through a job that has ended: nothing of it is left there."""
    if op == "touch":
        return NodeAnswer({"alive": [], "lapsed": [], "missing": args["leases"]})
    if op == "carriers":
        return NodeAnswer({"processes": []})
    return NodeAnswer({}) if op == "read" else NodeAnswer(None, "not-found", error)


def _ignore(_: object) -> None:
    """Ignore readings and the end of a link, which the next call detects."""
