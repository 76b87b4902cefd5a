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
#opening { position: absolute; inset: 0; display: grid; place-items: center; z-index: 2; background: #0c181f }
.bar { position: absolute; inset: auto 0 0 0; display: none; gap: 24px; align-items: center; justify-content: center;
  padding: 12px; z-index: 3; background: #12232d; border-top: 1px solid #3b5566 }
button { padding: 8px 20px; border: 1px solid #6f93a8; background: #1d3a4a; cursor: pointer }
body.-first-byte #opening, body.-closed #opening { display: none }
body.-closed #ended, body.-stale #stale { display: flex }
body.-closed #terminal, body.-stale #terminal { opacity: .5; filter: grayscale(1) }
"""

# textual.js reads the websocket's address from the element when the page has loaded. It comes from the address bar:
# only the browser knows the name and port under which it reaches us.
SCRIPT = """
"use strict";
const terminal = document.getElementById("terminal");
terminal.dataset.sessionWebsocketUrl = location.origin.replace(/^http/, "ws") + location.pathname + "ws";
// A connection can hang without being closed. The server sends a heartbeat every 3 s.
let last = Date.now();
window.WebSocket = class extends WebSocket {
  constructor(...words) {
    super(...words);
    this.addEventListener("message", () => { last = Date.now(); });
  }
};
setInterval(() => {
  const age_s = Math.round((Date.now() - last) / 1000);
  document.body.classList.toggle("-stale", age_s >= 8 && !document.body.classList.contains("-closed"));
  document.getElementById("age").textContent = age_s;
}, 1000);
// Focus the terminal, so that keys work without a click; not before the first output: textual.js sends the focus to the
// board, which may not be connected before.
const observer = new MutationObserver(() => {
  if (!document.body.classList.contains("-first-byte")) return;
  observer.disconnect();
  document.querySelector(".xterm-helper-textarea").focus();
});
observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
document.getElementById("again").addEventListener("click", () => location.reload());
"""


def board(title: str, font_size: int) -> str:
    """Return the page with the terminal."""
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
