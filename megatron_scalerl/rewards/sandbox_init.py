"""The first processes of a sandbox: `python -S -m megatron_scalerl.rewards.sandbox_init PARENT_PID`.

    this process   makes user, process, network, mount, IPC and UTS namespaces; waits for process 1
    process 1      builds the file system, gives up all rights, starts programs in sequence, passes results on
    programs       apply limits and a seccomp filter, then execute the interpreter with `sandbox_guest`

Process 1 is the first process in the new process namespace. The parent process (`sandbox`) writes the id maps and
holds the pipe of requests open: process 1 ends when the pipe is closed, and the kernel then ends every process in the
namespace. A result is a line of words, followed by the program's output. This file imports only the standard library,
and modules of the package that import only the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import math
import os
import resource
import select
import signal
import struct
import sys

from megatron_scalerl.processes.parent_death import die_with_parent
from megatron_scalerl.rewards.sandbox_root import build_root, check_call
from megatron_scalerl.rewards.sandbox_seccomp import restrict_calls

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this program starts for every answer
    from typing import Any

THREADS = 64
"""Largest number of threads of all programs in a sandbox, process 1 included."""
OPEN_FILES = 64
CPU_SLACK_S = 0.1
"""The kernel ends a program only after this much processor time (s) beyond the limit.

So the processor time that the kernel reports for a program at the limit is above the limit.
"""
MIB = 2**20
_NEW = {"NS": 0x00020000, "UTS": 0x04000000, "IPC": 0x08000000, "USER": 0x10000000, "PID": 0x20000000}
_FLAGS = sum(_NEW.values()) | 0x40000000  # the last flag is CLONE_NEWNET
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522
_READ_END = 0
"""Index of the end to read from in the result of os.pipe."""
_WRITE_END = 1
"""Index of the end to write to in the result of os.pipe."""
_CHUNK = 1 << 16
_VERDICT_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


class _Results:
    """Writes results to the process that started the sandbox: a line with the output's size, then the output."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")

    def write(self, *words: object, output: bytes = b"") -> None:
        self._file.write(" ".join(map(str, words)).encode() + b"\n" + output)
        self._file.flush()

    def result(self, code: int, cpu_left_s: float, output: bytes) -> None:
        self.write("result", code, cpu_left_s, len(output), output=output)


def main() -> None:
    """Make the namespaces and start process 1; exit when process 1 and all descendants have ended."""
    die_with_parent(int(sys.argv[1]))
    results = _Results()
    try:
        check_call(_libc.unshare(_FLAGS), "unshare")
    except OSError as error:
        results.write("failed", error.strerror)
        return
    results.write("unshared")
    try:
        request = marshal.load(sys.stdin.buffer)
    except EOFError:
        return
    pid = os.fork()
    if pid == 0:
        try:
            _process_1(results, request)
        finally:
            os._exit(0)
    # This process closes the pipes, so that the parent reads the end of the results when process 1 ends.
    del results
    os.closerange(0, 2)
    os.closerange(3, OPEN_FILES)
    os.waitpid(pid, 0)


