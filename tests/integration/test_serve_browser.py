"""The board in a real browser: it opens, keys work, what is reserved there is in the ledger, other pages stay out."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from functools import partial

import pytest
from textual.color import Color

from gpuboard.board.theme import themes
from tests.integration import chromium
from tests.integration.chromium import Browser
from tests.integration.here import Here
from tests.integration.serving import Serving
from tests.nvml import GIB, Gpu
from tests.waiting import until


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A Chromium."""
    if chromium.PATH is None:
        pytest.skip("needs chromium")
    running = Browser()
    yield running
    running.close()


def test_the_board_in_a_browser(here: Here, browser: Browser) -> None:
    claims = here.needs_claims()
    host = socket.gethostname().partition(".")[0]
    free = here.gpus([Gpu(), Gpu(used=5 * GIB), Gpu()])
    here.config('theme = "light"\n')
    serving = Serving(here, "--port", "0")
    try:
        browser.resize(1920, 1080)
        browser.open(serving.url)
        browser.wait_text("2 free of 3", "Filter")
        for size in ((1920, 1080), (2560, 1393), (1203, 711)):
            browser.resize(*size)
            until(partial(covers, browser, *size), "the terminal fills the page")
            scrolled = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            assert browser.evaluate(scrolled) == [*size]  # nothing to scroll
        box = "(r => [r.width, r.height])(document.querySelector('.xterm-viewport').getBoundingClientRect())"
        assert browser.evaluate(box) == [*size]  # also beside the cells the page has the theme's background
        light = themes.load_all(here.env)[0]["light"].textual.background
        colour = browser.evaluate("getComputedStyle(document.querySelector('.xterm-viewport')).backgroundColor")
        assert light is not None
        assert Color.parse(colour) == Color.parse(light)
        assert "token" not in browser.address()
        assert [cookie["httpOnly"] for cookie in browser.cookies()] == [True]
        assert serving.token not in str(browser.cookies())
        drawn = browser.picture()

        browser.keys("?")  # keys work, and without a click into the page first
        browser.wait_text("Cluster", "cluster.sort")
        browser.keys("Escape")
        until(lambda: "cluster.sort" not in browser.text(), "the help is closed")

        browser.keys("r")
        browser.wait_text(f"Will reserve {host} GPU 0")
        browser.keys("Enter")
        browser.wait_text("Reserved: ", "1 reserved")
        (lease,) = here.json("leases", "--json")["leases"]
        assert [gpu["uuid"] for gpu in lease["gpus"]] == [free[0].uuid]
        assert [claim.name for claim in claims.glob("gpuboard.*")] == [f"gpuboard.{free[0].uuid}.{lease['id']}"]

        browser.evaluate("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
        browser.keys("y")
        browser.wait_text("Copy", "CUDA_VISIBLE_DEVICES")
        browser.keys("Enter")
        until(lambda: browser.evaluate("window.copied ?? ''"), "something is in the browser's clipboard")
        assert free[0].uuid in browser.evaluate("window.copied")

        browser.resize(700, 500)  # the board follows the page
        until(lambda: max(map(len, browser.text().splitlines())) < 90, "the board is as wide as the page")
        assert browser.picture() != drawn

        before = serving.boards()
        browser.keys("q")
        until(lambda: "The board has ended" in str(browser.evaluate("document.body.innerText")), "the page shows it")
        assert browser.evaluate("document.body.classList.contains('-closed')")
        browser.evaluate("document.getElementById('again').click()")
        browser.wait_text("free of 3")
        until(lambda: len(serving.boards()) == 1 and serving.boards() != before, "another board in place of the first")

        assert browser.complaints() == []
        asked = {url.split("/")[2] for url in browser.requests() if not url.startswith("data:")}
        assert asked == {serving.host}  # nothing comes from anywhere else
    finally:
        serving.stop()


def test_a_page_turns_grey_without_messages_and_finds_a_server_again_that_is_gone(here: Here, browser: Browser) -> None:
    file = here.folder / "token"
    serving = Serving(here, "--port", "0", "--token-file", str(file))
    port = serving.host.rpartition(":")[2]
    try:
        browser.open(f"{serving.base}/?token={file.read_text().strip()}")
        browser.wait_text("free of 2")
        serving.process.send_signal(signal.SIGSTOP)
        until(lambda: browser.evaluate("document.body.classList.contains('-stale')"), "the page shows it")
        assert browser.evaluate("getComputedStyle(document.getElementById('stale')).display") == "flex"
        assert browser.evaluate("getComputedStyle(document.getElementById('terminal')).opacity") == "0.5"
        assert "No data from the server for" in browser.evaluate("document.body.innerText")
        serving.process.send_signal(signal.SIGCONT)
        until(lambda: not browser.evaluate("document.body.classList.contains('-stale')"), "it continues")
        assert browser.evaluate("getComputedStyle(document.getElementById('terminal')).opacity") == "1"
        resumed = "ticked = last = Date.now() - 60000, tick(), document.body.className"  # as after a laptop's sleep
        assert browser.evaluate(resumed) == "-loaded -first-byte"

        server_ends(serving, signal.SIGKILL, browser)  # without a word
        browser.evaluate("next = 0, 0")
        serving = Serving(here, "--port", port, "--token-file", str(file))
        browser.evaluate("next = 0, 0")
        until(lambda: browser.evaluate("document.body?.className ?? ''") == "-loaded -first-byte", "it is back")
        browser.wait_text("free of 2")
        assert browser.evaluate("sessionStorage.getItem('attempts')") is None

        server_ends(serving, signal.SIGTERM, browser)  # in order
        browser.evaluate("next = 0, 0")
        file.unlink()
        serving = Serving(here, "--port", port, "--token-file", str(file))
        browser.evaluate("next = 0, 0")
        until(lambda: "another token: open the URL" in shown(browser), "the page explains why it does not open")
        browser.evaluate("document.getElementById('now').click()")
        assert is_gone(browser)
    finally:
        serving.process.send_signal(signal.SIGCONT)
        serving.stop()


def server_ends(serving: Serving, number: int, browser: Browser) -> None:
    """End the server by a signal; the page shows it, and looks for it less often each time."""
    serving.stop(number)
    until(lambda: is_gone(browser), "the page shows it")
    assert "The server does not respond." in shown(browser)
    assert re.search(r"What you see is from \d\d:\d\d:\d\d, \d+ s ago", shown(browser))
    assert not browser.evaluate("document.body.classList.contains('-ended')")
    before = pages(browser)
    until(lambda: browser.evaluate("attempts") >= 3, "it has looked twice")
    assert pages(browser) - before <= browser.evaluate("attempts")
    assert browser.evaluate("attempts = 9, wait(), (next - Date.now()) / 1000 > 25")


def is_gone(browser: Browser) -> bool:
    return bool(browser.evaluate("document.body?.classList.contains('-gone')"))


def shown(browser: Browser) -> str:
    return str(browser.evaluate("document.getElementById('gone').innerText"))


def pages(browser: Browser) -> int:
    """Return how often the page itself was asked for."""
    return sum(url.endswith("/") and url.startswith("http") for url in browser.requests())


def covers(browser: Browser, width: int, height: int) -> bool:
    """Return whether less than a cell is left at the right and at the bottom."""
    box = "(r => [r.width, r.height])(document.querySelector('.xterm-screen').getBoundingClientRect())"
    cell = "[window.held.terminal.cols, window.held.terminal.rows]"
    (wide, high), (columns, rows) = browser.evaluate(box), browser.evaluate(cell)
    return bool(0 <= width - wide < wide / columns and 0 <= height - high < high / rows)


def test_another_page_cannot_reach_the_board_through_the_browser(here: Here, browser: Browser) -> None:
    """A page of another port of this machine has the same cookies; it must not get at the board all the same."""
    serving, other = Serving(here, "--port", "0"), Serving(here, "--port", "0")
    try:
        browser.open(serving.url)
        browser.wait_text("free of 2")
        page = browser.address()
        browser.call("Page.setBypassCSP", enabled=True)  # the other page would not have our policy
        browser.open(other.url)  # whoever serves this sees the cookies that come with it
        browser.wait_text("free of 2")
        sent = [e["params"] for e in browser.events if e["method"] == "Network.requestWillBeSentExtraInfo"]
        said = [str(request["headers"]) for request in sent if other.host in request["headers"].get("Host", "")]
        assert said
        assert not any(serving.enter()[1] in headers for headers in said)
        until(lambda: serving.boards() == [], "the first board has ended with its page")
        opened = """new Promise(done => { const socket = new WebSocket("%sws?width=80&height=24");
            socket.onopen = () => done("open"); socket.onerror = () => done("refused"); })"""
        assert browser.evaluate(opened % page.replace("http", "ws")) == "refused"
        until(lambda: any("Origin is not the board's own page" in line for line in serving.said), "it says why")
        framed = "new Promise(done => { const f = document.createElement('iframe'); f.onload = () => done(1); "
        browser.evaluate(framed + f"f.src = '{page}'; document.body.append(f); }})")
        assert serving.boards() == []
    finally:
        serving.stop()
        other.stop()
