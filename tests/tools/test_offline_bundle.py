"""What a bundle for a GPU machine without a package index leaves out: GPU code of other chips, and packages."""

import struct
import subprocess
import sys
from pathlib import Path

from prune_fatbin import CUBIN, MAGIC, PTX, prune

ROOT = Path(__file__).parent.parent.parent


def entry(kind, arch, payload):
    """An entry of a container: its header of 64 bytes, then the code."""
    return struct.pack("<HHIQ", kind, 0, 64, len(payload)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + payload


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def library(folder, fatbin):
    """A shared library with this section, made by the C compiler."""
    source, out = folder / "code.c", folder / "code.so"
    values = ", ".join(map(str, fatbin))
    source.write_text(
        f'__attribute__((section(".nv_fatbin"), aligned(8))) const unsigned char code[] = {{{values}}};\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", out, source], check=True)
    return out


def test_a_part_that_is_cut_writes_what_it_has_found(tmp_path):
    """By the script's own `part`, of pytest that a signal ends in its second test."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_sessionfinish(session):\n    open('report', 'w').write(str(session.testscollected))\n"
    )
    tests = "import time\ndef test_a(): pass\ndef test_b(): open('begun', 'w'); time.sleep(600)\n"
    (tmp_path / "test_slow.py").write_text(tests)
    text = (ROOT / "tools" / "offline_try.sh").read_text()
    function = text[text.index("part() {") : text.index("\nchecks()")]
    script = f'results=.\n{function}\npart cut 20 "$0" -m pytest -q -p no:cacheprovider test_slow.py\n'
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "begun").exists() and "try.sh: cut: exit code 1" in done.stdout  # 124, or 137 where it is slow
    assert (tmp_path / "report").read_text() == "2"


def test_only_code_that_the_chip_never_reads_is_zeroed(tmp_path):
    a100, h100, ptx80, ptx90, ptx100 = (bytes([number]) * 64 for number in (0xA1, 0xA2, 0xA3, 0xA4, 0xA5))
    with_cubin = container(entry(CUBIN, 80, a100), entry(CUBIN, 90, h100), entry(PTX, 90, ptx90))
    without = container(entry(CUBIN, 80, a100), entry(PTX, 80, ptx80), entry(PTX, 90, ptx90), entry(PTX, 100, ptx100))
    path = library(tmp_path, with_cubin + bytes(16) + without)
    before = path.read_bytes()
    held = prune(str(path), 90)
    after = path.read_bytes()
    assert held == {"sm_80": 128, "sm_90": 64, "ptx_80": 64, "ptx_90": 128, "ptx_100": 64}
    assert len(after) == len(before) and after.count(h100) == 1
    assert after.count(ptx90) == after.count(ptx80) == 1  # kept where there is no cubin of the chip
    assert a100 not in after and ptx100 not in after
    zeroed = {at for at in range(len(before)) if before[at] != after[at]}
    assert {before[at] for at in zeroed} == {0xA1, 0xA4, 0xA5}  # no header
    assert prune(str(path), 90) == held and path.read_bytes() == after


def test_a_library_without_gpu_code_stays_as_it_is(tmp_path):
    (tmp_path / "code.c").write_text("int f(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "code.so", "code.c"], cwd=tmp_path, check=True)
    before = (tmp_path / "code.so").read_bytes()
    assert prune(str(tmp_path / "code.so"), 90) == {} and (tmp_path / "code.so").read_bytes() == before


def refused(*argv):
    command = ["bash", ROOT / "tools" / "offline_bundle.sh", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    return done.stderr


def test_refusals_in_one_line(tmp_path):
    assert "--python: expected 3.11 or 3.12, found 3.9" in refused(tmp_path / "out", "--python", "3.9")
    assert "--have: expected a file of pip freeze" in refused(tmp_path / "out", "--have", tmp_path / "none")
    assert "expected an option (--help), found '--arc'" in refused(tmp_path / "out", "--arc", "90")
    assert "expected packages to fetch" in refused(tmp_path / "out", "--only", "no-such-package")
    assert f"{tmp_path} exists" in refused(tmp_path)
    assert not list((tmp_path / "out").glob("wheels/*"))
