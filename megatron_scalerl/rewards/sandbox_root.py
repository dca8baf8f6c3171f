"""Builds the file system of a sandbox: only the Python interpreter, read-only, and a small /tmp.

Process 1 of `sandbox_init` runs this code, with all rights in the new namespaces. Before a program starts, the host's
files are detached: paths that `build_root` does not show, such as /proc and /sys, do not exist inside. This module
imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
TMP_FILES = 256
"""Largest number of files in /tmp (inodes)."""
MIB = 2**20
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_NOSUID = 2
_NODEV = 4
_DETACH = 2
"""Flags of mount and umount2, of linux/mount.h."""
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_ATTRIBUTES = 0x1 | 0x2  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
_PIVOT_ROOT = 155
_MOUNT_SETATTR = 442
_libc = ctypes.CDLL(None, use_errno=True)


def build_root(executable: str, libraries: Sequence[str], *, file_mb: int) -> str:
    """Replace the file system of this mount namespace; returns the interpreter's path. Raises OSError.

    executable: path of the interpreter, without symbolic links. libraries: folders of the interpreter, shown besides
    SYSTEM_LIBRARIES. file_mb: the largest file of a program (MiB); /tmp has room for four such files.
    """
    # Private mounts: later mounts of the host do not appear here, and mounts of this process not on the host.
    _mount("none", "/", "", _RECURSIVE | _PRIVATE, "")
    place = next(path for path in ("/tmp", "/var", "/usr") if os.path.isdir(path))
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.chdir(place)
    os.mkdir("host")
    check_call(_libc.syscall(_PIVOT_ROOT, b".", b"host"), "pivot_root")
    os.chdir("/")
    for path in (*SYSTEM_LIBRARIES, *libraries, executable, *DEVICES):
        _show(path)
    check_call(_libc.umount2(b"/host", _DETACH), "umount of the host's tree")
    os.rmdir("/host")
    os.makedirs("/tmp", mode=0o755, exist_ok=True)
    _make_read_only()
    options = f"size={max(4 * file_mb * MIB, 4096)},nr_inodes={TMP_FILES},mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, options)
    return executable


def _show(path: str) -> None:
    """Make a path of the host visible in the sandbox, if the path exists. A symbolic link stays a link."""
    source = "/host" + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, path, "", _BIND | _RECURSIVE, "")


def _make_read_only() -> None:
    """Make every mount in the sandbox read-only, also mounts inside a folder of the host."""
    # mount(MS_REMOUNT) would change the topmost mount alone, not the mounts below
    attributes = struct.pack("=QQQQ", _ATTRIBUTES, 0, 0, 0)
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    check_call(result, "mount_setattr")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    check_call(_libc.mount(*arguments), f"mount of {kind or source} at {target}")


def check_call(result: int, call_name: str) -> None:
    """Raise an OSError that names the call if the call failed."""
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{call_name}: {os.strerror(code)}")