def _process_1(results: _Results, request: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guest, tests = (_text_of(name) for name in ("sandbox_guest", "sandbox_tests"))
        check_call(_libc.sethostname(b"sandbox", 7), "sethostname")
        executable = build_root(request["executable"], request["libraries"], file_mb=request["file_mb"])
        _give_up_rights(request["uid"])
    except OSError as error:
        results.write("failed", error.strerror or error)
        return
    results.write("ready")
    try:
        _Programs(request, executable, guest, tests, results).run()
    except _NotStarted as error:
        results.write("failed", error)


def _text_of(module: str) -> str:
    with open(__file__.replace("sandbox_init", module), encoding="utf8") as file:
        return file.read()


def _give_up_rights(uid: int | None) -> None:
    """Become the user `uid` (None: remain the user that started the sandbox), and give up all capabilities."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    check_call(_libc.capset(header, bytes(24)), "capset")
    check_call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    check_call(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


class _NotStarted(Exception):
    """A program could not be started; for the first program of a sandbox, this is a fault of the host."""


class _Programs:
    """Runs the programs of one request in sequence, each within the processor time of a run."""

    def __init__(self, request: dict[str, Any], executable: str, guest: str, tests: str, results: _Results):
        self._request = request
        self._executable = executable
        self._results = results
        self._guest = guest
        self._tests = tests
        self._cpu_left = 0.0
        self._started = False
        """Whether a program has started: a program may be the cause if a later start fails."""

    def run(self) -> None:
        """Run the program or the tests, and write a result for each run.

        Raises _NotStarted if the first program cannot be started; a later failure is a result with code 127.
        """
        program = self._request["program"].encode(errors="replace")
        tests = self._request["tests"]
        try:
            if tests is not None:
                self._run_tests(program, tests.encode(errors="replace"), self._request["entry_point"])
                return
            for text, limit in zip(self._request["inputs"], self._request["output_bytes"]):
                self._run_once(program, text.encode(errors="replace"), limit)
        except _NotStarted:
            if not self._started:
                raise
            self._results.result(127, self._cpu_left, b"")

    def _run_once(self, program: bytes, text: bytes, limit: int) -> None:
        source = os.pipe()
        stdout = os.pipe()
        # Standard input is a file, not a pipe, as on competition sites: some programs ask for the size of the input.
        stdin = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        with open(stdin, "wb", closefd=False) as file:
            file.write(text)
        os.lseek(stdin, 0, os.SEEK_SET)
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self._cpu_left = self._request["cpu_s"]
        pid = self._start([self._guest, "program"], stdin, stdout[_WRITE_END], [source[_READ_END]])
        _close(source[_READ_END], stdin, stdout[_WRITE_END])
        output = _pump(pid, {source[_WRITE_END]: program}, stdout[_READ_END], limit)
        code = self._reap(pid)
        if len(output) > limit:
            # also the code of a program that wrote too much and ended before the kill
            code = -signal.SIGKILL
        self._results.result(code, self._cpu_left, output)

    def _run_tests(self, program: bytes, tests: bytes, entry_point: str) -> None:
        self._cpu_left = self._request["cpu_s"]
        source, source_of_tests, requests, replies, verdict = (os.pipe() for _ in range(5))
        null = os.open("/dev/null", os.O_RDWR)
        ends = [source[_READ_END], requests[_READ_END], replies[_WRITE_END]]
        solution = self._start([self._guest, "solution"], null, null, ends)
        ends_of_tests = [source_of_tests[_READ_END], requests[_WRITE_END], replies[_READ_END], verdict[_WRITE_END]]
        tester = self._start([self._guest, "tests", entry_point, self._tests], null, null, ends_of_tests)
        _close(null, *ends, *ends_of_tests)
        feeds = {source_of_tests[_WRITE_END]: tests, source[_WRITE_END]: program}
        output = _pump(tester, feeds, verdict[_READ_END], _VERDICT_BYTES)
        os.kill(solution, signal.SIGKILL)
        self._reap(solution)
        code = self._reap(tester)
        self._results.result(code, self._cpu_left, output)

    def _reap(self, pid: int) -> int:
        _, status, usage = os.wait4(pid, 0)
        self._cpu_left -= usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status)

    def _start(self, arguments: list[str], stdin: int, stdout: int, ends: list[int]) -> int:
        """Start the interpreter with -c and these arguments; `ends` become the descriptors 3, 4, and so on.

        Raises _NotStarted if the interpreter cannot be started.
        """
        # The new process writes to this pipe why exec failed; a successful exec closes the pipe.
        read_end, write_end = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            raise _NotStarted(error) from None
        if pid:
            _close(write_end)
            with os.fdopen(read_end, errors="replace") as file:
                if reason := file.read():
                    raise _NotStarted(reason)
            self._started = True
            return pid
        try:
            # All descriptors are first copied to high numbers: dup2 to a low number may overwrite a descriptor.
            write_end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, OPEN_FILES // 2)
            ours = [stdin, stdout, os.open("/dev/null", os.O_WRONLY), *ends]
            copies = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, OPEN_FILES // 2) for end in ours]
            for number, copy in enumerate(copies):
                os.dup2(copy, number)
            os.chdir("/tmp")
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._limit()
            restrict_calls()
            command = [self._executable, "-S", "-P", "-X", "utf8", "-c", *arguments]
            os.execve(self._executable, command, {"PYTHONHASHSEED": "0"})
        except BaseException as error:
            os.write(write_end, str(error).encode(errors="replace"))
        finally:
            os._exit(127)

    def _limit(self) -> None:
        cpu = max(1, math.ceil(self._cpu_left + CPU_SLACK_S))
        for kind, value in (
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_AS, self._request["memory_mb"] * MIB),
            (resource.RLIMIT_FSIZE, self._request["file_mb"] * MIB),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_NPROC, THREADS),
            (resource.RLIMIT_CORE, 0),
            # the stack is large, since deep recursion through C functions needs stack
            (resource.RLIMIT_STACK, self._request["memory_mb"] * MIB // 2),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(kind, (value, value))


def _pump(pid: int, feeds: dict[int, bytes], output: int, limit: int) -> bytes:
    """The output of a process, read until the process exits, or is killed for more than `limit` bytes of output.

    feeds: descriptor -> text to write to the descriptor meanwhile. Closes all descriptors. When the parent closes the
    pipe of requests, this process exits at once.
    """
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    for fd in (*feeds, output):
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLOUT if fd in feeds else select.POLLIN)
    exit_event = os.pidfd_open(pid)
    poll.register(exit_event, select.POLLIN)
    received = bytearray()
    is_open = True
    running = True
    while running and len(received) <= limit:
        for fd, _ in poll.poll():
            if fd == 0:
                os._exit(0)
            elif fd == exit_event:
                running = False
            elif fd == output:
                is_open = _read_into(received, output)
            else:
                feeds[fd] = _feed(fd, feeds[fd])
            if feeds.get(fd) == b"" or (fd == output and not is_open):
                poll.unregister(fd)
                feeds.pop(fd, None)
                if fd != output:  # `output` is closed after the loop
                    _close(fd)
    # The pipe may still hold output that the process wrote before the exit.
    while is_open and len(received) <= limit and _read_into(received, output):
        pass
    if len(received) > limit:
        os.kill(pid, signal.SIGKILL)
    _close(*feeds, output, exit_event)
    return bytes(received[: limit + 1])


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)


def _feed(fd: int, text: bytes) -> bytes:
    """Write as much text as the pipe takes; returns the rest."""
    try:
        return text[os.write(fd, text[:_CHUNK]) :]
    except BlockingIOError:
        return text
    except BrokenPipeError:
        return b""


def _read_into(received: bytearray, fd: int) -> bool:
    """Append the available bytes of a descriptor; returns False at the end or if no byte is available."""
    try:
        part = os.read(fd, _CHUNK)
    except BlockingIOError:
        return False
    received += part
    return bool(part)


if __name__ == "__main__":
    main()
