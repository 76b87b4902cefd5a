"""The script of a lease's job: it holds the GPUs and ends when the lease's heartbeats end. Pure."""

from __future__ import annotations

SILENCE_S = 180  # the job ends after this time without a heartbeat; the keeper sends one every 30 s
PAUSE_S = 15  # between two checks

# Time is counted in checks: clocks of two hosts differ, and a suspended job makes none. Opening the file makes NFS
# revalidate it (close-to-open); `stat` alone may return attributes that are a minute old. ``true`` instead of ``:``,
# because a failed redirection of a special built-in ends the shell. A failed check (automounter, server unreachable)
# counts as one without a heartbeat. The first check is retried for a minute: the home may be mounted only then.
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
    """Return the script of a job that runs while the file ``heartbeat`` is touched; "": until its time limit.

    The script touches ``heartbeat.seen`` (which must exist) once it has seen the file: then the home is shared.
    """
    if not heartbeat:
        return _ENDLESS
    quoted = "'" + heartbeat.replace("'", "'\\''") + "'"
    looks = max(1, round(silence_s / pause_s))
    return _SCRIPT.format(file=quoted, tries=20, first=min(3.0, pause_s), looks=looks, pause=pause_s)
