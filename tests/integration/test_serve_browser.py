"""The board in a real browser: it opens, keys work, what is reserved there is in the ledger, other pages stay out."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from tests.integration import chromium
from tests.integration.chromium import Browser
from tests.integration.here import Here, here
from tests.integration.serving import Serving
from tests.nvml import GIB, Gpu
from tests.waiting import until

__all__ = ["here"]


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
    serving = Serving(here, "--port", "0")
    try:
        browser.open(serving.url)
        browser.wait_text("2 free of 3", "Filter")
        assert "token" not in browser.address()
        assert [cookie["httpOnly"] for cookie in browser.cookies()] == [True]
        assert serving.token not in str(browser.cookies())
        drawn = browser.picture()

        browser.keys("?")  # keys work, and without a click into the page first
        browser.wait_text("Flags", "d disputed    claims contradict each other")
        browser.keys("Escape")
        until(lambda: "claims contradict each other" not in browser.text(), "the help is closed")

        browser.keys("r")
        browser.wait_text(f"Reserves {host}:0")
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
        browser.call("Page.reload")
        browser.wait_text("free of 3")
        until(lambda: len(serving.boards()) == 1 and serving.boards() != before, "another board in place of the first")
        browser.keys("q")
        until(lambda: "The board has ended" in str(browser.evaluate("document.body.innerText")), "the page shows it")
        assert browser.evaluate("document.body.classList.contains('-closed')")
        browser.evaluate("document.getElementById('again').click()")
        browser.wait_text("free of 3")

        assert browser.complaints() == []
        asked = {url.split("/")[2] for url in browser.requests() if not url.startswith("data:")}
        assert asked == {serving.host}  # nothing comes from anywhere else
    finally:
        serving.stop()


def test_a_page_without_messages_reports_it_and_turns_grey(here: Here, browser: Browser) -> None:
    serving = Serving(here, "--port", "0")
    try:
        browser.open(serving.url)
        browser.wait_text("free of 2")
        serving.process.send_signal(signal.SIGSTOP)
        until(lambda: browser.evaluate("document.body.classList.contains('-stale')"), "the page shows it")
        assert browser.evaluate("getComputedStyle(document.getElementById('stale')).display") == "flex"
        assert browser.evaluate("getComputedStyle(document.getElementById('terminal')).opacity") == "0.5"
        assert "No data from the server for" in browser.evaluate("document.body.innerText")
        serving.process.send_signal(signal.SIGCONT)
        until(lambda: not browser.evaluate("document.body.classList.contains('-stale')"), "it continues")
        assert browser.evaluate("getComputedStyle(document.getElementById('terminal')).opacity") == "1"
    finally:
        serving.process.send_signal(signal.SIGCONT)
        serving.stop()


def test_another_page_cannot_reach_the_board_through_the_browser(here: Here, browser: Browser) -> None:
    """A page of another port of this machine has the same cookies; it must not get at the board all the same."""
    serving, other = Serving(here, "--port", "0"), Serving(here, "--port", "0")
    try:
        browser.open(serving.url)
        browser.wait_text("free of 2")
        page = browser.address()
        browser.open(other.url)  # whoever serves this sees the cookies that come with it
        browser.wait_text("free of 2")
        sent = [e["params"] for e in browser.events if e["method"] == "Network.requestWillBeSentExtraInfo"]
        said = [str(request["headers"]) for request in sent if other.host in request["headers"].get("Host", "")]
        assert said
        assert not any(serving.enter()[1] in headers for headers in said)
        until(lambda: serving.boards() == [], "the first board has ended with its page")
        opened = """new Promise(done => { const socket = new WebSocket("%sws?width=80&height=24");
            socket.onopen = () => done("open"); socket.onerror = () => done("refused"); })"""
        browser.call("Page.setBypassCSP", enabled=True)  # the other page would not have our policy
        browser.call("Page.reload")
        browser.wait_text("free of 2")
        assert browser.evaluate(opened % page.replace("http", "ws")) == "refused"
        until(lambda: any("Origin is not the board's own page" in line for line in serving.said), "it says why")
        framed = "new Promise(done => { const f = document.createElement('iframe'); f.onload = () => done(1); "
        browser.evaluate(framed + f"f.src = '{page}'; document.body.append(f); }})")
        assert serving.boards() == []
    finally:
        serving.stop()
        other.stop()
