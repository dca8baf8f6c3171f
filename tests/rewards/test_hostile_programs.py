"""Hostile programs in the sandbox, each with what happened. All of them run for real."""

import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from ctypes import CDLL
from ctypes.util import find_library
from pathlib import Path

import pytest
from own_processes import sandboxes
from sandboxed import LIMITS, output, prints, verdict
from waiting import wait_until

from megatron_scalerl.rewards.limits import Limits, TimeLimitExceeded
from megatron_scalerl.rewards.sandbox import Sandbox, SandboxError
from megatron_scalerl.rewards.sandbox_init import OPEN_FILES, THREADS
from megatron_scalerl.rewards.sandbox_probe import check_sandbox
from megatron_scalerl.rewards.sandbox_seccomp import _ALLOWED_CALLS, _ARCH, _CLONE, _CLONE3

ROOT = Path(__file__).parents[2]
CASE = json.dumps([{"input": "2 3\n", "output": "5\n"}])
ASSERTS = "assert add(2, 3) == 5\nassert add(1, 1) == 2\n"
ADD = "def add(a, b):\n    return a + b\n"


def refused(call, imports="os"):
    """A program that prints the errno of a call that fails."""
    return f"import errno, {imports}\ntry:\n    {call}\nexcept OSError as e:\n    print(errno.errorcode[e.errno])"


def errors_of(calls, imports="os"):
    """The errno of each of the calls, all of which have to fail, made by one program."""
    calls = list(calls)
    names = prints("\n".join(refused(call, imports) for call in calls)).splitlines()
    assert len(names) == len(calls)
    return names


def start_with(monkeypatch, change):
    """Sandboxes whose first process executes this text before it begins."""
    start = subprocess.Popen
    script = f"from megatron_scalerl.rewards import sandbox_init\n{change}\nsandbox_init.main()"
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **o: start([*argv[:2], "-c", script, argv[-1]], **o))


def python_with(script, *before):
    """A command that executes the script, which has the functions of `sandboxed`, and its environment."""
    env = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    return {"args": [*(before or [sys.executable]), "-c", f"from sandboxed import *\n{script}"], "env": env}


def raw_calls(*calls):
    """Result and errno of each system call (number, first argument), made by one program."""
    program = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += f"for number, first in {calls}: print(libc.syscall(number, first, 0, 0, 0, 0), ctypes.get_errno())"
    return prints(program).splitlines()


@pytest.mark.parametrize("call", ["os.fork()", "os.posix_spawn('/x', ['x'], {})"])
def test_a_fork_bomb_ends_at_its_first_process(call):
    assert prints(refused(f"while True: {call}")) in {"EPERM", "ENOSYS"}


def test_threads_are_bounded():
    bomb = "import threading\nn, stop = 0, threading.Event()\ntry:\n    while True:\n"
    bomb += "        threading.Thread(target=stop.wait, daemon=True).start()\n        n += 1\n"
    bomb += "except RuntimeError:\n    print(n)\n"
    ample = Limits(cpu_s=5, memory_mb=4096, file_mb=0)
    threads = int(prints("import threading\nthreading.stack_size(1 << 16)\n" + bomb, limits=ample))
    assert THREADS - 4 <= threads < THREADS


def test_a_raw_clone_makes_no_process_either():
    assert set(raw_calls((56, 17), (57, 0), (58, 0), (435, 0))) <= {"-1 1", "-1 38"}


def test_calls_of_32_bits_end_the_program():
    """int 0x80 with the number of fork of i386, which is open on x86-64."""
    program = "import ctypes, mmap\n"
    program += "m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
    program += "m.write(bytes.fromhex('b802000000cd80c3'))\n"
    program += "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\nprint(ctypes.CFUNCTYPE(ctypes.c_int)(a)())"
    assert output(program).code in {-signal.SIGSYS, -signal.SIGSEGV}


