"""The seccomp filter of programs in the sandbox (x86-64): allows a list of system calls and refuses the rest.

A program may compute, read and write files, start threads and execute a new program in the process. A program may not
start a process, make a socket (except a connected pair, for asyncio), trace, mount, or make a namespace. A refused
call fails with ENOSYS, the start of a process with EPERM. A call with the numbers of a different architecture (32
bits, x32) ends the program, since equal numbers mean different calls.

Imports only the standard library, since the module runs in `sandbox_init`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

MACHINE = "x86_64"
"""The kernel's name of the architecture to which the system call numbers in this file belong."""
_ARCH = 0xC000003E
"""The number of x86-64 in a seccomp filter: AUDIT_ARCH_X86_64 of linux/audit.h."""
_X32 = 0x40000000
_CLONE = 56
_CLONE3 = 435
_CLONE_THREAD = 0x00010000
# fmt: off
_ALLOWED_CALLS = {
    # files and folders
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "pread64": 17,
    "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "sendfile": 40, "fcntl": 72, "flock": 73, "fsync": 74,
    "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81,
    "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90,
    "fchmod": 91, "umask": 95, "fadvise64": 221, "openat": 257, "mkdirat": 258, "unlinkat": 263, "newfstatat": 262,
    "renameat2": 316, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269,
    "faccessat2": 439, "utimensat": 280, "copy_file_range": 326, "statx": 332, "close_range": 436, "ioctl": 16,
    "dup": 32, "dup2": 33, "dup3": 292,
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "madvise": 28, "membarrier": 324,
    # pipes, a connected pair, events
    "pipe": 22, "pipe2": 293, "socketpair": 53, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47,
    "shutdown": 48, "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270, "epoll_create1": 291, "epoll_wait": 232,
    "epoll_ctl": 233, "epoll_pwait": 281, "eventfd2": 290,
    # time
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "gettimeofday": 96, "times": 100,
    "rt_sigtimedwait": 128, "time": 201, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    # this process, its threads and signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "getpid": 39, "execve": 59,
    "exit": 60, "uname": 63, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118,
    "getresgid": 120, "getpgid": 121, "getsid": 124, "sigaltstack": 131, "prctl": 157, "arch_prctl": 158,
    "gettid": 186, "futex": 202, "sched_getaffinity": 204, "set_tid_address": 218, "restart_syscall": 219,
    "exit_group": 231, "tgkill": 234, "kill": 62, "waitid": 247, "wait4": 61, "set_robust_list": 273,
    "prlimit64": 302, "getrandom": 318, "rseq": 334,
}
# fmt: on
"""Name -> number of each allowed system call (arch/x86/entry/syscalls/syscall_64.tbl)."""

_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_ALLOW = 0x7FFF0000
"""Actions that the filter may return for a system call (linux/seccomp.h)."""
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
"""Opcodes of classic BPF: load a word; jump if equal, if at least, or if a bit is set; return."""
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
"""Offsets of fields in struct seccomp_data (bytes); arguments are little-endian."""
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2


class _Program(ctypes.Structure):
    """The struct sock_fprog of linux/filter.h: length and address of a filter."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def is_supported() -> bool:
    """True if this host has the architecture for which the filter is written."""
    return os.uname().machine == MACHINE


def restrict_calls() -> None:
    """Apply the filter for good to this process and all programs that it executes. Raises OSError.

    The caller has to set no_new_privs (prctl) first.
    """
    code = filter_code()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def filter_code() -> bytes:
    """The filter's instructions in the code of classic BPF, 8 bytes per instruction."""
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCH),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL_PROCESS),
        # clone3 passes flags in memory, which a filter cannot read; glibc falls back to clone
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    code += [  # prlimit64 is allowed only for the limits of the calling process
        (_EQUAL, 0, 4, _ALLOWED_CALLS["prlimit64"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    for number in sorted(_ALLOWED_CALLS.values()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _ERRNO | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
