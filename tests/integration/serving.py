"""A running `gpuboard serve --web`, for tests that visit it."""

from __future__ import annotations

import http.client
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.integration.here import Here
from tests.waiting import read_line


class Serving:
    """A running `gpuboard serve --web`: its address, its token, what it said on stderr."""

    def __init__(self, here: Here, *args: str, before: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, *here.command("serve", "--web", *args)], env=here.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.url = read_line(self.process).strip()
        self.hint = read_line(self.process).strip()
        self.base, _, self.token = self.url.partition("/?token=")
        self.host = self.base.removeprefix("http://")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def stop(self, number: int = signal.SIGINT) -> int:
        """End it; return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._listener.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        """Ask for a path, with ``headers`` added (or replaced); return status, headers in small letters, and text."""
        name, _, port = self.host.partition(":")
        connection = http.client.HTTPConnection(name, int(port), timeout=60)
        connection.putrequest("GET", path, skip_host=True)
        for key, value in {"Host": self.host, **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            connection.putheader(key, value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, text

    def enter(self) -> tuple[str, str]:
        """Give the token; return the page's path and the cookie's header."""
        status, headers, _ = self.get(f"/?token={self.token}")
        assert status == 303
        return headers["location"], headers["set-cookie"].partition(";")[0]

    def boards(self) -> list[int]:
        """Return the pids of the boards that run."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
