"""The steps of the claim protocol on a real folder, and the checks of that folder.

Every step has one system call that other processes can observe, relative to one descriptor of the folder. It follows no
links and never blocks: not on a FIFO, not on a lock that stays held, not on a user's file system.

A name is first opened with O_PATH, which accesses neither the file nor its file system, and is then used only through
that descriptor. On a mounted file system even stat(2) may never return.
"""

import errno
import fcntl
import os
import stat
import time

from gpuboard.agent.claims import Refuse, rules
from gpuboard.agent.proc import user_name

MYPY = False
if MYPY:
    from typing import Any, Callable, Iterator, List, Optional, Tuple

SITE_CONFIG = "/etc/gpuboard/config.toml"
TEMPORARY = ".gpuboard-claim."
STALE_S = 60.0  # an own temporary file older than this is from a process that has died
_CLOCK_BOOTTIME = 7  # time.CLOCK_BOOTTIME came with Python 3.7; the kernel has had it since 2.6.39

# Read errors that a file's owner can cause: no permission, a lease of fcntl(2), a key that others lack (fscrypt).
_BY_OWNER = frozenset((errno.EACCES, errno.EPERM, errno.EAGAIN, errno.ENOKEY, errno.ETXTBSY))
_READERS_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR))  # not caused by the file
# Root's files, some of which are written constantly: the kernel stamps each change with the wall clock.
_STAMPED = ("/run", "/var/log", "/dev/pts")

# File systems that other machines share, or whose links and times do not come from this kernel. Claims need both.
_SHARED = frozenset(
    (
        "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "auristorfs", "ceph", "lustre",
        "gpfs", "beegfs", "fhgfs", "ocfs2", "gfs2", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "vboxsf",
        "vmhgfs", "virtiofs", "prl_fs", "davfs", "ncpfs", "coda",
    )
)  # fmt: skip


