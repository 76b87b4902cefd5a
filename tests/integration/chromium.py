"""A real Chromium without a window, driven through its DevTools protocol, and the terminal that its page holds."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from tests.waiting import until

T = TypeVar("T")

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# The page keeps its terminal to itself: take hold of it when it gets the property that only it has.
_HOLD = """
Object.defineProperty(Object.prototype, "fitAddon", {configurable: true, set(addon) {
    window.held = this;
    Object.defineProperty(this, "fitAddon", {value: addon, writable: true});
}});
"""
_NAVIGATED = "Inspected target navigated or closed"
_TEXT = """
(() => {
    if (!window.held) return "";
    const buffer = window.held.terminal.buffer.active, lines = [];
    for (let i = 0; i < window.held.terminal.rows; i++)
        lines.push(buffer.getLine(buffer.baseY + i)?.translateToString(true, 0, window.held.terminal.cols) ?? "");
    return lines.map(line => line.trimEnd()).join("\\n");
})()
"""
_KEYS = {  # name: key, code, text
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
}


class Navigated(Exception):
    """The page went to another address, or reloaded itself, before it had answered."""


class Browser:
    """One Chromium with one page. Made in ``folder``; ``close`` ends it."""

    def __init__(self) -> None:
        assert PATH is not None
        self._folder = tempfile.mkdtemp(prefix="gpuboard-chromium-")
        flags = [
            "--headless=new", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-pings",
            "--remote-debugging-port=0", f"--user-data-dir={self._folder}", "--window-size=1200,700",
        ]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # which root cannot have
        self._process = subprocess.Popen(
            [PATH, *flags, "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": self._folder},
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        try:
            port = Path(self._folder, "DevToolsActivePort")
            until(lambda: port.exists() and port.read_text().count("\n"), "Chromium opens its port", 60)
            self._session, self._socket = self._do(self._connect(port.read_text().splitlines()[0]))
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as of a window that is in front
            self.call("Page.addScriptToEvaluateOnNewDocument", source=_HOLD)
        except BaseException:
            self._end()
            raise

    def _do(self, what: Awaitable[T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(what, 60))

    async def _connect(self, port: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        return session, await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; return its result. What happens meanwhile goes to ``events``."""
        number = next(self._numbers)

        async def ask() -> dict[str, Any]:
            await self._socket.send_json({"id": number, "method": method, "params": params})
            while True:
                said: dict[str, Any] = await self._socket.receive_json()
                if said.get("id") == number:
                    if said.get("error", {}).get("message") == _NAVIGATED:
                        raise Navigated
                    assert "error" not in said, f"{method}: {said}"
                    result: dict[str, Any] = said["result"]
                    return result
                if "method" in said:
                    self.events.append(said)

        return self._do(ask())

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page; in the next one where the page reloads itself meanwhile."""
        try:
            result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        except Navigated:
            return self.evaluate(script)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        until(lambda: self.evaluate("document.readyState") == "complete" and self.address() != "about:blank", url)

    def address(self) -> str:
        """Return the address in the address bar."""
        return str(self.evaluate("location.href"))

    def text(self) -> str:
        """Return what the page's terminal shows, or the text of a page without one."""
        return str(self.evaluate(_TEXT) or self.evaluate("document.body?.innerText ?? ''"))

    def wait_text(self, *words: str, timeout_s: float = 60) -> str:
        """Wait until the terminal shows all ``words``; return what it shows then."""
        try:
            until(lambda: all(word in self.text() for word in words), f"the page shows {words}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None
        return self.text()

    def keys(self, *names: str) -> None:
        """Press keys: names of ``_KEYS``, or single characters."""
        for name in names:
            key, code, text = _KEYS.get(name, (name, ord(name.upper()[0]), name))
            facts: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
            self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the browser began, websockets included."""
        self.evaluate("0")  # whatever happened until now has been told
        kinds = {"Network.requestWillBeSent", "Network.webSocketCreated"}
        facts = [event["params"] for event in self.events if event["method"] in kinds]
        return [said["request"]["url"] if "request" in said else said["url"] for said in facts]

    def complaints(self) -> list[str]:
        """Return what the browser had to say against the page: errors of scripts and of the content policy."""
        self.evaluate("0")
        said = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        thrown = [str(e["params"]) for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        return thrown + [f"{entry['text']} {entry.get('url', '')}" for entry in said if entry["level"] == "error"]

    def cookies(self) -> list[dict[str, Any]]:
        """Return every cookie that the browser holds."""
        found: list[dict[str, Any]] = self.call("Network.getAllCookies")["cookies"]
        return found

    def picture(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """End the browser and remove what it kept."""
        self._do(self._socket.close())
        self._do(self._session.close())
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)
