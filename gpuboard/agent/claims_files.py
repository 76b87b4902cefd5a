"""The claim protocol's steps on a real folder, and which folders can hold claims at all.

Every step is one system call that matters to others, relative to one descriptor of the folder, follows no link and
blocks on nothing: not on a FIFO, not on a lock that somebody keeps.
"""

import errno
import fcntl
import os
import stat
import time

from gpuboard.agent import claims_rules as rules
from gpuboard.agent.claims_protocol import Refuse

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

TEMPORARY = ".gpuboard-claim."
STALE_S = 60.0  # an own temporary file older than this was left by a process that died
_CLOCK_BOOTTIME = 7  # time.CLOCK_BOOTTIME came with Python 3.7; the kernel has had it since 2.6.39

# File systems that other machines share or whose links and times are not this kernel's: what a claim rests on is
# not given there.
_SHARED = frozenset(
    (
        "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "auristorfs", "ceph", "lustre",
        "gpfs", "beegfs", "fhgfs", "ocfs2", "gfs2", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "vboxsf",
        "vmhgfs", "virtiofs", "prl_fs", "davfs", "ncpfs", "coda",
    )
)  # fmt: skip


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class Files:
    """One opened folder of claims. Raises Refuse ``folder`` when it cannot hold claims.

    ``good`` is ``identity`` of a folder whose file system was found good before: reading mountinfo of a node with
    hundreds of containers each tick would cost more than all else.
    """

    def __init__(self, path: str, sim_prefix: "Optional[str]" = None, good: "Any" = None) -> None:
        self.path = path
        self._sim_prefix = sim_prefix
        self.fd, self.identity = _open_folder(path, good)
        self._locked = False

    def close(self) -> None:
        """Give the descriptor back; that also drops the lock."""
        os.close(self.fd)

    def lock(self, wait_s: float) -> bool:
        """Take the folder's lock, waiting at most ``wait_s``; return whether we have it."""
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locked = True
                return True
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    return False  # a file system without flock: a courtesy less
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)

    def unlock(self) -> None:
        """Drop the lock if we have it."""
        if self._locked:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._locked = False

    def clock(self) -> "rules.Clock":
        """Return the node's clocks."""
        return rules.Clock(time.time(), time.clock_gettime(_CLOCK_BOOTTIME))

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def names(self) -> "List[str]":
        """Return the names of claims in the folder, of real GPUs or of one simulation, sorted."""
        return sorted(name for name in os.listdir(self.fd) if rules.relevant(name, self._sim_prefix))

    def list(self, wanted: "Callable[[str], bool]") -> "List[str]":
        """Return the wanted ones of ``names``, of each user as many as a reader looks at."""
        counts: "Dict[Optional[int], int]" = {}
        found = []
        for name in self.names():
            if wanted(name):
                uid = self.owner(name)
                counts[uid] = counts.get(uid, 0) + 1
                if counts[uid] <= rules.OWNER_FILES:
                    found.append(name)
        return found

    def read(self, name: str) -> "Optional[rules.Entry]":
        """Return a claim's file as it is now, None when it is gone."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise  # a failing disk must not make a claim look like garbage, which blocks nobody
            return self._unread(name, error)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return _entry(name, found, None, "not a regular file")
            if found.st_size > rules.MAX_BYTES:
                return _entry(name, found, None, "larger than %d bytes" % rules.MAX_BYTES)
            return _entry(name, found, os.read(fd, rules.MAX_BYTES), "")
        finally:
            os.close(fd)

    def _unread(self, name: str, why: OSError) -> "Optional[rules.Entry]":
        found = self.stat(name)
        trouble = "a symbolic link" if why.errno == errno.ELOOP else "not readable: %s" % why.strerror
        return found and _entry(name, found, None, trouble)

    def stat(self, name: str) -> "Optional[os.stat_result]":
        """Return what lies under ``name`` itself, None when it is gone."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def owner(self, name: str) -> "Optional[int]":
        """Return the uid that owns a file, None when it is gone."""
        found = self.stat(name)
        return found and found.st_uid

    def create(self, data: bytes) -> str:
        """Write a temporary file that everybody may read; return its name. Nobody else looks at such names."""
        name = "%s%d.%s" % (TEMPORARY, os.getpid(), os.urandom(6).hex())
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            # No fsync: after a crash the claim is from another boot and lapsed anyway.
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fchmod(fd, 0o644)  # whatever the umask
        except OSError:
            self.unlink(name)
            raise
        finally:
            os.close(fd)
        return name

    def link(self, temporary: str, name: str) -> bool:
        """Publish a temporary file as ``name``; return False when there is such a file."""
        try:
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            return False
        return True

    def rename(self, temporary: str, name: str) -> None:
        """Replace ``name``, ours, by a temporary file in one step."""
        os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> bool:
        """Remove a file; return False when it is gone already or not ours to remove."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EISDIR):
                return False
            raise
        return True

    def touch(self, name: str, mtime: float) -> bool:
        """Set a file's mtime (which moves its ctime to the kernel's now); return False when it is gone."""
        nanoseconds = int(mtime * 1e9)
        try:
            os.utime(name, ns=(nanoseconds, nanoseconds), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sweep_temporaries(self) -> None:
        """Remove temporary files that a dead process of ours left behind."""
        now = time.time()
        for name in os.listdir(self.fd):
            if name.startswith(TEMPORARY):
                found = self.stat(name)
                if found is not None and found.st_uid == os.geteuid() and abs(now - found.st_ctime) > STALE_S:
                    self.unlink(name)


def _entry(name: str, found: "os.stat_result", data: "Optional[bytes]", trouble: str) -> "rules.Entry":
    return rules.Entry(
        name, found.st_uid, found.st_ino, found.st_mtime_ns / 1e9, found.st_ctime_ns / 1e9, data, trouble
    )


def _open_folder(path: str, good: "Any") -> "Tuple[int, Any]":
    try:
        real = os.path.realpath(path)
        fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse(path, error.strerror or str(error))
    try:
        found = os.fstat(fd)
        identity = (real, found.st_dev, found.st_ino)
        trouble = _trouble(real, found)
        if trouble is None and identity != good:
            with open("/proc/self/mountinfo", errors="replace") as file:
                trouble = mount_trouble(real, file.read(), os.geteuid())
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble is not None:
        os.close(fd)
        raise _refuse(path, trouble)
    return fd, identity


def _refuse(path: str, why: str) -> "Refuse":
    return Refuse("folder", "%s cannot hold reservations: %s; set claims_dir to another folder" % (path, why))


def _trouble(real: str, found: "os.stat_result") -> "Optional[str]":
    """Return why a folder's place, owner or mode rules it out, None when they do not."""
    if real == "/dev/shm" or real.startswith("/dev/shm/"):
        return "logind empties /dev/shm when a user logs out"
    if found.st_uid != 0:
        return "it belongs to uid %d, not to root, and its owner can remove every claim" % found.st_uid
    if not found.st_mode & stat.S_ISVTX:
        return "it is not sticky (chmod 1777), so that everybody can remove every claim"
    if not found.st_mode & stat.S_IWOTH:
        return "not everybody may write there (chmod 1777)"
    return None


