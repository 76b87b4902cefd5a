"""What stands in for the agent on a node without python3: a few lines of POSIX shell that ask nvidia-smi and /proc.

The login shell, whatever it is, starts ``sh``, which reads these lines from its stdin, so that they need no quoting and
are in nobody's list of processes. Before them goes GUARD (bundle.py), after them the nonce, then one request a line;
end-of-file ends all of it. Answers:

    @NONCE hello start         lines ``hostname …, uid …, user …, pid …, boot …``, its cgroups, ``@NONCE hello end 0``
    q                          @NONCE q xml, what ``nvidia-smi -q -x`` prints, @NONCE q end CODE
    e                          @NONCE e messages, what it prints to standard error, @NONCE e end CODE
    c FIELDS                   @NONCE c rows, those of its query, @NONCE c apps, …, @NONCE c end CODE
    p PID…                     @NONCE p names, …, groups, stats, args, users, host: of these processes; @NONCE p end 0
    k                          ends the nvidia-smi that runs; its answer ends when it has ended

One of q, e and c is asked at a time: nvidia-smi may hang, and then there must be no second one. Where there is no
nvidia-smi the hello is ``@NONCE none start``. Nothing is written to any file.
"""

from __future__ import annotations

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import process as smi_child
from gpuboard.transport.bundle import GUARD
from gpuboard.transport.exit_errors import STDIN_READ

# One line in single quotes, of characters that mean nothing to sh, csh and fish alike.
_CHECK = f'read -r g; [ "$g" = "{GUARD.decode().strip()}" ] || exit {STDIN_READ}'
COMMAND = f"exec sh -c '{_CHECK}; IFS= read -r s && eval \"$s\"'"

# `wait` ends at a signal that is trapped; the second one waits for a process that even SIGKILL does not end at once.
# The signal may come before the trap knows whom to kill, and after it nothing else is started: so k is looked at, too.
# What has ended may have left its number to somebody else's process: only a child of ours is signalled.
# grep names the files whose lines it prints when there are two of them or more.
_LINES = r"""
IFS= read -r n || exit 0; export LC_ALL=C;
say() { echo; echo "@$n $*"; };
m=$(command -v nvidia-smi) || for d in @FOLDERS@; do [ -x "$d/nvidia-smi" ] && m=$d/nvidia-smi && break; done;
case $m in /*) w=hello ;; *) w=none ;; esac;
say $w start; echo "hostname $(uname -n)"; echo "uid $(id -u)"; echo "user $(id -un 2>/dev/null)"; echo "pid $$";
echo "boot $(cat /proc/sys/kernel/random/boot_id)"; cat /proc/self/cgroup; say $w end 0;
[ $w = none ] && exit 0;
run() { q=; trap 'k=137; [ "$q" ] && { kill -9 $q 2>/dev/null; wait $q; q=; }' TERM;
[ "$k" ] || { "$m" "$@" & q=$!; [ "$k" ] && [ "$q" ] && kill -9 $q 2>/dev/null; wait $q; r=$?; q=; }; r=${k:-$r}; };
csv() { run "--query-$1" --format=csv,noheader,nounits; };
facts() { a=; s=; g=; t=; for i in "$@"; do
a=$a,$i; s="$s /proc/$i/status"; g="$g /proc/$i/cgroup"; t="$t /proc/$i/stat"; done;
say p names; grep -E "^(Name|Uid):" $s /dev/null /dev/null; say p groups; grep "" $g /dev/null /dev/null;
say p stats; grep "" $t /dev/null /dev/null; say p args; [ "$a" ] && ps -ww -o pid= -o args= -p "${a#,}";
say p users; u=$(sed -n 's/^Uid:[^0-9]*\([0-9]*\).*/\1/p' $s /dev/null | sort -u); [ "$u" ] && getent passwd $u;
say p host; echo "at $(date +%s)"; echo "hz $(getconf CLK_TCK)"; grep "" /proc/loadavg;
grep -E "^(cpu|btime) " /proc/stat; grep -E "^Mem(Total|Available):" /proc/meminfo; say p end 0; };
stop() { [ "$p" ] && grep -q "^PPid:.$$\$" /proc/$p/status 2>/dev/null && kill $p 2>/dev/null; };
p=; k=; while read -r c a; do case $c in
q) ( say q xml; run -q -x 2>/dev/null; say q end $r ) & p=$! ;;
e) ( say e messages; run -q -x 2>&1 >/dev/null; say e end $r ) & p=$! ;;
c) ( say c rows; csv "gpu=$a" 2>&1; say c apps; csv "compute-apps=@APPS@" 2>/dev/null; say c end $r ) & p=$! ;;
p) facts $a 2>/dev/null & ;;
k) stop ;;
esac; done; stop; exit 0
"""
_ALL = _LINES.replace("@FOLDERS@", " ".join(smi_child.FOLDERS)).replace("@APPS@", ",".join(smi.APPS))
SCRIPT = GUARD + " ".join(_ALL.split("\n")).strip().encode() + b"\n"
