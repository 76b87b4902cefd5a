"""The pages of the board in a browser, and the headers of every response: nothing is loaded from other hosts."""

from __future__ import annotations

from html import escape

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; connect-src 'self'; font-src 'self'; img-src 'self' data:; "
        "style-src 'self' 'unsafe-inline'; "  # the terminal writes its cell sizes into style elements
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # the board writes to the clipboard when asked to, and never reads it
    "Permissions-Policy": "clipboard-read=(), camera=(), microphone=(), geolocation=(), display-capture=()",
    "Cache-Control": "no-store",
    "Server": "gpuboard",
}

STYLE = """
@font-face { font-family: "Roboto Mono"; font-weight: 100 700;
  src: url("static/fonts/RobotoMono-VariableFont_wght.ttf") }
html, body { margin: 0; height: 100%; background: #0c181f; overflow: hidden }
body, button { font: 16px "Roboto Mono", monospace; color: #e8eef2 }
#terminal { position: absolute; inset: 0 }
#terminal .xterm { height: 100% }
#terminal .xterm-viewport { overflow: hidden; scrollbar-width: none }
#opening { position: absolute; inset: 0; display: grid; place-items: center; z-index: 2; background: #0c181f }
#gone { position: absolute; inset: 0; display: none; place-items: center; z-index: 4; background: #0c181fb0 }
#gone div { max-width: 640px; margin: 16px; padding: 24px 32px; line-height: 1.6; background: #12232d;
  border: 1px solid #3b5566 }
#gone button { margin-left: 16px }
.bar { position: absolute; inset: auto 0 0 0; display: none; gap: 24px; align-items: center; justify-content: center;
  padding: 12px; z-index: 3; background: #12232d; border-top: 1px solid #3b5566 }
button { padding: 8px 20px; border: 1px solid #6f93a8; background: #1d3a4a; cursor: pointer }
body.-first-byte #opening, body.-closed #opening { display: none }
body.-ended #ended, body.-stale #stale { display: flex }
body.-gone #gone { display: grid }
body.-closed #terminal, body.-gone #terminal, body.-stale #terminal { opacity: .5; filter: grayscale(1) }
"""

# textual.js reads the websocket's address from the element when the page has loaded. It comes from the address bar:
# only the browser knows the name and port under which it reaches us.
SCRIPT = """
"use strict";
const terminal = document.getElementById("terminal");
terminal.dataset.sessionWebsocketUrl = location.origin.replace(/^http/, "ws") + location.pathname + "ws";
const put = (id, text) => { document.getElementById(id).textContent = text; };
const has = (name) => document.body.classList.contains(name);
// A connection can hang without being closed. The server sends a heartbeat every 3 s.
let last = Date.now();
window.WebSocket = class extends WebSocket {
  constructor(...words) {
    super(...words);
    this.addEventListener("message", () => { last = Date.now(); });
    this.addEventListener("close", (event) => {
      if (event.code === ENDED) document.body.classList.add("-ended");
      else lose();
    });
  }
};
// The server is gone: look for it, less often each time, and open the board again when it is back. Attempts are counted
// beyond a reload, as the page can be served while every board fails.
let attempts = Number(sessionStorage.getItem("attempts")), next = 0, looking = false, trouble = "";
function lose() {
  if (has("-gone") || has("-ended")) return;
  document.body.classList.add("-gone");
  put("since", new Date(last).toLocaleTimeString([], {hour12: false}));
  wait();
  tick();
}
function wait() {
  const delay_s = Math.min(MOST_S, 2 ** attempts) * (1 + Math.random() / 4);  // not all pages at once
  attempts = Math.min(attempts + 1, 10);
  sessionStorage.setItem("attempts", attempts);
  next = Date.now() + 1000 * delay_s;
}
async function look() {
  looking = true;
  try {
    const answer = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(10000)});
    if (answer.ok) return location.reload();
    trouble = answer.status === 403 ? "It is back with another token: open the URL that it has printed."
      : answer.status === 503 ? "It is back, with as many boards open as it allows."
      : `It responds with status ${answer.status}.`;
  } catch {
    trouble = "";
  }
  looking = false;
  wait();
}
let ticked = Date.now();
function tick() {
  const age_s = Math.round((Date.now() - last) / 1000);
  const suspended = Date.now() - ticked > 5000;  // messages that wait are read before the next tick
  ticked = Date.now();
  document.body.classList.toggle("-stale", age_s >= 8 && !suspended && !has("-ended") && !has("-gone"));
  put("age", age_s);
  if (age_s >= LOST_S && !suspended && !has("-ended") && has("-first-byte")) lose();
  if (!has("-gone")) return;
  put("for", age_s < 120 ? `${age_s} s` : `${Math.round(age_s / 60)} min`);
  put("trouble", trouble);
  const left_s = Math.max(0, Math.ceil((next - Date.now()) / 1000));
  put("next", looking ? "Looking for it now" : `Looking for it again in ${left_s} s`);
  if (!looking && Date.now() >= next) look();
}
setInterval(tick, 1000);
for (const event of ["online", "focus"]) addEventListener(event, () => { if (has("-gone") && !looking) look(); });
// Focus the terminal, so that keys work without a click; not before the first output: textual.js sends the focus to the
// board, which may not be connected before.
const observer = new MutationObserver(() => {
  if (!document.body.classList.contains("-first-byte")) return;
  observer.disconnect();
  attempts = 0;
  sessionStorage.removeItem("attempts");
  document.querySelector(".xterm-helper-textarea").focus();
});
observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
document.getElementById("now").addEventListener("click", () => { if (!looking) look(); });
document.getElementById("again").addEventListener("click", () => location.reload());
"""


ENDED = 4000  # the websocket's close code when the board has ended; any other code: the server is gone
_VALUES = {"ENDED": ENDED, "MOST_S": 30, "LOST_S": 30}  # seconds between attempts at most; without data until "gone"
SCRIPT = "".join(f"const {name} = {value};\n" for name, value in _VALUES.items()) + SCRIPT


def board(title: str, font_size: int) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/css/xterm.css">
<link rel="stylesheet" href="board.css">
<link rel="preload" href="static/fonts/RobotoMono-VariableFont_wght.ttf" as="font" crossorigin>
<script src="static/js/textual.js"></script>
</head>
<body>
<div id="opening">opening the board …</div>
<div id="stale" class="bar"><span>No data from the server for <span id="age"></span> s: this page is stale.</span></div>
<div id="gone" role="alert"><div><b>The server does not respond.</b><br>
What you see is from <span id="since"></span>, <span id="for"></span> ago.<br><span id="trouble"></span>
<span id="next"></span>. <button id="now" type="button">Look now</button></div></div>
<div id="ended" class="bar">The board has ended. <button id="again" type="button">Open it again</button></div>
<div id="terminal" class="textual-terminal" data-font-size="{font_size}"></div>
<script src="board.js"></script>
</body>
</html>
"""


def words(title: str, text: str, link: str = "") -> str:
    """Return a page with ``text``; with ``link`` it redirects there."""
    onward = f'<meta http-equiv="refresh" content="0; url={escape(link)}">' if link else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>{onward}</head>\n'
        f"<body><h1>{escape(title)}</h1><p>{escape(text)}</p></body></html>\n"
    )