@pytest.mark.parametrize("flush", ["", ", flush=True"])
def test_endless_output_is_cut_and_its_program_killed(flush):
    result = output(f"while True: print('x' * 1000{flush})", limit=10_000)
    assert (result.code, result.output) == (-signal.SIGKILL, (b"x" * 1000 + b"\n") * 9 + b"x" * 992)
    assert verdict("while True: print(5)", CASE) is False


def test_the_file_system_has_an_interpreter_and_nothing_else(tmp_path):
    secret = tmp_path / "recipe.yaml"
    secret.write_text("name: secret")
    walk = "import os\nfor d, _, files in os.walk('/'):\n    for f in files: print(os.path.join(d, f))"
    seen = set(prints(walk, limit=1 << 26, limits=Limits(cpu_s=60, memory_mb=512, file_mb=1)).splitlines())
    libraries = (f"{sys.base_prefix}/lib", "/lib", "/usr/lib", "/dev/", "/etc/ld.so.cache")
    assert {name for name in seen if not name.startswith(libraries)} == {os.path.realpath(sys.executable)}
    assert f"{Path(json.__file__)}" in seen
    paths = (secret, ROOT / "README.md", "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/sys/kernel")
    folders = ("/root", "/home", "/proc", "/sys", "/run", "/var", str(tmp_path))
    calls = [f"open({str(path)!r})" for path in paths]
    calls += [f"os.listdir({folder!r})" for folder in folders if not sys.base_prefix.startswith(folder)]
    assert set(errors_of(calls)) == {"ENOENT"}


def test_nothing_can_be_written_but_in_tmp():
    paths = ("/x", "/usr/lib/x", "/dev/x", f"{sys.base_prefix}/lib/x")
    assert set(errors_of(f"open({path!r}, 'w')" for path in paths)) <= {"EROFS", "EACCES"}
    assert prints("open('/tmp/x', 'w').write('x')\nprint(len(open('/tmp/x').read()))") == "1"


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert prints("import os\nprint(sorted(os.environ))") == "['LC_CTYPE', 'PYTHONHASHSEED']"
    walk = "import os\nfor pid in range(1, 100):\n    for f in ('environ', 'cmdline', 'mem', 'root'):\n"
    walk += "        assert not os.path.lexists(f'/proc/{pid}/{f}')\nprint('none')"
    assert prints(walk) == "none"
    assert prints("import os\nprint(os.uname().nodename)") == "sandbox"


def test_no_descriptor_of_the_host_is_open():
    program = "import os\nfound = []\nfor fd in range(4096):\n    try: os.fstat(fd); found.append(fd)\n"
    program += "    except OSError: pass\nprint(found)"
    assert prints(program) == "[0, 1, 2]"


def test_there_is_no_socket():
    families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET")
    calls = (f"socket.socket(socket.{family})" for family in families)
    assert set(errors_of(calls, "socket")) <= {"ENOSYS", "EPERM"}


def test_the_network_namespace_alone_reaches_nothing(monkeypatch):
    """Without the filter of system calls: neither a server on 127.0.0.1 nor an abstract unix socket of the host."""
    start_with(monkeypatch, "sandbox_init.restrict_calls = lambda: None")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        name = f"msrl-test-{os.getpid()}"
        unix.bind(f"\0{name}")
        unix.listen()
        inet = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert prints(refused(inet, "socket")) == "ENETUNREACH"
        abstract = f"socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        assert prints(refused(abstract, "socket")) == "ECONNREFUSED"


def test_files_have_a_size_and_a_number():
    assert prints(refused("open('/tmp/x', 'wb').write(bytes(2 << 20))")) == "EFBIG"
    fill = "for i in range(99):\n        open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    assert prints(refused(fill)) == "ENOSPC"
    assert prints(refused("for i in range(9999): os.mkdir(f'/tmp/{i}')")) == "ENOSPC"
    assert prints(refused("os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)")) == "EFBIG"
    opens = prints(refused("files = [open('/dev/null') for _ in range(999)]"))
    assert opens == "EMFILE"
    assert OPEN_FILES < 256
    assert prints(refused("os.memfd_create('x')")) == "ENOSYS"


