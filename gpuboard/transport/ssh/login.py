"""On a terminal, before anything else is shown: let ssh ask for the passwords and codes that hosts want.

The connections opened here are shared: what gpuboard starts next goes over them, its keeper included. One that a
person has typed something for lasts for a minute after its last session, the others for ten seconds.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError
from gpuboard.transport.ssh.command_line import SshRoute, Ways
from gpuboard.transport.ssh.errors import Asking

if TYPE_CHECKING:
    from gpuboard.config import Settings

_PATIENCE_S = 1.0  # before it is said who is waited for


def log_in(hosts: Iterable[str], settings: Settings, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Open connections to ``hosts`` and the jump hosts before them; where ssh has to ask it does, one after the other.

    What cannot be reached without being asked for anything is left alone: whoever connects next says why. Raises
    ConfigError without an ssh, KeyboardInterrupt when the person at the terminal has had enough.
    """
    ways = Ways(settings, env)
    try:
        for level in _levels(ways, hosts):
            # a jump host that was not reached leads nowhere; ssh would knock at it again for every host behind it
            open_to = [way for way in level if way.via is None or way.via.alive()]
            for way in _wanting(ways, open_to, say):
                _ask(way, ways, say)
    finally:
        ways.keep()


def _levels(ways: Ways, hosts: Iterable[str]) -> list[list[SshRoute]]:
    """Return the ways, each once: first those to what is reached directly, then those one jump further, …"""
    found: dict[tuple[int, str], SshRoute] = {}
    for host in hosts:
        try:
            way: SshRoute | None = ways.find(host)
        except TransportError:
            continue
        line = []
        while way is not None:
            line.append(way)
            way = way.via
        for depth, step in enumerate(reversed(line)):
            if step.shared is not None:
                found.setdefault((depth, step.shared), step)
    depths = sorted({depth for depth, _ in found})
    return [[way for (of, _), way in found.items() if of == depth] for depth in depths]


def _wanting(ways: Ways, level: list[SshRoute], say: Callable[[str], None]) -> list[SshRoute]:
    """Log in wherever nobody has to be asked, all at a time; return the ways to the rest."""
    with ThreadPoolExecutor(max(1, min(len(level), ways.at_a_time))) as pool:
        try:
            asked = [pool.submit(_asks, ways, way) for way in level]
            if late := wait(asked, _PATIENCE_S).not_done:
                names = ", ".join(way.name for way, future in zip(level, asked, strict=True) if future in late)
                say(f"logging in to {clean(names, 200)}")
            return [way for way, future in zip(level, asked, strict=True) if future.result()]
        except BaseException:
            ways.keep()  # what logs in ends; the pool would be waited for
            raise


def _asks(ways: Ways, way: SshRoute) -> bool:
    """Return whether a person must answer something before ``way`` can be used; logs in where not."""
    if way.alive():
        return False
    try:
        ways.log_in(way)
    except Asking:
        return True
    except TransportError as error:
        return error.kind == "auth" and way.may_ask
    return False


def _ask(way: SshRoute, ways: Ways, say: Callable[[str], None]) -> None:
    if way.alive():
        return  # it was another host's jump host, too
    say(f"{clean(way.name, 80)} wants a password, a passphrase or a code:")
    # not through our stdout: `eval "$(gpuboard allocate …)"` would read it. ssh itself asks at /dev/tty.
    code = subprocess.run(way.asking(), stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if not way.alive():
        why = "no answer was accepted" if code == 255 else f"ssh ended with exit code {code}"
        say(f"{clean(way.name, 80)}: not logged in: {why}")
