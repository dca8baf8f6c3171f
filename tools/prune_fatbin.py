"""Zero the GPU code of other architectures in shared libraries, so that they compress to a part of their size.

    python tools/prune_fatbin.py ARCH LIBRARY [...]        ARCH: 90 keeps sm_90 and sm_90a; 100 those of Blackwell

The driver walks the headers of a fat binary and loads the entry for its chip; it never reads the payload of another.
Only bytes of such payloads become zero: headers, sizes and offsets stay. Where a container has no entry for ARCH, its
PTX of that or an older architecture is kept, which the driver can compile. Prints what each library holds, in MiB.
"""

import argparse
import mmap
import struct
import subprocess
from collections import Counter

from checkout import explained

MAGIC = 0xBA55ED50
PTX = 1
CUBIN = 2
NAMES = {PTX: "ptx"}


def section(path, name=".nv_fatbin"):
    """Offset and bytes of a section of an ELF file; (0, 0) without it."""
    for line in subprocess.check_output(["readelf", "-SW", path], text=True).splitlines():
        words = line.replace("[", " ").replace("]", " ").split()
        if len(words) > 6 and words[1] == name:
            return int(words[4], 16), int(words[5], 16)
    return 0, 0


def containers(data, start, size):
    """(kind, architecture, offset, bytes) of each payload, a list for each container. Raises ValueError."""
    at = start
    while at < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:  # padding
            at += 8
            continue
        entry = at + header
        end = at + header + length
        found = []
        while entry < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            if not head or not payload:
                raise ValueError(f"the fat binary has no entry at offset {entry:#x}")
            found.append((kind, arch, entry + head, payload))
            entry += head + payload
        yield found
        at = end


def prune(path, arch):
    """Zero what a chip of this architecture never reads; bytes by what they are for."""
    sizes = Counter()
    start, size = section(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in containers(data, start, size):
            # a chip runs code for itself; where there is none, the driver compiles PTX of it or an older one
            readable = {(CUBIN, arch)}
            if not any((kind, target) in readable for kind, target, *_ in entries):
                readable = {(kind, target) for kind, target, *_ in entries if kind != CUBIN and target <= arch}
            for kind, target, offset, payload in entries:
                sizes[f"{NAMES.get(kind, 'sm')}_{target}"] += payload
                if (kind, target) not in readable:
                    data[offset : offset + payload] = bytes(payload)
    return sizes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", metavar="ARCH", type=int)
    parser.add_argument("libraries", metavar="LIBRARY", nargs="+")
    with explained():
        options = parser.parse_args()
        for library in options.libraries:
            table = prune(library, options.arch)
            print(
                f"{library}: {', '.join(f'{k} {v / 2**20:.1f}' for k, v in sorted(table.items())) or 'no GPU code'}"
            )