def test_no_file_can_be_written_by_default():
    none = Limits(cpu_s=5, memory_mb=256, file_mb=0)
    assert prints(refused("open('/tmp/x', 'wb', 0).write(b'x')"), limits=none) == "EFBIG"


def test_memory_is_limited():
    program = "try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('no')"
    assert prints(program) == "no"
    assert output("x = []\nwhile True: x.append(bytearray(1 << 20))").code == 1


@pytest.mark.slow
def test_processor_time_of_each_run_is_limited():
    short = Limits(cpu_s=1.0, memory_mb=256, file_mb=0)
    with pytest.raises(TimeLimitExceeded):
        verdict("while True: pass", CASE, limits=short)
    with pytest.raises(TimeLimitExceeded):
        verdict("def add(a, b):\n    while True: pass", ASSERTS, limits=short)
    cases = json.dumps([{"input": "", "output": "5"}] * 6)
    assert verdict("import time\nwhile time.process_time() < 0.3: pass\nprint(5)", cases, limits=short) is True
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    with pytest.raises(TimeLimitExceeded):
        verdict(ignoring, CASE, limits=short)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.kill(-1, 9)\nprint(5)",
        "import os\nfor p in range(2, 99):\n    if p != os.getpid():\n        try: os.kill(p, 9)\n"
        "        except OSError: pass\nprint(5)",
        "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 19)\nprint(5)",
    ],
)
def test_signals_reach_nothing_outside(program):
    """A program may kill itself. Process 1 ignores its signals and no other process is in sight."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as witness:
        assert verdict(program, CASE) in {True, False}
        assert witness.poll() is None


def test_tracing_mounting_and_the_like_are_refused():
    """ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, pidfd_open, mount, unshare, setns, bpf ..."""
    calls = (101, 310, 311, 438, 434, 165, 272, 308, 321, 323, 425, 29, 249)
    assert raw_calls(*((call, 16) for call in calls)) == ["-1 38"] * len(calls)


@pytest.mark.parametrize(
    "ending",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\nos._exit(0)",
        "print('passed')",
        "import sys, builtins\nbuiltins.AssertionError = Exception\nsys.exit = print\nsys.excepthook = print",
        "import ast\nast.parse = lambda *a: compile('', '', 'exec', ast.PyCF_ONLY_AST)",
        "import gc, types\nfor o in gc.get_objects():\n    if isinstance(o, types.FunctionType):\n"
        "        try: o.__code__ = (lambda *a: None).__code__\n        except ValueError: pass",
        'import json\njson.dumps = lambda *a: \'{"result": true, "args": []}\'\ndef add(a, b): return 0',
        "import __main__, sys\nsys.modules['__main__'].PASSED = b''",
        "class Yes:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\n"
        "def add(a, b): return Yes()",
        "class Yes(int):\n    def __eq__(self, o): return True\ndef add(a, b): return Yes(0)",
        "def add(a, b): raise StopIteration",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
    ],
)
def test_no_program_forges_the_verdict(ending):
    assert verdict(ending, ASSERTS) is False
    assert verdict(ending, CASE) is False


def test_the_programs_names_do_not_replace_builtins_of_the_tests():
    tests = "assert all(add(a, 1) == a + 1 for a in range(3))\nassert isinstance(add(1, 1), int)"
    cheat = "def all(x): return True\ndef isinstance(a, b): return True\ndef add(a, b): return 0"
    assert verdict(cheat, tests) is False
    assert verdict(ADD, tests) is True
    assert verdict("def sum(a, b):\n    return a + b", "assert sum(10, 15) == 25") is True, (
        "the function that is tested"
    )


def test_the_tests_cannot_be_read_by_the_program():
    """It sees arguments. A program that looks for the expected value everywhere it can finds none."""
    cheat = "import gc, sys\ndef add(a, b):\n"
    cheat += "    seen = str(gc.get_objects()) + str(sys._getframe(1).f_locals) + str(sys.argv)\n"
    cheat += "    return str(int('83496117402958310') + 1) in seen"
    assert verdict(cheat, "assert add(1, 2) == (83496117402958311 > 0)") is False


def test_a_daemon_does_not_outlive_its_program():
    daemon = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    daemon += "print(5)"
    assert verdict(daemon, CASE) is True
    assert not sandboxes()


def test_closing_ends_a_sleeping_program():
    with Sandbox(LIMITS) as sandbox:
        results = sandbox.run(
            "import sys, time\nprint(5, flush=True)\nsys.stdout.close()\ntime.sleep(1e6)", [""], [99]
        )
        waiting = threading.Thread(target=lambda: list(results), daemon=True)
        waiting.start()
        wait_until(lambda: len(sandboxes()) >= 3)
        assert waiting.is_alive()
        sandbox._process.stdin.close()
        waiting.join()
    assert not sandboxes()


def test_a_killed_verifier_takes_its_programs_along():
    """SIGKILL to it alone, as the kernel does when memory is short: the sandbox sees its pipe closed."""
    script = "print('started', flush=True)\n"
    script += "output('while True: pass', limits=Limits(cpu_s=600, memory_mb=256, file_mb=1))"
    with subprocess.Popen(**python_with(script), stdout=subprocess.PIPE, start_new_session=True) as verifier:
        assert verifier.stdout.readline() == b"started\n"
        inside = wait_until(lambda: len(found := sandboxes() - {verifier.pid}) >= 3 and found)
        watched = [os.pidfd_open(pid) for pid in inside]
        verifier.kill()
        for fd in watched:
            assert select.select([fd], [], [], 240)[0], "a process of the sandbox outlived its verifier"
            os.close(fd)
    assert not sandboxes()


@pytest.mark.slow
def test_nothing_is_left_of_200_scores():
    """No process, mount, file or descriptor; a namespace ends with the last of them.

    Descriptors of earlier tests may still be closed meanwhile by their threads.
    """
    verdict(ADD, ASSERTS)
    written = f"/tmp/msrl-test-{os.getpid()}"

    def state():
        """Others use this machine too: mounts and files are those that only a sandbox makes."""
        gc.collect()  # what earlier tests left open is closed
        mounts = {line for line in Path("/proc/self/mounts").read_text().splitlines() if "nr_inodes=1024" in line}
        files = [path for path in ("/tmp/host", written) if os.path.lexists(path)]
        return mounts, files, set(os.listdir("/proc/self/fd"))

    before = state()
    hostile = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    hostile += f"open('{written}', 'w').write('x')\nprint(5)"
    for n in range(200):
        assert verdict(hostile if n % 2 else "print(4)", CASE) is bool(n % 2)
    assert not sandboxes()
    after = state()
    assert after[:2] == before[:2] and after[2] <= before[2]


def _unprivileged_python():
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        probe = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", path, "-c"]
        can_read = f"os.access(sys.executable, os.X_OK) and os.access({__file__!r}, os.R_OK)"
        usable = f"import os, sys; sys.exit(sys.version_info < (3, 11) or not ({can_read}))"
        try:
            if subprocess.run([*probe, usable], capture_output=True, check=False).returncode == 0:
                return probe[:-1]
        except OSError:
            continue
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="is unprivileged already")
def test_a_user_without_privileges_can_do_the_same():
    command = _unprivileged_python()
    if command is None:
        pytest.skip("no interpreter and checkout that another user can read")
    script = "import os\nassert os.getuid() == 65534\n"
    script += f"print(verdict({ADD!r}, {ASSERTS!r}), verdict('print(5)', {CASE!r}), verdict('print(4)', {CASE!r}))\n"
    script += f"print(prints({refused('os.fork()')!r}), prints('import os\\nprint(os.getuid())'))\n"
    script += "from megatron_scalerl.rewards.sandbox_probe import check_sandbox\ncheck_sandbox(LIMITS)"
    done = subprocess.run(**python_with(script, *command), capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["True", "True", "False", "EPERM", "65534"], "")


def test_a_host_without_user_namespaces_is_refused_in_one_line():
    script = "from megatron_scalerl.rewards.sandbox_probe import check_sandbox\n"
    script += "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
    script += "try: check_sandbox(LIMITS)\nexcept ValueError as e: print(e)"
    command = python_with(script, "unshare", "--user", "--map-root-user", sys.executable)
    done = subprocess.run(**command, capture_output=True, text=True, check=False)
    assert done.stdout == (
        "rewards.verifier code: this host cannot isolate programs: a sandbox (user namespaces of Linux) cannot be "
        "made: unshare: No space left on device\n"
    ), done.stderr


@pytest.mark.skipif(find_library("seccomp") is None, reason="no other list of the calls' numbers is here")
def test_allowed_calls_have_the_numbers_of_libseccomp():
    number = CDLL(find_library("seccomp")).seccomp_syscall_resolve_name_arch
    unknown = -1  # newer than this libseccomp
    wrong = {name for name, n in _ALLOWED_CALLS.items() if number(_ARCH, name.encode()) not in (n, unknown)}
    assert not wrong and number(_ARCH, b"clone3") == _CLONE3 and number(_ARCH, b"clone") == _CLONE


def test_another_architecture_is_refused(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.sandbox_seccomp.MACHINE", "riscv64")
    with pytest.raises(ValueError, match=r"this host cannot isolate programs: it is linux on .*, not linux on"):
        check_sandbox(LIMITS)


FAULTS = {
    "a filter that does not apply": ("sandbox_init.restrict_calls = lambda: None", "in a sandbox has a new process"),
    "an environment that leaks": (
        "import os; e = os.execve; os.execve = lambda p, a, env: e(p, a, env | {'HF_TOKEN': 'x'})",
        "a program in a sandbox has an environment: HF_TOKEN",
    ),
    "rights that are not given up": (
        "l, f = sandbox_init._libc, sandbox_init.restrict_calls; sandbox_init._give_up_rights = lambda uid: None; "
        "sandbox_init.restrict_calls = lambda: (l.prctl(38, 1, 0, 0, 0), f())",
        "this host cannot isolate programs: ",
    ),
    "no limit of threads": (
        "sandbox_init.THREADS = 10000",
        "a program starts 128 threads; Linux since 5.14 allows 8 to 63",
    ),
    "an interpreter that does not start": (
        "from megatron_scalerl.rewards import sandbox_root; sandbox_root.SYSTEM_LIBRARIES = ()",
        "a program cannot be started in its sandbox: [Errno 2] No such file or directory",
    ),
    "a step that fails": (
        "def fail(uid): raise PermissionError(1, 'Operation not permitted')\nsandbox_init._give_up_rights = fail",
        "a sandbox (user namespaces of Linux) cannot be made: Operation not permitted",
    ),
}
"""What is wrong with a sandbox -> how it is made so, in its first process, and what the check says."""


@pytest.mark.parametrize("run", [output, lambda program: verdict(program, "assert True")])
def test_a_program_that_cannot_be_started_is_a_fault_of_the_host_and_no_wrong_answer(run, monkeypatch):
    fail = "def fail(*_): raise PermissionError(13, 'Permission denied', '/dev/null')"
    start_with(monkeypatch, f"{fail}\nsandbox_init._Programs._limit = fail")
    with pytest.raises(SandboxError, match=r"^a program cannot be started in its sandbox: .*'/dev/null'$"):
        run("print(1)")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sandbox_that_does_not_isolate_is_refused_in_one_line(fault, monkeypatch):
    change, said = FAULTS[fault]
    start_with(monkeypatch, change)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check_sandbox(LIMITS)
    assert str(caught.value).startswith("rewards.verifier code: this host cannot isolate programs: ")
    assert "\n" not in str(caught.value)


def test_memory_that_is_not_enough_for_an_interpreter_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"^rewards.memory_mb: 4 MiB are too few"):
        check_sandbox(Limits(cpu_s=1.0, memory_mb=4, file_mb=0))
