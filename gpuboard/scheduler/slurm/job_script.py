"""The script of a lease's job: it holds the GPUs and ends when nobody shows life for the lease any more. Pure."""

from __future__ import annotations

SILENCE_S = 180  # without a sign of life for so long the job ends; the keeper gives one every 30 s
PAUSE_S = 15  # between two looks

# Time is counted in looks, never compared: clocks of two hosts differ, and a job that was suspended has seen nothing.
# To open a file makes NFS ask its server (close-to-open); `stat` alone may be told what was so a minute ago.
# ``true`` and not ``:``, for which a redirection that fails would end the shell. A look that fails (an automounter, a
# server that is away) is one without a sign of life. The first one has a minute: the home may be mounted only then.
_SCRIPT = """\
#!/bin/sh
# gpuboard: this job holds GPUs for a lease. It ends by itself when the process that reserved them has gone.
file={file}
look() {{ true 2>/dev/null <"$file" && stat -c %y -- "$file" 2>/dev/null; }}
seen=$(look)
tries=0
while [ -z "$seen" ] && [ "$tries" -lt {tries} ]; do
    sleep {first}
    seen=$(look)
    tries=$((tries + 1))
done
if [ -z "$seen" ]; then  # the home is not shared with this node: until the job's time limit
    while :; do sleep 86400; done
fi
touch -c -- "$file.seen" 2>/dev/null
silent=0
while [ "$silent" -lt {looks} ]; do
    sleep {pause}
    now=$(look)
    if [ -n "$now" ] && [ "$now" != "$seen" ]; then
        seen=$now silent=0
    else
        silent=$((silent + 1))
    fi
done
"""
_ENDLESS = """\
#!/bin/sh
# gpuboard: this job holds GPUs for a lease until its time limit (--detach).
while :; do sleep 86400; done
"""


def script(heartbeat: str, silence_s: float = SILENCE_S, pause_s: float = PAUSE_S) -> str:
    """Return the script of a job that lives as long as the file ``heartbeat`` is touched; "": until its time limit.

    The script touches ``heartbeat.seen`` (which must be there) when it has seen the file: the home is shared then.
    """
    if not heartbeat:
        return _ENDLESS
    quoted = "'" + heartbeat.replace("'", "'\\''") + "'"
    looks = max(1, round(silence_s / pause_s))
    return _SCRIPT.format(file=quoted, tries=20, first=min(3.0, pause_s), looks=looks, pause=pause_s)
