"""Before the first output on a terminal: let ssh ask for the passwords and codes that hosts require.

The connections opened here are shared with everything that gpuboard starts next, its keeper included. A connection
that needed typing lasts for a minute after its last session, the others for ten seconds.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError
from gpuboard.transport.ssh.command_line import SshRoute, SshRoutes
from gpuboard.transport.ssh.errors import InteractionRequired

if TYPE_CHECKING:
    from gpuboard.config import Settings

_QUIET_S = 1.0  # logins that take longer are shown


def log_in(hosts: Iterable[str], settings: Settings, env: Mapping[str, str], show: Callable[[str], None]) -> None:
    """Open connections to ``hosts`` and their jump hosts; where ssh has to ask, it asks for one host after the other.

    Hosts that fail for another reason are skipped: the next connection to them reports it. Raises ConfigError without
    an ssh program, KeyboardInterrupt on ctrl-C.
    """
    routes = SshRoutes(settings, env)
    try:
        for level in _levels(routes, hosts):
            # hosts behind a jump host that was not reached are skipped: ssh would try it again for each of them
            reachable = [route for route in level if route.via is None or route.via.alive()]
            for route in _interactive(routes, reachable, show):
                _ask(route, routes, show)
    finally:
        routes.detach()


def _levels(routes: SshRoutes, hosts: Iterable[str]) -> list[list[SshRoute]]:
    """Return the routes, each once: first those to hosts reached directly, then those one jump further, …"""
    found: dict[tuple[int, str], SshRoute] = {}
    for host in hosts:
        try:
            route: SshRoute | None = routes.find(host)
        except TransportError:
            continue
        line = []
        while route is not None:
            line.append(route)
            route = route.via
        for depth, step in enumerate(reversed(line)):
            if step.shared is not None:
                found.setdefault((depth, step.shared), step)
    depths = sorted({depth for depth, _ in found})
    return [[route for (of, _), route in found.items() if of == depth] for depth in depths]


def _interactive(routes: SshRoutes, level: list[SshRoute], show: Callable[[str], None]) -> list[SshRoute]:
    """Log in wherever no question is asked, in parallel; return the routes to the other hosts."""
    with ThreadPoolExecutor(max(1, min(len(level), routes.at_a_time))) as pool:
        try:
            asked = [pool.submit(_needs_user, routes, route) for route in level]
            if late := wait(asked, _QUIET_S).not_done:
                names = ", ".join(route.name for route, future in zip(level, asked, strict=True) if future in late)
                show(f"logging in to {clean(names, 200)}")
            return [route for route, future in zip(level, asked, strict=True) if future.result()]
        except BaseException:
            routes.detach()  # ends running logins: the pool waits for them
            raise


def _needs_user(routes: SshRoutes, route: SshRoute) -> bool:
    """Return whether the user must type something before ``route`` can be used; logs in where not."""
    if route.alive():
        return False
    try:
        routes.log_in(route)
    except InteractionRequired:
        return True
    except TransportError as error:
        return error.kind == "auth" and route.may_ask
    return False


def _ask(route: SshRoute, routes: SshRoutes, show: Callable[[str], None]) -> None:
    if route.alive():
        return  # it was another host's jump host, too
    show(f"{clean(route.name, 80)} requires a password, a passphrase or a code:")
    # stdout is not used: `eval "$(gpuboard allocate …)"` would read it. ssh itself asks on /dev/tty.
    code = subprocess.run(route.interactive_login(), stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if not route.alive():
        why = "no answer was accepted" if code == 255 else f"ssh exited with code {code}"
        show(f"{clean(route.name, 80)}: not logged in: {why}")