def max_lease(site_config: str) -> float:
    """Return the longest duration of a claim on this node: the site's ``max_lease``, if only root can have set it."""
    try:
        fd = os.open(site_config, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return rules.LONGEST_S
    try:
        found = os.fstat(fd)
        if found.st_uid != 0 or rules.no_claim(found.st_mode, found.st_size):
            return rules.LONGEST_S
        return rules.max_lease(os.read(fd, rules.MAX_BYTES).decode("utf-8", "replace"))
    except OSError:
        return rules.LONGEST_S
    finally:
        os.close(fd)


class UnreadableClaim(OSError):
    """The system cannot read a file that may be a claim; ``entry``: what is known of it."""

    def __init__(self, why: OSError, entry: "rules.Entry") -> None:
        OSError.__init__(self, why.errno, why.strerror)
        self.entry = entry


class Files:
    """One opened folder of claims. Raises Refuse ``folder`` when it cannot hold claims.

    ``good``: ``identity`` of a folder whose file system has passed the checks. On a node with hundreds of containers
    reading mountinfo at each tick would cost more than all the rest.
    """

    def __init__(
        self, path: str, sim_prefix: "Optional[str]" = None, good: "Any" = None, site_config: str = SITE_CONFIG
    ) -> None:
        self.path = path
        self._sim_prefix = sim_prefix
        self.fd, self.identity, self._mount = _open_folder(path, good)
        self._locked = False
        self._longest_s = max_lease(site_config)

    def close(self) -> None:
        """Close the descriptor, which also drops the lock."""
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
                    return False  # a file system without flock: go on without the lock
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)

    def unlock(self) -> None:
        """Drop the lock if held."""
        if self._locked:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._locked = False

    def clock(self) -> "rules.Clock":
        """Return the node's clocks."""
        return rules.Clock(time.time(), time.clock_gettime(_CLOCK_BOOTTIME), self._longest_s)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def names(self) -> "Iterator[Tuple[str, int]]":
        """Yield (name, inode) of the claims in the folder, of real GPUs or of one simulation."""
        for one in self._entries():
            if rules.relevant(one.name, self._sim_prefix):
                yield one.name, one.inode()

    def _entries(self) -> "Iterator[os.DirEntry[str]]":
        """Iterate over the folder without holding all names in memory."""
        with os.scandir("/proc/self/fd/%d" % self.fd) as found:  # scandir(fd) needs Python 3.7
            yield from found

    def list(self, wanted: "Callable[[str], bool]") -> "List[str]":
        """Return the wanted names, sorted."""
        return sorted(name for name, _ in self.names() if wanted(name))

    def read(self, name: str, uid: "Optional[int]" = None) -> "Optional[rules.Entry]":
        """Return a claim's file, None when it is gone or not ``uid``'s."""
        return self.look(name, uid=uid)[1]

    def look(self, name: str, known: "Any" = None, uid: "Optional[int]" = None) -> "Tuple[Any, Optional[rules.Entry]]":
        """Return (a key that changes with the file, the file); (None, None) when it is gone, or is not ``uid``'s.

        If the key is still ``known``, the file is not read and is None. Raises UnreadableClaim, or OSError for problems
        of this process.
        """
        try:
            fd = self._pin(name)
            if fd is None:
                return None, None
            try:
                return self._pinned(name, fd, known, uid)
            finally:
                os.close(fd)
        except OSError as error:
            if isinstance(error, UnreadableClaim) or error.errno in _READERS_OWN:
                raise
            raise UnreadableClaim(error, rules.Entry(name, 0, 0, 0.0, 0.0, None, "not readable: %s" % error.strerror))

    def _pinned(self, name: str, fd: int, known: "Any", uid: "Optional[int]") -> "Tuple[Any, Optional[rules.Entry]]":
        mount = _mount_id(fd)
        if mount != self._mount:
            key: "Any" = ("mounted", mount)
            return key, None if key == known or uid is not None else _mounted(name, mount)
        found = os.fstat(fd)
        if uid is not None and found.st_uid != uid:
            return None, None
        key = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_uid, found.st_mode)
        return key, None if key == known else self._content(name, fd, found)

    def _pin(self, name: str) -> "Optional[int]":
        try:
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None

    def _content(self, name: str, pinned: int, found: "os.stat_result") -> "rules.Entry":
        trouble = rules.no_claim(found.st_mode, found.st_size)
        if trouble:
            return _entry(name, found, None, trouble)
        try:
            return _entry(name, found, self._bytes(pinned), "")
        except OSError as error:
            if error.errno in _READERS_OWN:
                raise
            entry = _entry(name, found, None, "not readable: %s" % error.strerror)
            if error.errno in _BY_OWNER:
                return entry
            raise UnreadableClaim(error, entry)  # a failing disk: the file may be a claim, so it is not garbage

    def _bytes(self, pinned: int) -> bytes:
        fd = os.open("/proc/self/fd/%d" % pinned, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.read(fd, rules.MAX_BYTES)
        finally:
            os.close(fd)

    def stat(self, name: str) -> "Optional[os.stat_result]":
        """Return the status of ``name``, None when it is gone or a file system is mounted on it."""
        fd = self._pin(name)
        if fd is None:
            return None
        try:
            return os.fstat(fd) if _mount_id(fd) == self._mount else None
        finally:
            os.close(fd)

    def owner(self, name: str) -> "Optional[int]":
        """Return the uid of a file's owner, None if unknown."""
        found = self.stat(name)
        return found and found.st_uid

    def stamps(self) -> "List[float]":
        """Return wall times at which the kernel has stamped files of this node, most of them root's."""
        found = []
        for path in _STAMPED:
            try:
                with os.scandir(path) as entries:
                    for one in entries:
                        if not one.is_dir(follow_symlinks=False):  # mounted file systems may hang
                            found.append(one.stat(follow_symlinks=False).st_ctime)
            except OSError:
                continue  # missing, or a file was removed meanwhile
        return found

    def create(self, data: bytes) -> str:
        """Write a temporary file that all users can read; return its name, which other readers ignore."""
        name = "%s%d.%s" % (TEMPORARY, os.getpid(), os.urandom(6).hex())
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            # No fsync: after a crash the claim is from another boot and has expired.
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fchmod(fd, 0o644)  # independent of the umask
        except OSError:
            self.unlink(name)
            raise
        finally:
            os.close(fd)
        return name

    def link(self, temporary: str, name: str) -> bool:
        """Publish a temporary file as ``name``; return False if it exists."""
        try:
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            return False
        return True

    def rename(self, temporary: str, name: str) -> None:
        """Replace ``name``, an own claim, atomically by a temporary file."""
        os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> bool:
        """Remove a file; return False when it is gone or may not be removed."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EISDIR, errno.EBUSY):
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
        """Remove temporary files of this user's processes that have died."""
        now = time.time()
        for one in self._entries():
            if one.name.startswith(TEMPORARY):
                found = self.stat(one.name)
                if found is not None and found.st_uid == os.geteuid() and abs(now - found.st_ctime) > STALE_S:
                    self.unlink(one.name)


def _entry(name: str, found: "os.stat_result", data: "Optional[bytes]", trouble: str) -> "rules.Entry":
    return rules.Entry(
        name, found.st_uid, found.st_ino, found.st_mtime_ns / 1e9, found.st_ctime_ns / 1e9, data, trouble
    )


def _mount_id(fd: int) -> "Optional[int]":
    """Return the mount id of a descriptor, None on kernels before 3.15."""
    info = os.open("/proc/self/fdinfo/%d" % fd, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.read(info, 1024).partition(b"mnt_id:")[2].split()
    finally:
        os.close(info)
    return int(found[0]) if found else None


def _mounted(name: str, mount: "Optional[int]") -> "rules.Entry":
    """Return an entry for a name that a file system is mounted on; its owner is the user who mounted it."""
    import re  # late: only for such a name

    with open("/proc/self/mountinfo", errors="replace") as file:
        line = next((line for line in file if line.startswith("%s " % mount)), "")
    user = re.search(r"\buser_id=([0-9]+)", line.partition(" - ")[2])  # FUSE's; only root mounts others
    return rules.Entry(name, int(user.group(1)) if user else 0, 0, 0.0, 0.0, None, "a file system is mounted on it")


def _open_folder(path: str, good: "Any") -> "Tuple[int, Any, Optional[int]]":
    try:
        real = os.path.realpath(path)
        fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse(path, error.strerror or str(error))
    try:
        found = os.fstat(fd)
        identity = (real, found.st_dev, found.st_ino)
        mount = _mount_id(fd)
        trouble = _trouble(real, found)
        if trouble is None and identity != good:
            with open("/proc/self/mountinfo", errors="replace") as file:
                trouble = mount_trouble(real, file.read(), os.geteuid())
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble is not None:
        os.close(fd)
        raise _refuse(path, trouble)
    return fd, identity, mount


def _refuse(path: str, why: str) -> "Refuse":
    return Refuse("folder", "%s cannot hold reservations: %s; set claims_dir to another folder" % (path, why))


def _trouble(real: str, found: "os.stat_result") -> "Optional[str]":
    """Return why a folder's path, owner or mode rules it out, None if it is suitable."""
    if real == "/dev/shm" or real.startswith("/dev/shm/"):
        return "logind empties /dev/shm when a user logs out"
    if found.st_uid != 0:
        return "it belongs to uid %d, not to root, so its owner can remove any claim" % found.st_uid
    if not found.st_mode & stat.S_ISVTX:
        return "it is not sticky (chmod 1777), so any user can remove any claim"
    if not found.st_mode & stat.S_IWOTH:
        return "it is not writable by all users (chmod 1777)"
    return None


def mount_trouble(real: str, mountinfo: str, uid: int) -> "Optional[str]":
    """Return why the file system under ``real`` rules it out, None if it is suitable.

    ``mountinfo`` is /proc/self/mountinfo (proc(5)): id, parent, device, root, mount point, options, … - type, source.
    """
    kind, root = _mount_of(real, mountinfo)
    if _is_shared(kind):
        return "it is on %s, which other machines share; claims need this node's own disk or a tmpfs" % kind
    parts = [part for part in root.split("/") if part]
    last = parts[-1] if parts else ""
    # pam_namespace(8) and systemd's PrivateTmp mount a private folder over it. user_name is slow: only for bind mounts.
    private = any("-inst" in part or part.startswith("systemd-private-") for part in parts)
    if private or (last and not last.isdigit() and last == user_name(uid)):
        return "it is a private instance (%s): other users would not see the claims" % root
    return None


def shared_with_others(path: str) -> bool:
    """Return whether other machines may share the file system of ``path``; true where that cannot be read."""
    try:
        with open("/proc/self/mountinfo", errors="replace") as file:
            kind = _mount_of(os.path.realpath(path), file.read())[0]
    except OSError:
        return True
    return not kind or _is_shared(kind)


def _is_shared(kind: str) -> bool:
    return kind in _SHARED or (kind.startswith("fuse.") and kind != "fuse.overlayfs")


def _mount_of(real: str, mountinfo: str) -> "Tuple[str, str]":
    """Return (type, root) of the mount of ``real``: the longest mount point, the last of equals."""
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
