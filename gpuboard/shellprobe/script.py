"""What reads a node without python3: a few lines of POSIX shell that run nvidia-smi, and the frames they answer in.

The login shell starts ``sh``, which reads these lines from its stdin, so that they need no quoting and are in no list
of processes. GUARD (bundle.py) goes before them, the nonce after them; then every line is one request:

    ARGUMENTS     run nvidia-smi with these and describe the processes that its output lists
    (empty)       kill the nvidia-smi that runs; its frame follows when it has ended

End-of-file kills nvidia-smi and ends the shell. Each request is answered by one frame, and the client sends the next
one after it: nvidia-smi may hang, and then a second one must not be started. A frame is a series of sections:

    @NONCE messages   nvidia-smi's standard error
    @NONCE listing    its standard output
    @NONCE names, groups, stats, args, users   of the processes, from /proc, ps and getent
    @NONCE host       clock, load, memory and processor times
    @NONCE end CODE   nvidia-smi's exit code

The first frame has the section ``hello`` (host name, user, boot id and cgroup), or ``none`` where there is no
nvidia-smi. No file is written.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import process as smi_child
from gpuboard.transport.bundle import GUARD
from gpuboard.transport.exit_errors import STDIN_READ

LISTING = "-q -x"  # the request for nvidia-smi's XML
_CSV = "--format=csv,noheader,nounits"
APPS = f"--query-compute-apps={','.join(smi.APPS)} {_CSV}"
KILL = ""
NOISE_LIMIT = 64 * 1024  # bytes of the first frame and of the output of shell start-up files before it

# One line in single quotes, of characters without a meaning in sh, csh and fish alike.
_CHECK = f'read -r g; [ "$g" = "{GUARD.decode().strip()}" ] || exit {STDIN_READ}'
COMMAND = f"exec sh -c '{_CHECK}; IFS= read -r s && eval \"$s\"'"

# A pass runs in its own process, $p, so that requests and end-of-file are read meanwhile. nvidia-smi is its child, and
# `of` lists its children; `own` checks that $p is still a child of this shell, not another process with a reused pid.
# $p is stopped before it is killed: it could start nvidia-smi after its children were listed.
# PIDs come from the XML or the rows of APPS. A process's name can add PIDs; their descriptions are ignored.
# grep prints file names when it gets two files or more.
_LINES = r"""
IFS= read -r n || exit 0; export LC_ALL=C; exec 4>&1;
part() { echo; echo "@$n $*"; };
m=$(command -v nvidia-smi) || for d in @FOLDERS@; do [ -x "$d/nvidia-smi" ] && m=$d/nvidia-smi && break; done;
case $m in /*) w=hello ;; *) w=none ;; esac;
host() { part host; echo "at $(date +%s)"; echo "hz $(getconf CLK_TCK)"; grep "" /proc/loadavg;
grep -E "^(cpu|btime) " /proc/stat; grep -E "^Mem(Total|Available):" /proc/meminfo; };
part $w; echo "hostname $(uname -n)"; echo "uid $(id -u)"; echo "user $(id -un 2>/dev/null)"; echo "pid $$";
echo "boot $(cat /proc/sys/kernel/random/boot_id)"; cat /proc/self/cgroup; host 2>/dev/null; part end 0;
[ $w = none ] && exit 0;
pids() { sed -n 's/.*<pid>\([0-9]\{1,10\}\)<.*/\1/p; s/^GPU-[^,]*, *\([0-9]\{1,10\}\),.*/\1/p' | sed 8192q | sort -u; };
pass() { part messages; x=$(exec "$m" "$@" 2>&4); r=$?; part listing; printf "%s\n" "$x";
a=; s=; g=; t=; for i in $(printf "%s\n" "$x" | pids); do
a=$a,$i; s="$s /proc/$i/status"; g="$g /proc/$i/cgroup"; t="$t /proc/$i/stat"; done;
part names; grep -E "^(Name|Uid):" $s /dev/null /dev/null; part groups; grep "" $g /dev/null /dev/null;
part stats; grep "" $t /dev/null /dev/null; part args; [ "$a" ] && ps -ww -o pid= -o args= -p "${a#,}";
part users; u=$(sed -n 's/^Uid:[^0-9]*\([0-9]*\).*/\1/p' $s /dev/null | sort -u); [ "$u" ] && getent passwd $u;
host; part end $r; };
own() { [ "$p" ] && grep -q "^PPid:.$$\$" /proc/$p/status 2>/dev/null; };
of() { grep -l "^PPid:.$p\$" /proc/[0-9]*/status 2>/dev/null | sed 's/[^0-9]//g'; };
p=; while read -r c; do case $c in
"") own && kill -9 $(of) 2>/dev/null ;;
*) ( pass $c ) 2>/dev/null & p=$! ;;
esac; done; own && kill -STOP $p && kill -9 $(of) $p 2>/dev/null; exit 0
"""
SCRIPT = GUARD + " ".join(_LINES.replace("@FOLDERS@", " ".join(smi_child.FOLDERS)).split("\n")).strip().encode() + b"\n"


def query(fields: list[str]) -> str:
    """Return the request for ``fields`` of all GPUs as csv."""
    return f"--query-gpu={','.join(fields)} {_CSV}"


class MalformedFrame(Exception):
    """Output that cannot be a frame; the text is the reason."""


class ShellFrame(NamedTuple):
    """One answer: its sections by name, and nvidia-smi's exit code (-1: unreadable)."""

    sections: dict[str, bytes]
    code: int


class Frames:
    """Splits a stream into frames. Lines with ``@`` and the nonce mark sections, all others are content or noise."""

    def __init__(self, nonce: bytes) -> None:
        self._mark = b"\n@" + nonce + b" "
        self._limit = NOISE_LIMIT
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer known to contain no end of a frame

    def take(self, data: bytes) -> list[ShellFrame]:
        """Return the frames that ``data`` completes. Raises MalformedFrame."""
        self._buffer += data
        found = []
        last = self._mark + b"end "
        while (at := self._buffer.find(last, self._scanned)) >= 0:
            self._scanned = at
            end = self._buffer.find(b"\n", at + 1)
            if end < 0:
                break
            _, *parts = bytes(self._buffer[:at]).split(self._mark)
            code = bytes(self._buffer[at + len(last) : end])
            pairs = [part.partition(b"\n") for part in parts]
            sections = {name.decode("ascii", "replace"): text for name, _, text in pairs}
            found.append(ShellFrame(sections, int(code) if code.isdigit() and len(code) < 4 else -1))
            del self._buffer[:end]
            self._scanned = 0
            self._limit = 2 * smi.LIMIT
        else:
            self._scanned = max(self._scanned, len(self._buffer) - len(last))
        if len(self._buffer) > self._limit:
            noisy = self._limit == NOISE_LIMIT
            raise MalformedFrame(
                "the node's shell start-up files print more than 64 kB" if noisy else "an answer without end"
            )
        return found