def mount_trouble(real: str, mountinfo: str, uid: int) -> "Optional[str]":
    """Return why the file system under ``real`` rules it out, None when it does not.

    ``mountinfo`` is /proc/self/mountinfo (proc(5)): id, parent, device, root, mount point, options, … - type, source.
    """
    kind, root = _mount_of(real, mountinfo)
    if kind in _SHARED or (kind.startswith("fuse.") and kind != "fuse.overlayfs"):
        return "it is on %s, which other machines share; claims need this node's own disk or a tmpfs" % kind
    parts = [part for part in root.split("/") if part]
    last = parts[-1] if parts else ""
    # pam_namespace(8) and systemd's PrivateTmp mount a folder of their own over it.
    if any("-inst" in part or part.startswith("systemd-private-") for part in parts) or last in _names_of(uid):
        return "it is a private instance (%s): other users would not see the claims" % root
    return None


def _names_of(uid: int) -> "Tuple[str, ...]":
    import pwd  # asks the directory service: only when a folder is mounted from another

    try:
        return (pwd.getpwuid(uid).pw_name,)
    except KeyError:
        return ()


def _mount_of(real: str, mountinfo: str) -> "Tuple[str, str]":
    """Return (type, root) of the mount that ``real`` lies on: the longest mount point, the last of equals."""
    best = ("", "", "")
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split(" ")
        if len(words) < 5 or not rest:
            continue
        point = _plain(words[4])
        below = real == point or real.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best[0]):
            best = (point, rest.split(" ")[0], _plain(words[3]))
    return best[1], best[2]


def _plain(text: str) -> str:
    """Undo mountinfo's octal escapes of blanks."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
